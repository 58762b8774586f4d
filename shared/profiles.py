"""Device profiles: what a pass costs on a device, so that one machine can stand for many.

A profile is a JSON object, `{"name", "hidden", "pass_ms": [[rows, ms], …], "interpolation": "linear", "prefill_tok_s",
"source"}`. Those of `assets/profiles/` are known by name, any other by its file.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from starsd.shared.errors import UsageError
from starsd.shared.features import codec

_SHIPPED = Path(__file__).parent / "assets" / "profiles"
_SUFFIX = ".json"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one device. `pass_ms` are points (rows of a pass, milliseconds), ascending; the first has 1 row."""

    name: str
    hidden: int  # width of a hidden state: what features weigh on the wire
    pass_ms: tuple[tuple[int, float], ...]
    interpolation: Literal["linear"]
    prefill_tok_s: float | None  # None: not known
    source: str = ""  # where the figures are from, for people

    def pass_seconds(self, rows: int) -> float:
        """Seconds of a pass over `rows` rows: linear between the points, beyond the last by the last slope.

        With a single point every pass costs the same. Raises UsageError for less than one row.
        """
        if rows < 1:
            raise UsageError(f"a pass of {rows} rows has no time, expected 1 or more")
        before, after = self.pass_ms[0], self.pass_ms[0]
        for point in self.pass_ms[1:]:
            before, after = after, point
            if rows <= point[0]:
                break
        span = after[0] - before[0]
        slope = (after[1] - before[1]) / span if span else 0.0
        return (before[1] + slope * (rows - before[0])) / 1e3

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to read `tokens` of a prompt; where that rate is not known, those of one pass of so many rows."""
        if tokens == 0:
            return 0.0
        return self.pass_seconds(tokens) if self.prefill_tok_s is None else tokens / self.prefill_tok_s

    def padding(self, codec_name: str, hidden: int) -> int:
        """Bytes behind every row of features `hidden` wide that make it weigh what this model's rows would."""
        size = codec(codec_name).row_bytes
        return max(0, size(self.hidden) - size(hidden))

    @property
    def plain_tok_s(self) -> float:
        """Tokens a second of plain decoding: passes of one row."""
        return 1 / self.pass_seconds(1)


def shipped() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob(f"*{_SUFFIX}")))


def read_profile(name_or_file: str | Path) -> Profile:
    """The profile of that name, or of a file whose name ends in .json. Raises UsageError saying what is wrong."""
    path = Path(name_or_file).expanduser()
    if path.suffix != _SUFFIX:
        if str(name_or_file) not in shipped():
            raise UsageError(
                f"profile {str(name_or_file)!r} is unknown, expected one of {', '.join(shipped())}, or a {_SUFFIX} file"
            )
        path = _SHIPPED / f"{name_or_file}{_SUFFIX}"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise UsageError(f"profile {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"profile {path} cannot be read: {error}") from error
    if complaint := _complaint(profile):
        raise UsageError(f"profile {path} has {complaint}")
    return profile


def _complaint(profile: Profile) -> str | None:
    """What is wrong with its values; None when nothing is."""
    rate = profile.prefill_tok_s
    if not profile.name:
        return "an empty name, expected one"
    if profile.hidden < 1:
        return f"hidden {profile.hidden}, expected 1 or more"
    if rate is not None and not 0 < rate < math.inf:
        return f"prefill_tok_s {rate}, expected more than 0, or null"
    return _complaint_of_points(profile.pass_ms)


def _complaint_of_points(points: tuple[tuple[int, float], ...]) -> str | None:
    if not points or points[0][0] != 1:
        got = f"from {points[0][0]} rows on" if points else "without points"
        return f"pass_ms {got}, expected the first point at 1 row"
    for rows, ms in points:
        if not 0 < ms < math.inf:
            return f"{ms} ms for {rows} rows, expected more than 0"
    for (fewer, faster), (more, slower) in pairwise(points):
        if more <= fewer:
            return f"{more} rows after {fewer} in pass_ms, expected them ascending"
        if slower < faster:
            return f"{slower} ms for {more} rows after {faster} for {fewer}, expected as much or more"
    return None
