"""Bundles in an image: where the edge of the device looks for them, so that its first boot fetches no model.

Only what a bundle's manifest names is taken. Engines of TensorRT are not: they are built on the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from starsd.edge.bundle import FLAVOUR
from starsd.edge.enrol import Device
from starsd.edge.image_tree import Copy, File, Folder, Step, inside
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_PRECISION
from starsd.shared.errors import BundleError, UsageError
from starsd.shared.home import PINNED_MODELS, home, parse_ref

HOME = "var/lib/starsd"  # $STARSD_HOME of the device's edge, edge/units/starsd-edge.service
PLACE = f"{HOME}/bundles"
_MODEL = re.compile(r"\w[\w.-]{0,99}")


class Packed(msgspec.Struct, frozen=True):
    """A bundle of this machine that is to go into an image; `raw` is its manifest as it lies there."""

    folder: Path
    about: manifest.Manifest
    raw: bytes

    @property
    def name(self) -> str:
        """As a device file and `starsd models list` say it: model/flavour-precision."""
        return f"{self.about.name}/{self.about.flavour}-{self.about.precision}"

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.about.files.values())

    def serves(self, device: Device) -> bool:
        """Whether this is what the device opens, as edge/bundle.py looks for it."""
        if device.model == self.name:
            return device.precision in ("", self.about.precision)
        if device.model not in PINNED_MODELS and not device.model.startswith("hf:"):
            return False
        return self.name == f"{parse_ref(device.model).slug}/{FLAVOUR}-{device.precision or DEFAULT_PRECISION}"


def find_bundle(text: str, precision: str = "") -> Packed:
    """A bundle by its folder, its name in our store, or the model that it was exported from, in `precision`.

    Raises UsageError when there is none, BundleError when it is damaged.
    """
    folder = manifest.find(text)
    if folder is None:
        wanted = precision or DEFAULT_PRECISION
        export = f"starsd-export onnx {text} --precision {wanted}"
        folder = parse_ref(text).bundle(FLAVOUR, wanted)
        if not (folder / manifest.FILE_NAME).is_file():
            raise UsageError(f"{text} has no bundle in {wanted} below {home()}, expected one: run {export}")
    raw = (folder / manifest.FILE_NAME).read_bytes()
    found = Packed(folder.resolve(), manifest.read(folder), raw)
    if not _MODEL.fullmatch(found.about.name):
        raise BundleError(f"{folder} is of model {found.about.name[:80]!r}, expected a plain name: export it again")
    return found


def find_bundles(texts: Sequence[str], precision: str = "") -> tuple[Packed, ...]:
    """Raises UsageError, too, when one is named twice."""
    found = tuple(sorted((find_bundle(text, precision) for text in texts), key=lambda one: one.name))
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"got bundle {twice[0]} more than once, expected each once")
    return found


def bundle_steps(bundles: Sequence[Packed]) -> list[Step]:
    """First boot gives all of it to the edge's user, whose number nobody knows before."""
    if not bundles:
        return []
    made: list[Step] = [Folder(HOME, mode=0o750), Folder(PLACE)]
    for model in sorted({bundle.about.name for bundle in bundles}):
        made.append(Folder(f"{PLACE}/{model}"))
    for bundle in bundles:
        place = f"{PLACE}/{bundle.name}"
        made.append(Folder(place))
        for name, file in sorted(bundle.about.files.items()):
            made.append(Copy(f"{place}/{name}", bundle.folder / name, file.bytes, file.sha256))
        made.append(File(f"{place}/{manifest.FILE_NAME}", bundle.raw))  # last: a bundle without one is none
    return made


def strangers(root: Path, known: Sequence[str]) -> Iterator[str]:
    """Files in the home of the device's edge that are not among the `known` paths of its image."""
    top, paths = inside(root, HOME), {str(inside(root, path, follow_last=False)) for path in known}
    for place in sorted(top.rglob("*")) if top.is_dir() else []:
        if str(place) not in paths and (place.is_symlink() or not place.is_dir()):
            yield str(place.relative_to(root))
