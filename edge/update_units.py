"""What an update may change of systemd's units, and what only the package does.

    /usr/lib/systemd/system/starsd-edge.service                  the package's: its name, and when it is started
    /usr/lib/systemd/system/starsd-edge.service.d/release.conf   the package's: a link to the next one
    /opt/starsd/current/units/starsd-edge.conf                   the release's: everything else

So the settings change, and change back, with the link `current`. Which units there are, and the user that they run as,
an update cannot change.
"""

from __future__ import annotations

import os
from pathlib import Path

from starsd.edge.image_deb import SYSTEM, SYSUSERS, settings_link


def unit_problem(slot: Path, link: Path, root: Path = Path("/")) -> str | None:
    """Why the release in `slot` cannot run on this device once `link` leads to it: it needs what only its package
    installs. None when it can, or when no package is installed here."""
    system, ours = root / SYSTEM, slot / "units"
    units = {path.name for path in system.glob("starsd-*.service")}
    if not units:
        return None
    if missing := sorted(units - {path.name for path in ours.glob("*.service")}):
        return f"has no {missing[0]}, which this device has"
    for path in sorted(ours.glob("*.service")):
        if _differ(path, system / path.name):
            return f"needs another {path.name} than this device has"
        place, wanted = root / settings_link(path.name), link / "units" / f"{path.stem}.conf"
        if not place.is_symlink() or os.path.normpath(place.parent / os.readlink(place)) != str(wanted):
            return f"brings settings of {path.name}, and {place} does not lead to them"
    if _differ(ours / "starsd-sysusers.conf", root / SYSUSERS):
        return "needs another user or other groups than this device has"
    return None


def _differ(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() != other.read_bytes()
    except OSError:
        return True
