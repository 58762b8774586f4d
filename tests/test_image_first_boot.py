"""A device's first boot, on a machine that is a folder: every step once, in order, whatever stops it in between."""

from __future__ import annotations

import json
import os
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from fake_bsp import let_anyone_own

from starsd.edge import image_first_boot
from starsd.edge.cli import main
from starsd.edge.image_first_boot import FirstBoot, FirstBootError, Machine
from starsd.edge.image_progress import Progress, StepState, served

STEPS = ["machine-id", "ssh-keys", "storage", "clock", "credential", "compile", "model", "self-test"]
DEVICE = {
    "server": "wss://drafts.example",
    "token": "hush-token",
    "api_key": "hush-key-12345678",
    "listen": "127.0.0.1",
}
PROGRAMS = "/opt/starsd/current/bin"


class Fake(Machine):
    """Answers like a Jetson that starts from an NVMe drive; `fails` ends the first program with that name once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ran: list[list[str]] = []
        self.given: list[str] = []
        self.slept = 0.0
        self.fails = ""
        self.answers = {"findmnt": "/dev/nvme0n1p1 ext4", "timedatectl": "yes"}
        self.while_model: Callable[[], None] = lambda: None

    def run(self, argv: Sequence[str], *, env: dict[str, str] | None = None, give: str = "") -> str:
        self.ran.append(list(argv))
        self.given += [give] if give else []
        if argv[0] == self.fails:
            self.fails = ""
            raise FirstBootError(f"{argv[0]} failed with status 1: out of luck")
        return self.answers.get(argv[0], "")

    def stream(self, argv: Sequence[str], env: dict[str, str], line: Callable[[str], None], *, umask: int = -1) -> None:
        self.run(argv, env=env)
        if argv[0] == "runuser":
            line("exporting 40 %")
            self.while_model()

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    let_anyone_own(monkeypatch)
    for name in ("etc/starsd", "etc/ssh", "var/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/machine-id").touch()
    disk = tmp_path / "sys/devices/pci0/nvme0n1"
    (disk / "nvme0n1p1").mkdir(parents=True)
    (disk / "nvme0n1p1/partition").write_text("1\n")
    (tmp_path / "sys/class/block").mkdir(parents=True)
    (tmp_path / "sys/class/block/nvme0n1p1").symlink_to("../../devices/pci0/nvme0n1/nvme0n1p1")
    (tmp_path / "etc/starsd/device.json").write_text(json.dumps(DEVICE))
    return Fake(tmp_path)


def boot(machine: Fake, **options: Any) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    FirstBoot(port=0, machine=machine, report=rows.append, **options).run()
    return rows


def test_every_step_is_done_in_order(machine: Fake) -> None:
    (machine.root / "run/systemd/system").mkdir(parents=True)
    rows = boot(machine)
    assert [row["step"] for row in rows if row["state"] == "done"] == STEPS
    answer = [f"{PROGRAMS}/starsd-edge", "generate", "--model", "smollm2-135m", "--policy", "plain"]
    answer += ["--prompt", "Say hello.", "--max-new-tokens", "8", "--json"]
    assert [argv for argv in machine.ran if "compileall" not in argv and "-c" not in argv] == [
        ["systemd-machine-id-setup"],
        ["ssh-keygen", "-A"],
        ["findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "/"],
        ["sfdisk", "--no-reread", "--force", "-N", "1", "/dev/nvme0n1"],
        ["partx", "--update", "/dev/nvme0n1"],
        ["resize2fs", "/dev/nvme0n1p1"],
        ["timedatectl", "show", "--property=NTPSynchronized", "--value"],
        ["chown", "--recursive", "starsd:starsd", str(machine.root / "var/lib/starsd")],
        ["runuser", "-u", "starsd", "--", *answer],
        ["runuser", "-u", "starsd", "--", f"{PROGRAMS}/starsd", "doctor", "--json"],
        ["systemctl", "start", "--no-block", "starsd-edge.service"],
    ]
    assert machine.given == [",+\n"]


def test_the_device_file_is_split_into_options_and_secrets(machine: Fake) -> None:
    rows = boot(machine)
    files = {path.name: path for path in (machine.root / "etc/starsd").iterdir()}
    assert files["token"].read_text() == "hush-token"
    assert files["api-key"].read_text() == "hush-key-12345678"
    assert files["edge.env"].read_text() == (
        "STARSD_OPTIONS=--model smollm2-135m --host 127.0.0.1 --server wss://drafts.example "
        "--api-key-file /run/credentials/starsd-edge.service/api-key\n"
    )
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in files.items() if name != "device.json"}
    assert modes == {"token": 0o600, "api-key": 0o600, "edge.env": 0o644}
    assert "hush" not in json.dumps([rows, machine.ran])


def test_without_a_device_file_it_drafts_alone(machine: Fake) -> None:
    (machine.root / "etc/starsd/device.json").unlink()
    boot(machine)
    assert (machine.root / "etc/starsd/token").read_bytes() == b""
    assert (
        machine.root / "etc/starsd/edge.env"
    ).read_text() == "STARSD_OPTIONS=--model smollm2-135m --host 127.0.0.1\n"


def test_a_second_time_nothing_is_done(machine: Fake) -> None:
    boot(machine)
    machine.ran.clear()
    assert [row["state"] for row in boot(machine)] == ["was done"] * len(STEPS)
    assert machine.ran == []


@pytest.mark.parametrize(
    ("program", "step", "done"),
    [("ssh-keygen", "ssh-keys", 1), ("chown", "model", 6), ("runuser", "model", 6)],
)
def test_it_goes_on_where_it_failed(machine: Fake, program: str, step: str, done: int) -> None:
    machine.fails = program
    with pytest.raises(FirstBootError, match=f"{step}: {program} failed with status 1: out of luck"):
        boot(machine)
    assert not (machine.root / "var/lib/starsd-first-boot/done").exists()
    rows = boot(machine)
    assert [row["state"] for row in rows[:done]] == ["was done"] * done
    assert [row["step"] for row in rows if row["state"] == "done"] == STEPS[done:]
    assert (machine.root / "var/lib/starsd-first-boot/done").exists()


def test_identities_that_are_there_are_kept(machine: Fake) -> None:
    (machine.root / "etc/machine-id").write_text("0" * 32 + "\n")
    (machine.root / "etc/ssh/ssh_host_ed25519_key").touch()
    boot(machine)
    assert not {"systemd-machine-id-setup", "ssh-keygen"} & {argv[0] for argv in machine.ran}


def test_a_clock_that_nobody_sets_is_no_reason_to_stop(machine: Fake) -> None:
    machine.answers["timedatectl"] = "no"
    rows = boot(machine)
    assert {"step": "clock", "state": "skipped", "note": "no time server answered"} in rows
    assert machine.slept == 90


def test_a_clock_that_cannot_be_asked_is_no_reason_to_stop(machine: Fake) -> None:
    machine.fails = "timedatectl"
    note = "timedatectl failed with status 1: out of luck"
    assert {"step": "clock", "state": "skipped", "note": note} in boot(machine)


def test_storage_that_does_not_grow_is_left_alone(machine: Fake) -> None:
    machine.answers["findmnt"] = "overlay overlay"
    assert {"step": "storage", "state": "skipped", "note": "overlay is overlay"} in boot(machine)
    assert not [argv for argv in machine.ran if argv[0] in ("sfdisk", "resize2fs")]


@pytest.mark.parametrize("said", ["", "/dev/nvme0n1p1"])
def test_storage_of_which_nothing_is_told_is_left_alone(machine: Fake, said: str) -> None:
    machine.answers["findmnt"] = said
    note = f"findmnt says {said!r} of /, expected its device and its kind"
    assert {"step": "storage", "state": "skipped", "note": note} in boot(machine)


def test_storage_that_cannot_grow_is_no_reason_to_stop(machine: Fake) -> None:
    machine.fails = "sfdisk"
    note = "sfdisk failed with status 1: out of luck"
    assert {"step": "storage", "state": "skipped", "note": note} in boot(machine)


def test_a_missing_credential_stops_it_with_a_remedy(machine: Fake) -> None:
    (machine.root / "etc/starsd/device.json").write_text('{"server": "wss://drafts.example"}')
    with pytest.raises(
        FirstBootError, match=r"credential: the device file names wss://drafts.example and no token: add one"
    ):
        boot(machine)


def test_another_enrolment_brings_the_credential(machine: Fake) -> None:
    class Code:
        def credential(self, device: Any) -> str:
            return "from-a-code"

    boot(machine, enrolment=Code())
    assert (machine.root / "etc/starsd/token").read_text() == "from-a-code"


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return bytes(answer.read())


def test_progress_is_shown_over_http(machine: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    started = FirstBoot(port=0, machine=machine, report=lambda row: None)
    with served(started.progress, "127.0.0.1", 0) as port:
        assert port is not None
        machine.while_model = lambda: seen.append(json.loads(get(port, "/progress")))
        started.run()
        page = get(port, "/").decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(port, "/etc/passwd")
    steps = {step["name"]: step for step in seen[0]["steps"]}
    assert (steps["model"]["state"], steps["model"]["note"]) == ("runs", "exporting 40 %")
    assert (steps["compile"]["state"], steps["self-test"]["state"], seen[0]["finished"]) == ("done", "waits", False)
    assert "<p>Ready.</p>" in page
    assert page.count("<b>done</b>") == len(STEPS)


def test_a_device_file_that_cannot_be_read_is_shown_as_the_failure_of_its_step(machine: Fake) -> None:
    (machine.root / "etc/starsd/device.json").write_text('{"server": ')
    with served(Progress([]), "127.0.0.1", 0) as port:
        pass
    shown: list[str] = []
    machine.answers["findmnt"] = ""
    run = machine.run

    def look(argv: Sequence[str], **more: Any) -> str:
        if argv[0] == "timedatectl":
            shown.append(get(port or 0, "/progress").decode())
        return run(argv, **more)

    machine.run = look  # type: ignore[method-assign]
    started = FirstBoot(port=port or 0, machine=machine, report=lambda row: None)
    with pytest.raises(FirstBootError, match=r"credential: .*device\.json"):
        started.run()
    assert '"name":"clock","what":"the time","state":"runs"' in shown[0]
    assert "device.json" in started.progress.failed


def test_the_edges_user_may_read_the_byte_code(machine: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the mask of the unit."""
    library, programs = tmp_path / "library", tmp_path / "programs"
    for folder in (library, programs):
        folder.mkdir(mode=0o755)
    (library / "one.py").write_text("x = 1\n")
    script = f'#!/bin/sh\n[ "$1" = -m ] || exec echo {library}\nexec {sys.executable} "$@"\n'
    (programs / "python").write_text(script)
    (programs / "python").chmod(0o755)
    monkeypatch.setattr(image_first_boot, "PROGRAMS", str(programs))
    before = os.umask(0o077)
    try:
        FirstBoot(port=0, machine=Machine(tmp_path))._compile(StepState("compile", ""))
    finally:
        os.umask(before)
    cache = library / "__pycache__"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755
    assert [stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()] == [0o644]
    unit = resources.files("starsd.edge").joinpath("units", "starsd-first-boot.conf").read_text()
    assert "Environment=PYTHONDONTWRITEBYTECODE=1\n" in unit  # else this program itself writes some, before that step


