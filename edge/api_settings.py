"""What the API's server is told at its start: its limits, its doors, and how it samples when a request does not say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from starsd.shared.config import CONVERSATIONS, Sampling
from starsd.shared.errors import ModelError, UsageError

KEY_VARIABLE = "STARSD_API_KEY"
SHORTEST_KEY = 16  # characters
_KEY = re.compile(r"[!-~]+")
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # by models, of Sampling


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every default of `starsd-edge run`, once."""

    name: str = ""  # that requests call the model by; "": the runtime's own
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any that is free
    conversations: int = CONVERSATIONS  # answers under way at a time, and caches kept
    queue: int = 16  # requests that may wait for one of them
    keys: tuple[str, ...] = ()  # a request needs one of these; none: this machine alone is served
    origins: tuple[str, ...] = ()  # web pages from elsewhere that may ask, "*" for any
    grace: float = 10.0  # seconds that answers under way get when the server ends
    most_bytes: int = 1 << 20  # of a request's body
    body_seconds: float = 30.0  # for a request's body to arrive
    stall_seconds: float = 60.0  # that a client may leave a piece of its answer unread

    # Where neither the request nor the model says how to sample. Always the likeliest token, as our commands have it,
    # makes a chat repeat itself; the whole distribution, as OpenAI has it, has too long a tail in a small model.
    sampling: Sampling = Sampling(temperature=0.8, top_p=0.95)


def recommended(folder: Path, fallback: Sampling) -> Sampling:
    """How the model in `folder` (a bundle) wants to be sampled, by its generation_config.json; else the fallback.

    Raises ModelError when the file is not what it should be.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return fallback
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        said = {name: config[name] for name in RECOMMENDED if config.get(name) is not None}
        if config.get("do_sample") is False or not said:
            return fallback
        return msgspec.convert({"temperature": 1.0, **said}, Sampling)
    except (msgspec.DecodeError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of a file, one a line, and the one of $STARSD_API_KEY. Raises UsageError for a file or a key that is no
    good; the message does not say the key."""
    keys = [key] if (key := os.environ.get(KEY_VARIABLE, "").strip()) else []
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"key file {path} cannot be read: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise UsageError(f"key file {path} holds no key, expected one a line")
        keys += found
    for key in keys:
        if len(key) < SHORTEST_KEY or not _KEY.fullmatch(key):
            raise UsageError(
                f"an API key has {len(key)} characters, expected {SHORTEST_KEY} or more, of printable ASCII, no spaces"
            )
    return tuple(keys)
