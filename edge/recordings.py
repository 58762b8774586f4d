"""Recorded greedy answers of a target, in one .npz file, for `target_replay` to answer from.

    header     uint8 (bytes,)              JSON of `Header`: the target, its end tokens, and a `Run` for each prompt
    tokens     int32 (all tokens,)         of all runs one behind the other: prompt, then answer, its end token included
    features   float16 (all rows, width)   likewise a row for every token but a run's last, which no pass has read

A run ends with the recorded end token, or where the most new tokens were reached.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from starsd.edge.target import Target
from starsd.shared.config import Sampling
from starsd.shared.errors import EngineError, UsageError
from starsd.shared.manifest import FeatureSpec, ModelShape
from starsd.shared.sampling import Sampler

FORMAT = 1
_TYPES = {"header": np.uint8, "tokens": np.int32, "features": np.float16}

Halves = NDArray[np.float16]
Ids = NDArray[np.int32]


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer: how many tokens prompt and both together have, and whether it ended with an end token."""

    id: str | int
    prompt: int
    tokens: int
    ended: bool


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    model: str
    fingerprint: str
    precision: str
    shape: ModelShape
    features: FeatureSpec
    eos: tuple[int, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Recording:
    """One run: `tokens` (n,) of which the first `prompt` were given, and `features` (n - 1, width)."""

    id: str | int
    prompt: int
    tokens: Ids
    features: Halves
    ended: bool


@dataclass(frozen=True)
class Recordings:
    header: Header
    runs: tuple[Recording, ...]

    def turned(self, share: float) -> list[Recording]:
        """All runs, beginning behind the first `share` of them, so that edges say different things."""
        first = int(share * len(self.runs))
        return [*self.runs[first:], *self.runs[:first]]


def record_run(
    target: Target, id: str | int, prompt: Sequence[int], eos: Sequence[int], max_new_tokens: int
) -> Recording:
    """Decode plainly and greedily from `prompt`, keeping what went through the target.

    Raises ContextOverflowError when that does not fit, EngineError for features beyond the range of float16.
    """
    target.truncate(0)
    rows = [target.prefill(prompt[:-1])]
    sampler = Sampler(Sampling(), prompt=prompt)
    answer: list[int] = []
    tip, ended = prompt[-1], False
    while not ended and len(answer) < max_new_tokens:
        logits = target.score([tip], [-1])
        rows.append(target.commit([0]))
        tip = sampler.choose(logits[0], answer, len(answer)).token
        answer.append(tip)
        ended = tip in eos
    with np.errstate(over="ignore"):
        features = np.concatenate(rows).astype(np.float16)
    if not np.isfinite(features).all():
        raise EngineError(f"features of run {id} are beyond {np.finfo(np.float16).max}, expected values of float16")
    return Recording(id, len(prompt), np.asarray([*prompt, *answer], np.int32), features, ended)


def write_recordings(path: Path, header: Header, runs: Sequence[Recording]) -> None:
    """Write the file at `path`; of `header` the runs are filled in."""
    listed = tuple(Run(run.id, run.prompt, len(run.tokens), run.ended) for run in runs)
    raw = msgspec.json.encode(msgspec.structs.replace(header, runs=listed))
    with path.open("wb") as file:
        np.savez(
            file,
            header=np.frombuffer(raw, np.uint8),
            tokens=np.concatenate([run.tokens for run in runs]),
            features=np.concatenate([run.features for run in runs]),
        )


def read_recordings(path: Path) -> Recordings:
    """The runs of a file. Raises UsageError when it is not exactly what this page describes."""
    try:
        return _parse(*_load(path))
    except OSError as error:
        raise UsageError(f"recording {path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, msgspec.DecodeError) as error:
        raise UsageError(f"recording {path} cannot be read: {error}") from error


def _load(path: Path) -> tuple[bytes, Ids, Halves]:
    """The three arrays, of their types and numbers of dimensions; else ValueError."""
    found: dict[str, NDArray[Any]] = {}
    file = np.load(path, allow_pickle=False)
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise ValueError("it is a single array, expected .npz")
    with file:
        if set(file.files) != set(_TYPES):
            raise ValueError(f"it has arrays {sorted(file.files)}, expected {sorted(_TYPES)}")
        for name, kind in _TYPES.items():
            values, dimensions = file[name], 2 if name == "features" else 1
            if values.dtype != kind or values.ndim != dimensions:
                got = f"{values.dtype} in {values.ndim} dimensions"
                raise ValueError(f"{name} are {got}, expected {np.dtype(kind)} in {dimensions}")
            found[name] = values
    return found["header"].tobytes(), found["tokens"], found["features"]


def _parse(raw: bytes, tokens: Ids, features: Halves) -> Recordings:
    """Cut the arrays into runs. Raises ValueError or msgspec's errors for what does not add up."""
    header = msgspec.json.decode(raw, type=Header)
    if header.format != FORMAT:
        raise ValueError(f"format is {header.format}, expected {FORMAT}: record it again")
    for run in header.runs:
        if not 1 <= run.prompt < run.tokens:
            raise ValueError(
                f"run {run.id} has {run.prompt} of {run.tokens} tokens as prompt, expected 1 to {run.tokens - 1}"
            )
    total = sum(run.tokens for run in header.runs)
    if not header.runs or not header.eos:
        raise ValueError("there are no runs or no end tokens, expected both")
    if len(tokens) != total:
        raise ValueError(f"there are {len(tokens)} tokens, the runs have {total}")
    expected = (total - len(header.runs), header.features.width)
    if features.shape != expected:
        raise ValueError(f"features have shape {list(features.shape)}, expected {list(expected)}")
    if not 0 <= tokens.min() <= tokens.max() < header.shape.vocab:
        raise ValueError(f"token ids are {tokens.min()} to {tokens.max()}, expected 0 to {header.shape.vocab - 1}")
    if not np.isfinite(features).all():
        raise ValueError("features are not finite, expected finite numbers")
    runs, at = [], 0
    for row, run in enumerate(header.runs):
        ids = tokens[at : at + run.tokens]
        if run.ended != (int(ids[-1]) in header.eos):
            raise ValueError(f"run {run.id} ends with token {ids[-1]} and says otherwise, end tokens are {header.eos}")
        first = at - row  # each run before has one row less than tokens
        runs.append(Recording(run.id, run.prompt, ids, features[first : first + run.tokens - 1], run.ended))
        at += run.tokens
    return Recordings(header, tuple(runs))
