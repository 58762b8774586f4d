#!/usr/bin/env bash
# The default model decoding on this device: its answer as it is written, then the same once more in machine-readable form.
# Arguments are the question. The last line is one JSON object; identical says that both runs gave the same text.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
question=${*:-Explain in three sentences why the sky is blue.}
answers=$(mktemp -d)
trap 'rm -rf "$answers"' EXIT
trap 'exit 130' INT TERM

generate() { .venv/bin/starsd-edge generate --model smollm2-135m --prompt "$question" --max-new-tokens 96 "$@"; }

printf '%s\n\n' "$question"
generate | tee "$answers/streamed"
generate --json >"$answers/row"
.venv/bin/python - "$answers" <<'PYTHON'
import json
import sys
from pathlib import Path

answers = Path(sys.argv[1])
row = json.loads((answers / "row").read_text())
rate = (row["new_tokens"] - 1) / max(row["seconds"] - row["prefill_seconds"], 1e-9)
print(f"\n{row['new_tokens']} tokens, {rate:.1f} tok/s")
identical = (answers / "streamed").read_text().strip() == row["text"].strip()
print(json.dumps({"edges": 1, "identical": identical, "new_tokens": row["new_tokens"], "tok_s": round(rate, 1)}))
sys.exit(not identical)
PYTHON
