"""`starsd-edge image`, `flash`, `update` and `first-boot`: from NVIDIA's package to a device that stays up to date."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from starsd.edge import l4t_lock
from starsd.edge.image_alone import alone
from starsd.edge.image_users import DEFAULT_USER
from starsd.edge.l4t import EXAMPLE, open_bsp
from starsd.edge.l4t_boards import BOARDS, check_openrm, check_release, find_board
from starsd.edge.l4t_command import Command, must_be_root, run
from starsd.shared.console import emit
from starsd.shared.errors import UsageError
from starsd.shared.home import home

DEFAULT_LOCK = Path("starsd-lock.json")
image = typer.Typer(help="Root file systems that boot into a working edge.", no_args_is_help=True)

L4t = Annotated[Path, typer.Option("--l4t", help="NVIDIA's Linux_for_Tegra, unpacked.")]
Stated = Annotated[
    str, typer.Option("--l4t-release", help=f"Its release, such as {EXAMPLE}, where no file in it tells.")
]
BoardName = Annotated[str, typer.Option("--board", help=f"{', '.join(BOARDS)}.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]
DryRun = Annotated[bool, typer.Option(help="Show the commands, run none; needs neither root nor a board.")]
Wheels = Annotated[Path | None, typer.Option(help="Folder with all wheels a device needs; filled by pip if not given.")]
LockFile = Annotated[Path, typer.Option("--lock", help="The lock file.")]
Source = Annotated[Path | None, typer.Option(help="Wheel or source folder of starsd; ours, if we run from source.")]


def register(app: typer.Typer) -> None:
    """Add everything here to the command `starsd-edge`."""
    app.add_typer(image, name="image")
    app.command()(flash)
    app.command()(update)
    app.command("first-boot")(first_boot)


@image.command()
def build(
    l4t: L4t,
    board: BoardName,
    *,
    l4t_release: Stated = "",
    device_file: Annotated[Path | None, typer.Option(help="What differs from device to device: JSON or TOML.")] = None,
    ssh_key: Annotated[Path | None, typer.Option(help="Public keys of the user; without any nobody logs in.")] = None,
    user: Annotated[str, typer.Option(help="Name of the user, who may use sudo and has no password.")] = DEFAULT_USER,
    bundle: Annotated[
        list[str] | None,
        typer.Option(help="A bundle for the device: its folder, its name, or its model exported here; repeatable."),
    ] = None,
    wheelhouse: Wheels = None,
    source: Source = None,
    release_key: Annotated[Path | None, typer.Option(help="Public key of minisign that updates are signed by.")] = None,
    openrm: Annotated[
        bool | None, typer.Option(help="The open GPU driver; as the board needs it, if not given.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Turn the root file system in a Linux_for_Tegra into an edge."""
    from starsd.edge import image_manifest
    from starsd.edge.enrol import Device, FromFile, read_device
    from starsd.edge.image_build import Builder, private, work_folder
    from starsd.edge.image_bundles import find_bundles
    from starsd.edge.image_keys import read_keys
    from starsd.edge.image_plan import Order, commands
    from starsd.edge.image_wheels import find_source, read_wheelhouse

    bsp, chosen = open_bsp(l4t, l4t_release), find_board(board)
    check_release(chosen, bsp.release)
    if device_file is not None:
        _warn_if_open(device_file)
    if release_key is not None:
        from starsd.edge.update_sign import read_public_key

        read_public_key(release_key)
    own = find_source(source, wheelhouse)
    device = read_device(device_file) if device_file is not None else Device()
    FromFile().credential(device)  # its first boot would fail at it, again and again
    order = Order(
        bsp=bsp,
        board=chosen,
        openrm=check_openrm(chosen, openrm),
        device=device if device_file is not None else None,
        user=user,
        keys=read_keys(ssh_key) if ssh_key is not None else b"",
        release_key=release_key.read_bytes() if release_key is not None else b"",
        house=read_wheelhouse(wheelhouse.resolve(), bsp.python) if wheelhouse is not None else None,
        source=own,
        bundles=find_bundles(bundle or (), device.precision),
        lock=l4t_lock.locked(bsp.folder),
    )
    work = work_folder(order, home())
    if not order.keys:
        _say("no --ssh-key: nobody can log in to this image")
    for one in order.bundles:
        _say(f"bundle {one.name}, {one.bytes / 1e6:.0f} MB")
    if order.bundles and not any(one.serves(device) for one in order.bundles):
        _say(f"no --bundle is what the device opens, {device.model}: its first boot fetches that one")
    if dry_run:
        _show(commands(order, work, version("starsd")), as_json)
        return
    must_be_root("building an image")
    private(work)
    made = Builder(order, work, report=emit if as_json else _say_stage, show=_say_plain).build()
    if not as_json:
        typer.echo(f"{bsp.rootfs}: {len(made.entries)} paths set, see {image_manifest.PLACE} in it")


