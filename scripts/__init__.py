"""Commands that join the halves: `starsd`, benches, demo, doctor."""
