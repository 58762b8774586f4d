#!/bin/sh
# Install a wheelhouse into one of two environments, without a network:  install-release.sh WHEELHOUSE SLOT
# Both are absolute. SLOT is a folder; what it held is replaced. The wheelhouse brings pip too, so that the system need
# not have it.
set -eu
umask 022 # whoever installs: the edge's own user is to read it
wheelhouse=$1
slot=$2
rm -rf "$slot"
mkdir -p "${slot%/*}"
python3 -m venv --without-pip --system-site-packages "$slot"
pip=$(echo "$wheelhouse"/pip-*.whl)
"$slot/bin/python" "$pip/pip" --disable-pip-version-check --no-cache-dir --no-input --isolated \
    install --quiet --no-index --no-deps --ignore-installed --no-compile --no-warn-script-location \
    --require-hashes --requirement "$wheelhouse/requirements.txt" -f "$wheelhouse"
install -m 644 "$wheelhouse/release.json" "$slot/release.json"
# systemd's settings of our units, which links lead to: no version of Python is to be in their way
cd "$slot"
for units in lib/python3*/site-packages/starsd/edge/units; do
    [ -f "$units/starsd-edge.conf" ]
    ln -s "$units" units
done
cd /
"$slot/bin/starsd-edge" --version
