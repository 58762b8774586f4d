"""Building an image: stages that are done once, then our files, then the manifest. Killed at any point, it goes on.

A stage that a marker says is done is not repeated; a marker is bound to what the stage was given and to the very tree
it changed. Files are compared with what they should be, and written where they differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from starsd.edge import image_manifest
from starsd.edge.image_alone import alone
from starsd.edge.image_deb import SLOTS, file_name, write_deb
from starsd.edge.image_mounts import check_places, mounted, undo_mounts
from starsd.edge.image_plan import (
    NO_SERVICES,
    PACKAGE_FOLDER,
    Order,
    binaries,
    installing,
    package_place,
    prerequisites,
    steps,
)
from starsd.edge.image_tree import File, Gone, Step, apply, inside, is_applied, write
from starsd.edge.image_users import ACCOUNTS, without_user
from starsd.edge.image_wheels import fill_wheelhouse, read_wheelhouse, source_digest
from starsd.edge.l4t import check_stated
from starsd.edge.l4t_boards import driver_problem
from starsd.edge.l4t_command import Command, CommandError, run
from starsd.shared.errors import BundleError, UsageError
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
        """Make the image. Raises UsageError for a tree it cannot be made in, or that another build or flash works with,
        CommandError when a command fails."""
        if not (self.order.root / "usr").is_dir():
            raise UsageError(
                f"{self.order.root} holds no root file system: unpack NVIDIA's sample root file system there"
            )
        folder = self.order.bsp.folder
        with alone(f"build or flash of {folder}", folder), alone(f"build in {self.work}", self.work):
            return self._build()

    def _build(self) -> image_manifest.ImageManifest:
        order = self.order
        check_places(order.root)
        undo_mounts(order.root, self._run)
        self._once("prerequisites", "", lambda: self._run(prerequisites(order)), tree=False)
        self._once("binaries", str(order.openrm), lambda: self._run(binaries(order)))
        check_stated(order.bsp)
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
        wanted = self._make_room()
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
            bundles={one.name: hashlib.sha256(one.raw).hexdigest() for one in order.bundles},
            entries=tuple(image_manifest.entry(step) for step in wanted),
        )
        self._write_files(wanted, made)
        self._at("files", "done")
        write(order.root, File(image_manifest.PLACE, image_manifest.encode(made)))
        self._at("manifest", "done")
        self._report(StageDone("manifest", True))
        return made

    def _make_room(self) -> list[Step]:
        """Remove what an earlier image of this tree had and this one has not; returns what this one has."""
        root, before = self.order.root, self._before()
        if before and before.user and before.user != (self.order.user if self.order.keys else ""):
            for step in without_user(root, before.user):
                apply(root, step)
        wanted = steps(self.order)
        kept = {step.path for step in wanted} | set(ACCOUNTS)
        unkept = [old for old in (before.entries if before else ()) if old.path not in kept and old.kind != "gone"]
        for old in reversed(unkept):  # folders come before what they hold
            image_manifest.forget(root, old)
        return wanted

    def _before(self) -> image_manifest.ImageManifest | None:
        try:
            return image_manifest.read(self.order.root)
        except BundleError as error:
            self._show(f"{error}; what else that image had stays in the tree: unpack it anew to be rid of it")
            return None

    def _write_files(self, wanted: list[Step], made: image_manifest.ImageManifest) -> None:
        """Write what differs. A build that is killed meanwhile leaves a manifest of all that it may have written."""
        root = self.order.root
        changed = [step for step in wanted if not is_applied(root, step)]
        if changed:
            begun = msgspec.structs.replace(made, finished=False)
            write(root, File(image_manifest.PLACE, image_manifest.encode(begun)))
        for step in changed:
            apply(root, step)
        self._report(StageDone("files", bool(changed)))

    def _fill(self) -> None:
        fill_wheelhouse(self.work / "wheelhouse", self.order.bsp.python, self.order.source, self._run)

    def _install(self, package: Path) -> None:
        root, place = self.order.root, package_place(self.order)
        for old in (PACKAGE_FOLDER, SLOTS[1:]):  # an earlier installation would stay as a second environment
            apply(root, Gone(old))
        place.parent.mkdir(parents=True)
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
            apply(root, Gone(PACKAGE_FOLDER))

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
    policy = inside(root, NO_SERVICES.path, follow_last=False)
    own = policy.with_name(f"{policy.name}.starsd-kept")  # the tree's; a build that was killed left it there
    if os.path.lexists(policy) and not is_applied(root, NO_SERVICES):
        policy.replace(own)
    apply(root, NO_SERVICES)
    try:
        yield
    finally:
        apply(root, Gone(NO_SERVICES.path))
        if os.path.lexists(own):
            own.replace(policy)


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
