"""The edge's service restarted on another release, and watched for a while."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

from starsd.edge.image_deb import FIRST_BOOT
from starsd.edge.update_slots import UpdateError, run_program

UNIT = "starsd-edge.service"
SETTLE_SECONDS = 20.0  # for the edge to fail after a switch, if it does
LOOK_EVERY = 1.0  # seconds
_SHOWN = ("ActiveState", "MainPID", "NRestarts")


def restart_edge(slot: Path, settle: float = SETTLE_SECONDS, root: Path = Path("/")) -> None:
    """Have the units read again and restart the service, where there is one, and see whether it stays up.

    Before a device's first boot is over there is nothing to see. Raises UpdateError when it does not stay up; one that
    systemd starts again and again does not.
    """
    if not (root / "run/systemd/system").is_dir():
        return
    run_program(["systemctl", "daemon-reload"], "the units cannot be read again")
    if not (root / FIRST_BOOT / "done").exists():
        return
    if subprocess.run(["systemctl", "is-enabled", "--quiet", UNIT], check=False).returncode:
        return
    with contextlib.suppress(UpdateError):  # what failed before must not count against this start
        run_program(["systemctl", "reset-failed", UNIT], "")
    run_program(["systemctl", "restart", UNIT], f"{UNIT} does not start")
    first, until = _state(), time.monotonic() + settle
    while True:
        now = _state()
        if now.get("ActiveState") != "active" or now != first:
            raise UpdateError(f"{UNIT} does not stay up: see journalctl -u {UNIT}")
        if (left := until - time.monotonic()) <= 0:
            return
        time.sleep(min(LOOK_EVERY, left))


def _state() -> dict[str, str]:
    argv = ["systemctl", "show", f"--property={','.join(_SHOWN)}", UNIT]
    lines = run_program(argv, f"{UNIT} cannot be looked at").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)
