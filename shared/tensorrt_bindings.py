"""TensorRT's Python bindings, where a system has them. On a Jetson they come with JetPack, for the system's Python."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from starsd.shared.errors import DeviceError

PORTABLE_SINCE = (10, 15)  # what parses the operators of the portable graph
_OLDEST = (10, 0)  # int64 inputs and int4 weights


def load_tensorrt() -> Any:
    """The module. Raises DeviceError when there is none that can be used, with what to do."""
    try:
        module: Any = import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise DeviceError(
            "tensorrt is not installed for this Python: on a Jetson JetPack brings it for the system's, which a "
            "virtual environment sees when it is made with --system-site-packages; "
            "on a PC run pip install 'tensorrt>=10,<11'"
        ) from error
    except (ImportError, OSError) as error:  # its libraries are not there, or not those it wants
        raise DeviceError(f"tensorrt cannot be imported: {error}") from error
    if version_of(module) < _OLDEST:
        raise DeviceError(f"TensorRT is {module.__version__}, expected {'.'.join(map(str, _OLDEST))} or newer")
    return module


def version_of(module: Any) -> tuple[int, int]:
    """Major and minor version."""
    found = re.match(r"(\d+)\.(\d+)", module.__version__)
    if found is None:
        raise DeviceError(f"TensorRT's version is {module.__version__!r}, expected numbers such as 10.3.0")
    return int(found[1]), int(found[2])


def flavour_for(module: Any) -> str:
    """The flavour of bundles that this TensorRT takes."""
    return "portable" if version_of(module) >= PORTABLE_SINCE else "decomposed"
