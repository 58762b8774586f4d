"""The CUDA runtime by ctypes, where a machine has one: no package is needed for it, and none is imported.

What TensorRT does without a device is not an error but a crash, so everything that uses it asks here first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from starsd.shared.errors import DeviceError

_NAMES = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so")
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # cudaDevAttrComputeCapability…, driver_types.h


class Gpu(NamedTuple):
    capability: tuple[int, int]
    total: int  # bytes of memory
    free: int

    @property
    def name(self) -> str:
        """As compilers name its kind: sm87."""
        return "sm{}{}".format(*self.capability)


def load_cudart() -> Any:
    """The library, with a device that it can use. Raises DeviceError, saying why there is none."""
    reason = "the CUDA runtime, libcudart.so, is not installed"
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int()
        error = library.cudaGetDeviceCount(ctypes.byref(count))
        if error == 0 and count.value:
            return library
        reason = f"CUDA says {error_text(library, error)}" if error else "CUDA finds no device"
    raise DeviceError(f"no GPU can be used: {reason}")


def error_text(library: Any, error: int) -> str:
    text = library.cudaGetErrorString
    text.restype = ctypes.c_char_p
    return f"{text(error).decode(errors='replace')} ({error})"


def check(library: Any, call: str, *arguments: Any) -> None:
    """Call a function of the library. Raises DeviceError when it returns anything but success."""
    if error := getattr(library, call)(*arguments):
        raise DeviceError(f"{call} failed: {error_text(library, error)}")


def gpu(library: Any) -> Gpu:
    """The first device, which is the one that is used. Raises DeviceError."""
    values = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(values, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR), strict=True):
        check(library, "cudaDeviceGetAttribute", ctypes.byref(value), attribute, 0)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check(library, "cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return Gpu((values[0].value, values[1].value), total.value, free.value)


def _candidates() -> Iterator[str]:
    """Where the library may be: found by the linker, in CUDA's own folder, or in packages that brought it."""
    yield from _NAMES
    package = find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        yield from map(str, sorted(Path(folder).glob("*/lib/libcudart.so.*"), reverse=True))
