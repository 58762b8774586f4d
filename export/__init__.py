"""From published weights to target bundles: pull, convert, build graphs, quantise, check."""
