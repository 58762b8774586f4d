#!/bin/sh
# Install a wheelhouse into one of two environments, without a network:  install-release.sh WHEELHOUSE SLOT
# SLOT is a folder; what it held is replaced. The wheelhouse brings pip too, so that the system need not have it.
set -eu
wheelhouse=$1
slot=$2
rm -rf "$slot"
mkdir -p "${slot%/*}"
python3 -m venv --without-pip --system-site-packages "$slot"
pip=$(echo "$wheelhouse"/pip-*.whl)
"$slot/bin/python" "$pip/pip" --disable-pip-version-check --no-cache-dir --no-input --isolated \
    install --quiet --no-index --no-deps --ignore-installed --no-compile --no-warn-script-location \
    --require-hashes --requirement "$wheelhouse/requirements.txt" -f "$wheelhouse"
cp "$wheelhouse/release.json" "$slot/release.json"
"$slot/bin/starsd-edge" --version
