#!/usr/bin/env bash
# Everything that is checked, in one command on a fresh clone: style, types and tests, the quickest first.
# Arguments go to pytest, which then runs alone:  bash scripts/test.sh tests/test_tree.py -k mask
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
PATH=$PWD/.venv/bin:$PATH
export PATH

if (($#)); then exec pytest "$@"; fi

step() {
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name" >&2
    "$@"
    printf '== %s: %s s\n' "$name" $((SECONDS - started)) >&2
}
step "style and types" bash scripts/check.sh
step "tests" pytest -n 2 --dist loadfile -m 'not model and not fresh and not ort123 and not arm64'
step "tests of the default model" pytest -m 'model and not fresh and not arm64 and not exports'
step "tests in a fresh environment" pytest -m fresh
step "tests on the oldest onnxruntime" pytest -m ort123
