"""`starsd-edge first-boot`: what a device does once. A step that is done has a marker and is not repeated.

The steps change the machine they run on through `Machine`, so that tests can have another one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starsd.edge.enrol import DEVICE_FILE, Device, Enrolment, FromFile, read_device, run_options
from starsd.edge.image_bundles import HOME
from starsd.edge.image_deb import FIRST_BOOT
from starsd.edge.image_progress import Progress, StepState, served
from starsd.edge.image_tree import File, apply, inside
from starsd.shared.errors import StarsdError

EDGE_HOME, SERVICE_USER = f"/{HOME}", "starsd"
PROGRAMS = "/opt/starsd/current/bin"
CREDENTIALS = "/run/credentials/starsd-edge.service"  # where systemd puts them; a variable in a variable stays text
CLOCK_SECONDS = 90.0  # to wait for the time: without it certificates cannot be checked
GROWABLE = ("ext4", "ext3", "ext2")
OPEN = 0o022  # the mask of what the edge's own user is to read


class FirstBootError(StarsdError):
    """A step that failed; the next boot, or the service's next try, begins with it."""


class Machine:
    """The machine that boots: its files below `root`, its programs, its clock."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def run(self, argv: Sequence[str], *, env: dict[str, str] | None = None, give: str = "") -> str:
        """The output of a program. Raises FirstBootError, with its last line, when it fails or is not there."""
        try:
            done = subprocess.run(
                list(argv),
                input=give,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env={**os.environ, **(env or {})},
            )
        except OSError as error:
            raise FirstBootError(f"{argv[0]} cannot be run: {(error.strerror or str(error)).lower()}") from error
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            last = lines[-1].strip()[:300] if lines else "it said nothing"
            raise FirstBootError(f"{argv[0]} failed with status {done.returncode}: {last}")
        return done.stdout.strip()

    def stream(self, argv: Sequence[str], env: dict[str, str], line: Callable[[str], None], *, umask: int = -1) -> None:
        """Run a program that takes long, with that mask for what it makes (-1: ours); its lines as they come.

        Raises FirstBootError as `run` does.
        """
        last = "it said nothing"
        try:
            with subprocess.Popen(
                list(argv),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **env},
                umask=umask,
            ) as child:
                assert child.stdout is not None
                for text in child.stdout:
                    last = text.strip()[:300] or last
                    line(last)
        except OSError as error:
            raise FirstBootError(f"{argv[0]} cannot be run: {(error.strerror or str(error)).lower()}") from error
        if child.returncode:
            raise FirstBootError(f"{argv[0]} failed with status {child.returncode}: {last}")

    def path(self, name: str) -> Path:
        return inside(self.root, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class FirstBoot:
    """All steps, in order. `report` hears of every change, as a row."""

    def __init__(
        self,
        *,
        port: int = 8080,
        machine: Machine | None = None,
        enrolment: Enrolment | None = None,
        report: Callable[[Any], None] | None = None,
    ) -> None:
        self._machine, self._enrolment = machine or Machine(), enrolment or FromFile()
        self._port, self._report = port, report
        self._steps: tuple[tuple[str, str, Callable[[StepState], None]], ...] = (
            ("machine-id", "a number of its own", self._machine_id),
            ("ssh-keys", "SSH host keys of its own", self._ssh_keys),
            ("storage", "all of its storage", self._storage),
            ("clock", "the time", self._clock),
            ("credential", "its credential and its server", self._credential),
            ("compile", "programs made ready", self._compile),
            ("model", "its model, made ready and tried", self._model),
            ("self-test", "a self-test", self._self_test),
        )
        self.progress = Progress([StepState(name, what) for name, what, _ in self._steps])

    def run(self) -> None:
        """Do what is not done yet, then start the edge. Raises FirstBootError at the first step that fails."""
        folder = self._machine.path(FIRST_BOOT)
        folder.mkdir(parents=True, exist_ok=True)
        with served(self.progress, self._address(), self._port) if self._port else contextlib.nullcontext():
            for state, (name, _, do) in zip(self.progress.steps, self._steps, strict=True):
                marker = folder / name
                if marker.exists():
                    self._tell(state, "was done")
                    continue
                self._tell(state, "runs")
                try:
                    do(state)
                except StarsdError as error:
                    self.progress.failed = f"{state.what}: {error}"
                    self._tell(state, "failed", str(error))
                    raise FirstBootError(f"{name}: {error}") from error
                _touch(marker)
                self._tell(state, state.state if state.state == "skipped" else "done", state.note)
            _touch(folder / "done")
            self.progress.finished = True
        if self._machine.path("run/systemd/system").is_dir():
            self._machine.run(["systemctl", "start", "--no-block", "starsd-edge.service"])

    def _address(self) -> str:
        """Where progress is shown. A device file that cannot be read is a step's failure, which is to be shown, too."""
        try:
            return self._device().listen
        except StarsdError:
            return Device().listen

    def _device(self) -> Device:
        file = self._machine.path(DEVICE_FILE)
        return read_device(file) if file.is_file() else Device()

    def _tell(self, step: StepState, state: str, note: str = "") -> None:
        step.state, step.note = state, note
        if self._report is not None:
            self._report({"step": step.name, "state": state, "note": note})
        else:
            print(f"first boot: {step.what}: {state}{f' ({note})' if note else ''}", file=sys.stderr, flush=True)

    def _skip(self, step: StepState, why: str) -> None:
        step.state, step.note = "skipped", why

    def _machine_id(self, step: StepState) -> None:
        file = self._machine.path("etc/machine-id")
        if not file.is_file() or len(file.read_text().strip()) != 32:
            self._machine.run(["systemd-machine-id-setup"])

    def _ssh_keys(self, step: StepState) -> None:
        if not list(self._machine.path("etc/ssh").glob("ssh_host_*_key")):
            self._machine.run(["ssh-keygen", "-A"])

    def _storage(self, step: StepState) -> None:
        """Grow the root partition to the end of its disk, and the file system with it.

        A device works without, so what fails here is said and no more.
        """
        try:
            told = self._machine.run(["findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "/"]).split()[:2]
            if len(told) != 2:
                self._skip(step, f"findmnt says {' '.join(told)!r} of /, expected its device and its kind")
                return
            source, kind = told
            if kind not in GROWABLE or not source.startswith("/dev/"):
                self._skip(step, f"{source} is {kind}")
                return
            number = self._machine.path(f"sys/class/block/{source.removeprefix('/dev/')}/partition")
            if number.is_file():  # its folder lies in that of its disk
                disk = f"/dev/{number.parent.parent.name}"
                self._machine.run(
                    ["sfdisk", "--no-reread", "--force", "-N", number.read_text().strip(), disk], give=",+\n"
                )
                self._machine.run(["partx", "--update", disk])
            self._machine.run(["resize2fs", source])
        except FirstBootError as error:
            self._skip(step, str(error))

    def _clock(self, step: StepState) -> None:
        waited = 0.0
        try:
            while self._machine.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"]) != "yes":
                if waited >= CLOCK_SECONDS:
                    self._skip(step, "no time server answered")
                    return
                self._machine.sleep(1.0)
                waited += 1.0
        except FirstBootError as error:
            self._skip(step, str(error))

    def _credential(self, step: StepState) -> None:
        """Split the per-device file into what the service may see, and secrets that systemd hands it."""
        device = self._device()
        token = self._enrolment.credential(device)
        options = run_options(device)
        if device.api_key:
            options += ["--api-key-file", f"{CREDENTIALS}/api-key"]
        root = self._machine.root
        for path, text, mode in (
            ("etc/starsd/token", token, 0o600),
            ("etc/starsd/api-key", device.api_key, 0o600),
            ("etc/starsd/edge.env", f"STARSD_OPTIONS={' '.join(options)}\n", 0o644),
        ):
            apply(root, File(path, text.encode(), mode=mode, secret=mode == 0o600, uid=os.geteuid(), gid=os.getegid()))

    def _compile(self, step: StepState) -> None:
        """Byte code, since the service may not write any. It may read it, whatever the mask of this process is."""
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        library = self._machine.run([f"{PROGRAMS}/python", "-c", where])
        compile_all = [f"{PROGRAMS}/python", "-m", "compileall", "-q", library]
        self._machine.stream(compile_all, {}, lambda line: None, umask=OPEN)

    def _model(self, step: StepState) -> None:
        """One answer, as the user that the edge runs as: makes what is missing on the way."""
        home = self._machine.path(EDGE_HOME)
        home.mkdir(parents=True, exist_ok=True)
        self._machine.run(["chown", "--recursive", f"{SERVICE_USER}:{SERVICE_USER}", str(home)])
        device = self._device()
        precision = ["--precision", device.precision] if device.precision else []
        ask = ["generate", "--model", device.model, *precision, "--policy", "plain", "--prompt", "Say hello."]
        argv = ["runuser", "-u", SERVICE_USER, "--", f"{PROGRAMS}/starsd-edge", *ask, "--max-new-tokens", "8", "--json"]

        def line(text: str) -> None:
            step.note = text if not text.startswith("{") else "it answers"

        self._machine.stream(argv, {"STARSD_HOME": EDGE_HOME, "HOME": EDGE_HOME}, line)

    def _self_test(self, step: StepState) -> None:
        argv = ["runuser", "-u", SERVICE_USER, "--", f"{PROGRAMS}/starsd", "doctor", "--json"]
        self._machine.run(argv, env={"STARSD_HOME": EDGE_HOME, "HOME": EDGE_HOME})


def _touch(path: Path) -> None:
    with path.open("wb") as file:
        os.fsync(file.fileno())
