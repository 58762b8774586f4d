#!/usr/bin/env bash
# Style and types: ruff, then mypy over the packages as they are imported (folders under the name starsd).
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
names=$(mktemp -d)
trap 'rm -rf "$names"' EXIT
mkdir "$names/starsd"
for folder in edge server shared export scripts; do ln -s "$PWD/$folder" "$names/starsd/$folder"; done
MYPYPATH=$names mypy --config-file pyproject.toml -p starsd "$@"