def test_what_a_page_shows_is_text() -> None:
    page = Progress([StepState("a", "b", "failed", "<script>")], failed="<b>").page().decode()
    assert "&lt;script&gt;" in page
    assert "Failed: &lt;b&gt;" in page


def test_a_taken_port_is_no_reason_to_stop() -> None:
    progress = Progress([])
    with served(progress, "127.0.0.1", 0) as port, served(progress, "127.0.0.1", port or 0) as second:
        assert second is None


def test_a_machine_runs_programs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.run(["sh", "-c", "cat; echo $X"], env={"X": "y"}, give="a ") == "a y"
    lines: list[str] = []
    machine.stream(["sh", "-c", "echo one; echo two >&2"], {}, lines.append)
    assert lines == ["one", "two"]
    binary = ["sh", "-c", "printf '\\377\\376'"]
    assert machine.run(binary) == "\ufffd\ufffd"
    machine.stream(binary, {}, lines.append)
    assert lines[2:] == ["\ufffd\ufffd"]
    for call in (machine.run, lambda argv: machine.stream(argv, {}, lines.append)):
        with pytest.raises(FirstBootError, match="sh failed with status 3: no"):
            call(["sh", "-c", "echo no; exit 3"])
        with pytest.raises(FirstBootError, match="nothing-here cannot be run: no such file or directory"):
            call(["nothing-here"])


def test_it_takes_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["first-boot"]) == 1
    assert capsys.readouterr().err == "starsd-edge: the first boot needs root, got user 1000: run it with sudo\n"
