"""Building an image: stages that are done once, then our files, then the manifest. Killed at any point, it goes on.

A stage that a marker says is done is not repeated; a marker is bound to what the stage was given and to the very tree
it changed. Files are compared with what they should be, and written where they differ.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from starsd.edge import image_manifest
from starsd.edge.image_deb import file_name, write_deb
from starsd.edge.image_mounts import mounted, undo_mounts
from starsd.edge.image_plan import Order, binaries, installing, package_place, prerequisites, steps
from starsd.edge.image_tree import File, Gone, apply, is_applied, write
from starsd.edge.image_wheels import fill_wheelhouse, read_wheelhouse, source_digest
from starsd.edge.l4t_boards import driver_problem
from starsd.edge.l4t_command import Command, CommandError, run
from starsd.shared.errors import UsageError
from starsd.shared.manifest import file_sha256

EMULATOR = "qemu-user-static with binfmt-support"
STAGES = ("prerequisites", "binaries", "wheelhouse", "package", "install", "files", "manifest")


class Marker(msgspec.Struct, frozen=True):
    """A stage that was done: on what, and to which tree."""

    inputs: str
    tree: str


class StageDone(msgspec.Struct, frozen=True):
    """`done` is False where a marker said that there was nothing to do."""

    stage: str
    done: bool


class Builder:
    """One build. `work` is the order's folder; `at` hears of every stage before and after its marker, for tests."""

    def __init__(
        self,
        order: Order,
        work: Path,
        *,
        report: Callable[[StageDone], None] = lambda done: None,
        show: Callable[[str], None] = lambda line: None,
        at: Callable[[str, str], None] = lambda stage, moment: None,
    ) -> None:
        self.order, self.work = order, work
        self._report, self._show, self._at = report, show, at

    def build(self) -> image_manifest.ImageManifest:
        """Make the image. Raises UsageError for a tree it cannot be made in, CommandError when a command fails."""
        order = self.order
        if not (order.root / "usr").is_dir():
            raise UsageError(f"{order.root} holds no root file system: unpack NVIDIA's sample root file system there")
        self.work.mkdir(parents=True, exist_ok=True)
        undo_mounts(order.root, self._run)
        self._once("prerequisites", "", lambda: self._run(prerequisites(order)), tree=False)
        self._once("binaries", str(order.openrm), lambda: self._run(binaries(order)))
        if problem := driver_problem(order.board, order.bsp):
            raise UsageError(f"{order.root}: {problem}")
        if order.house is None:
            folder = self.work / "wheelhouse"
            self._once("wheelhouse", source_digest(order.source), self._fill, tree=False)
            order = self.order = msgspec.structs.replace(order, house=read_wheelhouse(folder, order.bsp.python))
        house = order.house
        assert house is not None
        package = self.work / file_name(house)
        self._once("package", house.digest, lambda: write_deb(house, package), tree=False)
        digest = file_sha256(package)
        self._once("install", digest, lambda: self._install(package))
        self._at("files", "before")
        entries = self._write_files()
        self._at("files", "done")
        made = image_manifest.ImageManifest(
            board=order.board.name,
            l4t=str(order.bsp.release),
            python=order.bsp.python,
            openrm=order.openrm,
            starsd=house.version,
            wheels=house.digest,
            package=digest,
            lock=order.lock,
            user=order.user if order.keys else "",
            entries=entries,
        )
        write(order.root, File(image_manifest.PLACE, image_manifest.encode(made)))
        self._at("manifest", "done")
        self._report(StageDone("manifest", True))
        return made

    def _write_files(self) -> tuple[image_manifest.Entry, ...]:
        """Write what differs, and remove what an earlier image of this tree had and this one has not."""
        root, wanted = self.order.root, steps(self.order)
        before = image_manifest.read(root)
        kept = {step.path for step in wanted}
        for old in before.entries if before else ():
            if old.kind not in ("folder", "gone") and old.path not in kept:
                apply(root, Gone(old.path))
        changed = [step for step in wanted if not is_applied(root, step)]
        for step in changed:
            apply(root, step)
        self._report(StageDone("files", bool(changed)))
        return tuple(image_manifest.entry(step) for step in wanted)

    def _fill(self) -> None:
        fill_wheelhouse(self.work / "wheelhouse", self.order.bsp.python, self.order.source, self._run)

    def _install(self, package: Path) -> None:
        root, place = self.order.root, package_place(self.order)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _no_services(root), mounted(root, self._run):
                shutil.copyfile(package, place)
                self._run(installing(self.order, place))
        except CommandError as error:
            if "exec format error" in str(error).lower():
                raise UsageError(
                    f"programs for aarch64 do not run here, expected {EMULATOR} to be installed"
                ) from error
            raise
        finally:
            shutil.rmtree(place.parent, ignore_errors=True)

    def _once(self, stage: str, inputs: str, do: Callable[[], None], *, tree: bool = True) -> None:
        file = self.work / "stages" / f"{stage}.json"
        marker = Marker(inputs, self._tree() if tree else "")
        if _read_marker(file) == marker:
            self._report(StageDone(stage, False))
            return
        file.unlink(missing_ok=True)
        self._at(stage, "before")
        do()
        self._at(stage, "done")
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(Marker(inputs, self._tree() if tree else "")))
        part.replace(file)
        self._at(stage, "marked")
        self._report(StageDone(stage, True))

    def _tree(self) -> str:
        """Tells a tree that was unpacked anew from the one that a stage changed."""
        found = (self.order.root / "usr").stat()
        return f"{found.st_dev}:{found.st_ino}"

    def _run(self, command: Command) -> None:
        run(command, self.work / "build.log", self._show)


@contextlib.contextmanager
def _no_services(root: Path) -> Iterator[None]:
    """Nothing that is installed starts on this machine: Debian's invoke-rc.d asks policy-rc.d first."""
    policy = File("usr/sbin/policy-rc.d", b"#!/bin/sh\nexit 101\n", mode=0o755)
    apply(root, policy)
    try:
        yield
    finally:
        apply(root, Gone(policy.path))


def _read_marker(file: Path) -> Marker | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Marker)
    except (OSError, msgspec.MsgspecError):
        return None


def work_folder(order: Order, home: Path) -> Path:
    """Where this order's build keeps its markers, wheels, package and log; named by all that decides over them."""
    return home / "images" / order.digest


def private(folder: Path) -> None:
    """Nobody else may look into a work folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
