#!/usr/bin/env bash
# One drafter and four devices on this machine, 80 ms apart: sets itself up, fetches a small model, and shows a table.
# Options are those of `starsd demo`. The last line on stdout is one JSON object; identical says that no draft changed a
# token.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/starsd demo "$@"
