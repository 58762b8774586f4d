"""The edge restarted on another release: whether it stays up, and what of systemd is asked for that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_bsp import calls_of, recorder

from starsd.edge.update_restart import restart_edge
from starsd.edge.update_slots import UpdateError

STATE = "ActiveState=active MainPID=7 NRestarts=0"
STAYS = r"starsd-edge\.service does not stay up: see journalctl -u starsd-edge\.service"
UP = ["daemon-reload", "is-enabled", "reset-failed", "restart", "show", "show"]


class Systemd:
    """A device below a folder, whose systemctl fails when asked for `fails`, and shows one state after another."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder, folder / "bin"
        self.asks()

    def asks(self, fails: str = "", *states: str) -> None:
        said = self.root / "states"
        said.write_text("".join(f"{state}\n" for state in states or (STATE,)))
        then = f"""
[ "$1" != "{fails}" ] || {{ echo "$1 is out of luck" >&2; exit 1; }}
[ "$1" = show ] || exit 0
head -n 1 {said} | tr ' ' '\\n'
[ "$(wc -l <{said})" -eq 1 ] || sed -i 1d {said}"""
        recorder(self.bin / "systemctl", self.root / "calls", then)

    def asked(self) -> list[str]:
        return [call[1] for call in calls_of(self.root / "calls")]

    def has(self, *folders: str) -> None:
        for folder in folders:
            (self.root / folder).mkdir(parents=True)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    made = Systemd(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    return made


@pytest.mark.parametrize(
    ("fails", "message", "asked"),
    [
        ("", "", UP),
        ("is-enabled", "", UP[:2]),
        ("reset-failed", "", UP),
        ("daemon-reload", "the units cannot be read again: daemon-reload is out of luck", UP[:1]),
        ("restart", r"starsd-edge\.service does not start: restart is out of luck", UP[:4]),
        ("show", r"starsd-edge\.service cannot be looked at: show is out of luck", UP[:5]),
    ],
)
def test_units_are_read_again_before_the_edge_is_restarted(
    systemd: Systemd, fails: str, message: str, asked: list[str]
) -> None:
    systemd.asks(fails)
    restart_edge(systemd.root, 0, systemd.root)
    assert systemd.asked() == []
    systemd.has("run/systemd/system", "var/lib/starsd-first-boot/done")
    if message:
        with pytest.raises(UpdateError, match=message):
            restart_edge(systemd.root, 0, systemd.root)
    else:
        restart_edge(systemd.root, 0, systemd.root)
    assert systemd.asked() == asked


@pytest.mark.parametrize(
    "states",
    [
        ["ActiveState=failed MainPID=0 NRestarts=0"],
        ["ActiveState=activating MainPID=0 NRestarts=1"],
        [STATE, STATE, "ActiveState=activating MainPID=0 NRestarts=1"],
        [STATE, STATE, "ActiveState=active MainPID=9 NRestarts=1"],  # it has crashed, and is up at every look
        [STATE, STATE, "ActiveState=active MainPID=9 NRestarts=0"],
        ["nothing of use"],
    ],
    ids=lambda states: states[-1],
)
def test_an_edge_that_crashes_does_not_stay_up(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, states: list[str]
) -> None:
    monkeypatch.setattr("starsd.edge.update_restart.LOOK_EVERY", 0.01)
    systemd.has("run/systemd/system", "var/lib/starsd-first-boot/done")
    systemd.asks("", *states)
    with pytest.raises(UpdateError, match=STAYS):
        restart_edge(systemd.root, 60, systemd.root)
    assert systemd.asked()[:4] == UP[:4]


def test_before_the_first_boot_is_over_the_edge_is_not_expected_to_run(systemd: Systemd) -> None:
    systemd.has("run/systemd/system")
    restart_edge(systemd.root, 0, systemd.root)
    assert calls_of(systemd.root / "calls") == [["systemctl", "daemon-reload"]]
