#!/bin/sh
# Before the edge starts: back from a release that nobody has seen work, since its update was stopped meanwhile, by a
# power cut perhaps. See update_slots.py.   take-back.sh [SLOTS]
# Ends with 1 when it went back: the unit is then started again, with the settings of the release that runs now.
set -eu
cd "${1:-/opt/starsd}"
[ -f trying ] || exit 0
exec 9>>.starsd.lock
flock --nonblock 9 || exit 0 # the update is under way, and looks by itself
tried='' before=''
read -r tried before <trying || :
case $before in
a | b)
    if [ "$(readlink current)" = "$tried" ] && [ -f "$before/release.json" ]; then
        echo "the update of $tried was stopped before it was seen to work: back to $before" >&2
        ln -sfn "$before" next
        mv -T next current
        sync --file-system .
        rm -f trying
        systemctl daemon-reload || :
        exit 1
    fi
    ;;
esac
rm -f trying
