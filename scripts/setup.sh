#!/usr/bin/env bash
# Makes .venv with everything that development needs, from constraints.txt. Quiet and quick when nothing has changed.
# $PYTHON chooses the interpreter, Python 3.10 to 3.13; without it python3 is taken, or the first versioned one that fits.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

interpreter() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        fits "$PYTHON" && echo "$PYTHON" && return
        say "PYTHON is $PYTHON ($("$PYTHON" --version 2>&1 || true)), expected Python 3.10 to 3.13"
        return 1
    fi
    for candidate in python3 python3.12 python3.11 python3.13 python3.10; do
        fits "$candidate" && echo "$candidate" && return
    done
    say "python3 is $(python3 --version 2>&1 || true), expected Python 3.10 to 3.13: install one or set PYTHON"
    return 1
}

# What .venv stands on and what is in it. A moved folder has to be made again: its commands name their interpreter by path.
base() { echo "$PWD $("$python" --version)"; }
recipe() { { echo "$PWD ${PYTHON:-}"; cat pyproject.toml constraints.txt scripts/setup.sh; } | sha256sum; }

up_to_date() { [[ -f .venv/stamp && $(sed -n 1p .venv/stamp) == "$wanted" ]] && .venv/bin/python -c '' 2>/dev/null; }

wanted=$(recipe)
if up_to_date; then exit 0; fi

# One set-up at a time: the folder itself is the lock, and whoever waited finds the work done.
exec 9<.
if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another set-up"
    flock 9
fi
if up_to_date; then exit 0; fi

python=$(interpreter)
if [[ -f .venv/stamp && $(sed -n 2p .venv/stamp) == "$(base)" ]] && .venv/bin/python -c '' 2>/dev/null; then
    say "updating .venv"
    rm .venv/stamp # an interrupted update starts over
else
    say "making .venv with $("$python" --version), some minutes the first time"
    if ! "$python" -m venv --clear .venv >&2; then
        say "$python cannot make an environment; Debian and Ubuntu have it in the package python3-venv"
        exit 1
    fi
fi
install() { # says something only when it fails: pip warns of much that is none of the user's business
    local said
    if ! said=$(.venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet -c constraints.txt "$@" 2>&1)
    then
        printf '%s\n' "$said" >&2
        return 1
    fi
}
install pip setuptools
install --no-build-isolation -e '.[dev]'
printf '%s\n' "$wanted" "$(base)" >.venv/stamp