@image.command()
def verify(
    l4t: L4t, board: BoardName, *, l4t_release: Stated = "", dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Audit a finished root file system: a row for each finding, status 1 when one is an error."""
    from starsd.edge.image_verify import verify as audit
    from starsd.edge.image_verify import verify_command

    bsp, chosen = open_bsp(l4t, l4t_release), find_board(board)
    check_release(chosen, bsp.release)
    if dry_run:
        _show([verify_command(bsp)], as_json)
        return
    must_be_root("reading every file of an image")
    errors = 0
    for finding in audit(bsp, chosen):
        errors += finding.error
        if as_json:
            emit(finding)
        else:
            typer.echo(f"{'ERROR' if finding.error else 'note':5} {finding.check:10} {finding.path} {finding.problem}")
    if not as_json:
        typer.echo(f"{errors} errors")
    if errors:
        raise typer.Exit(1)


@image.command()
def lock(bsp: Path, rootfs: Path, lock_file: LockFile = DEFAULT_LOCK) -> None:
    """Pin NVIDIA's two archives, the package BSP and the sample root file system ROOTFS, by their SHA-256."""
    made = l4t_lock.encode(l4t_lock.make_lock(bsp, rootfs))
    if lock_file.exists() and lock_file.read_bytes() != made:
        raise UsageError(f"{lock_file} pins other archives, expected none: remove it, or name another with --lock")
    lock_file.write_bytes(made)
    typer.echo(lock_file)


@image.command()
def unpack(
    archives: Annotated[Path, typer.Option(help="Folder with the two archives.")],
    dest: Annotated[Path, typer.Option(help="Where Linux_for_Tegra comes to be.")],
    lock_file: LockFile = DEFAULT_LOCK,
    *,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Unpack the archives that a lock file pins, and no others."""
    pinned = l4t_lock.read_lock(lock_file)
    archives, dest = archives.resolve(), dest.resolve()
    folder, scratch = dest / l4t_lock.FOLDER, dest / l4t_lock.SCRATCH
    planned = l4t_lock.unpack_commands(archives / pinned.bsp.file, archives / pinned.rootfs.file, dest)
    if dry_run:
        _show(planned, as_json)
        return
    must_be_root("unpacking a root file system")
    with alone(f"unpacking in {dest}", dest):
        if os.path.lexists(folder):
            raise UsageError(f"{folder} exists already, expected nothing there")
        l4t_lock.check_archives(pinned, archives)
        shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
        try:
            for command in planned[:-1]:
                run(command, dest / "unpack.log", _say_plain)
            (scratch / l4t_lock.FOLDER / l4t_lock.KEPT).write_bytes(l4t_lock.encode(pinned))
            run(planned[-1], dest / "unpack.log", _say_plain)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    typer.echo(folder)


@image.command()
def package(
    out: Annotated[Path, typer.Option(help="Folder for the two files.")],
    *,
    python: Annotated[str, typer.Option(help="Of the devices: 3.10 for JetPack 6, 3.12 for JetPack 7.")] = "3.12",
    wheelhouse: Wheels = None,
    source: Source = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make the .deb of an edge, and the release that devices update to once minisign has signed it."""
    import tempfile

    from starsd.edge.image_deb import file_name, write_deb, write_release
    from starsd.edge.image_wheels import fill_commands, fill_wheelhouse, find_source, read_wheelhouse

    own = find_source(source, wheelhouse)
    if dry_run:
        _show([] if wheelhouse else fill_commands(out.resolve() / "wheelhouse", python, own), as_json)
        return
    with alone(f"packaging in {out}", out), tempfile.TemporaryDirectory(dir=out) as scratch:
        if wheelhouse is not None:
            house = read_wheelhouse(wheelhouse.resolve(), python)
        else:
            folder = Path(scratch).resolve() / "wheelhouse"
            house = fill_wheelhouse(folder, python, own, lambda one: run(one, out / "package.log", _say_plain))
        deb = out / file_name(house)
        release = out / f"starsd-{house.version}-cp{python.replace('.', '')}.tar"
        write_deb(house, deb)
        write_release(house, release)
    for path in (deb, release):
        emit({"file": str(path), "version": house.version}) if as_json else typer.echo(path)


def flash(
    l4t: L4t,
    board: BoardName,
    *,
    l4t_release: Stated = "",
    storage: Annotated[
        str | None, typer.Option(help="nvme, emmc, sd or usb; the board's usual one if not given.")
    ] = None,
    massflash: Annotated[int | None, typer.Option(help="Flash up to this many boards at a time.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for logs, which are kept.")] = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Flash a board in recovery mode with the image in a Linux_for_Tegra."""
    from starsd.edge import flash_run
    from starsd.edge.flash import plan_flash

    bsp = open_bsp(l4t, l4t_release)
    plan = plan_flash(bsp, find_board(board), storage, massflash)
    for notice in plan.notices:
        _say(notice)
    if dry_run:
        _show(plan.commands, as_json)
        return
    must_be_root("flashing")
    with alone(f"build or flash of {bsp.folder}", bsp.folder):
        found, others = flash_run.find_boards()
        flash_run.check_boards(found, others, plan.board, massflash)
        for one in found:
            _say(f"found {one.module} at {one.place}")
        with flash_run.reserved(found):
            if not yes:
                flash_run.confirm(plan, len(found), flash_run.ask_on_stderr)
            report = emit if as_json else lambda done: typer.echo(f"done in {done.seconds:.0f} s, log in {done.log}")
            flash_run.flash(plan, logs or home() / "logs", report=report, show=_say_plain)


def update(
    file: Annotated[Path, typer.Argument(help="A release; its signature lies beside it, FILE.minisig.")],
    *,
    key: Annotated[Path, typer.Option(help="Public key of minisign.")] = Path("/etc/starsd/release.pub"),
    allow_older: Annotated[bool, typer.Option(help="Also install an older version.")] = False,
    as_json: Json = False,
) -> None:
    """Install a signed release beside the running one, try it, and only then switch; else everything stays."""
    from starsd.edge.update import update as install
    from starsd.edge.update_restart import restart_edge
    from starsd.edge.update_slots import Slots

    must_be_root("an update")
    done = install(file, key, Slots(), allow_older=allow_older, show=_say, restart=restart_edge)
    if as_json:
        emit(done)
    else:
        typer.echo(f"now {done.version} in {done.slot}, before {done.before or 'nothing'}")


def first_boot(
    *,
    port: Annotated[int, typer.Option(help="Where progress is shown over HTTP; 0: nowhere.")] = 8080,
    as_json: Json = False,
) -> None:
    """What a device does once: its keys, its storage, its credential, its model, a self-test."""
    from starsd.edge.image_first_boot import FirstBoot

    must_be_root("the first boot")
    FirstBoot(port=port, report=emit if as_json else None).run()


def _show(commands: list[Command] | tuple[Command, ...], as_json: bool) -> None:
    for command in commands:
        emit({"argv": command.argv, "cwd": command.cwd, "env": command.env}) if as_json else typer.echo(str(command))


def _say(text: str) -> None:
    print(f"starsd-edge: {text}", file=sys.stderr, flush=True)


def _say_plain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_stage(done: object) -> None:
    stage, new = getattr(done, "stage", ""), getattr(done, "done", True)
    _say(f"{stage} {'done' if new else 'was done'}")


def _warn_if_open(path: Path) -> None:
    if path.is_file() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        _say(f"{path} has mode {mode:04o} and may hold secrets: run chmod 600 {path}")
