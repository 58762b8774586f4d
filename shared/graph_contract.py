"""What the graph of each flavour is fed and how it hands out K/V: all that an engine has to know of a flavour.

Everywhere: `input_ids` (rows,) and `logit_rows` (wanted,), int64, and past_k_i, past_v_i (1, kv heads, capacity,
head_dim) with zeros in them at first. Masks are float32, added to attention scores; `local_mask` is that of layers with
a window. A graph has those of the two that its layers need.

`ort`         attention_rows (1, attending) · own_rows (rows,) · position_ids (1, attending) · mask (1, 1, attending,
              total) · last_row (1,) and total (), int32. present_k_i and present_v_i are the buffers of the past.
`portable`    position_ids (1, rows) · write (1,): the column of row 0 · mask (1, 1, rows, capacity). present_k_i and
              present_v_i are the buffers of the past.
`decomposed`  position_ids (1, rows) · mask (1, 1, rows, capacity + rows). new_k_i and new_v_i (1, kv heads, rows,
              head_dim) are the pass's own rows alone; whoever runs the graph writes them behind the past.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from starsd.shared import tree
from starsd.shared.errors import BundleError

DUMMIES = 2  # rows that paddings may put behind a pass: buffers have room for them
_HIDDEN = np.float32(-1e9)  # added to an attention score that must not count
_HIDDEN_HALF = np.float32(-3e4)  # the same where it may become float16; e to the power of it is zero as well

Array = NDArray[Any]
Floats = NDArray[np.float32]


class Padding(NamedTuple):
    """Rows of a pass are a multiple of `multiple`; attention has at least `attending`."""

    multiple: int
    attending: int

    def rows(self, count: int) -> int:
        return -(-count // self.multiple) * self.multiple


class Pass(NamedTuple):
    """`tokens` behind `start` committed rows: a tree with `parents`, or without them a stretch of text.

    `rows` and `attending` count the dummies too; `capacity` is the length of the K/V buffers; `wanted` rows get logits.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None
    start: int
    rows: int
    attending: int
    capacity: int
    wanted: int

    def places(self, rows: int) -> NDArray[np.int64]:
        """The position of each of `rows` rows; a dummy takes that of the first."""
        places = np.full(rows, self.start, np.int64)
        places[: len(self.tokens)] += np.arange(len(self.tokens)) if self.parents is None else tree.depths(self.parents)
        return places

    def ids(self) -> NDArray[np.int64]:
        ids = np.zeros(self.rows, np.int64)
        ids[: len(self.tokens)] = self.tokens
        return ids


class Contract(Protocol):
    """One flavour's."""

    in_place: ClassVar[bool]  # present_* is the past's buffer; else new_* has the new rows
    paddings: ClassVar[tuple[Padding, ...]]  # that may make row counts agree, cheapest first
    on_host: ClassVar[frozenset[str]]  # inputs that stay in the host's memory where all others are a GPU's
    options: ClassVar[Mapping[str, str]]  # entries of an onnxruntime session's configuration
    runtime: ClassVar[tuple[int, ...]]  # the oldest onnxruntime that has its operators

    @staticmethod
    def feeds(one: Pass, window: int) -> dict[str, Array]:
        """Every input but K/V. `window`: positions that local layers see, the row's own included; 0: all."""
        ...


class OrtContract:
    in_place: ClassVar[bool] = True
    paddings: ClassVar[tuple[Padding, ...]] = (Padding(1, 2), Padding(2, 2))
    on_host: ClassVar[frozenset[str]] = frozenset({"total"})  # sizes what attention launches on a GPU
    options: ClassVar[Mapping[str, str]] = {}
    runtime: ClassVar[tuple[int, ...]] = (1, 23)

    @staticmethod
    def feeds(one: Pass, window: int) -> dict[str, Array]:
        """GroupQueryAttention hides by itself what lies behind a row."""
        count, start, attending = len(one.tokens), one.start, one.attending
        total, places = start + attending, one.places(attending)
        # the operator takes a pass without past for a prompt and numbers its rows, unless a column lies behind them
        span = total + (start == 0)
        mask = np.zeros((1, 1, attending, span), np.float32)
        if one.parents is not None:
            mask[0, 0, :count, start : start + count][~tree.ancestor_mask(one.parents)] = _HIDDEN
        mask[0, 0, count:, start : start + count] = _HIDDEN
        feeds: dict[str, Array] = {
            "input_ids": one.ids(),
            "attention_rows": np.arange(attending)[None] % one.rows,
            "own_rows": np.arange(one.rows),
            "position_ids": places[None],
            "mask": mask,
            "last_row": np.array([total - 1], np.int32),
            "total": np.array(span, np.int32),
            "logit_rows": np.arange(one.wanted),
        }
        if window:
            local = feeds["local_mask"] = mask.copy()
            local[0, 0, :, :total][tree.beyond_window(places, start, window)] = _HIDDEN
        return feeds


class PortableContract:
    in_place: ClassVar[bool] = True
    paddings: ClassVar[tuple[Padding, ...]] = (Padding(1, 1), Padding(2, 2))
    on_host: ClassVar[frozenset[str]] = frozenset()
    # these graphs say what TensorRT is to compute: a processor takes them by their word, with weights spread out once,
    # and does not round activations on its own account
    options: ClassVar[Mapping[str, str]] = {"session.disable_quant_qdq": "1"}
    runtime: ClassVar[tuple[int, ...]] = (1, 25, 1)

    @staticmethod
    def feeds(one: Pass, window: int) -> dict[str, Array]:
        feeds = _plain_feeds(one, window, one.start, one.capacity)
        return {**feeds, "write": np.array([one.start], np.int64)}


class DecomposedContract:
    in_place: ClassVar[bool] = False
    paddings: ClassVar[tuple[Padding, ...]] = PortableContract.paddings
    on_host: ClassVar[frozenset[str]] = PortableContract.on_host
    options: ClassVar[Mapping[str, str]] = PortableContract.options
    runtime: ClassVar[tuple[int, ...]] = (1, 23)

    @staticmethod
    def feeds(one: Pass, window: int) -> dict[str, Array]:
        return _plain_feeds(one, window, one.capacity, one.capacity + one.rows)


_CONTRACTS: Mapping[str, type[Contract]] = {
    "ort": OrtContract,
    "portable": PortableContract,
    "decomposed": DecomposedContract,
}


def contract_of(flavour: str) -> type[Contract]:
    """The contract of a flavour that `config.FLAVOURS` names."""
    return _CONTRACTS[flavour]


def version_numbers(version: str) -> tuple[int, ...]:
    """Of 1.23.2, say, (1, 23, 2)."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def runs_on(flavour: str, version: str) -> bool:
    """Whether onnxruntime `version` (1.23.2, say) has the operators of a flavour."""
    return version_numbers(version) >= contract_of(flavour).runtime


def require_runtime(flavour: str, version: str) -> None:
    """Raise BundleError unless onnxruntime `version` runs a flavour."""
    if not runs_on(flavour, version):
        oldest = ".".join(map(str, contract_of(flavour).runtime))
        others = " or ".join(name for name in _CONTRACTS if runs_on(name, version))
        raise BundleError(
            f"flavour {flavour} needs onnxruntime {oldest} or newer, this is {version}: export {others} instead"
        )


def _plain_feeds(one: Pass, window: int, own: int, width: int) -> dict[str, Array]:
    """Where the pass's own rows lie from column `own` on, of `width`."""
    places = one.places(one.rows)
    mask = _full_mask(one, own, width)
    feeds: dict[str, Array] = {
        "input_ids": one.ids(),
        "position_ids": places[None],
        "mask": mask[None, None],
        "logit_rows": np.arange(one.wanted),
    }
    if window:
        local, beyond = mask.copy(), tree.beyond_window(places, one.start, window)
        local[:, : one.start][beyond[:, : one.start]] = _HIDDEN_HALF
        local[:, own : own + one.rows][beyond[:, one.start :]] = _HIDDEN_HALF
        feeds["local_mask"] = local[None, None]
    return feeds


def _full_mask(one: Pass, own: int, width: int) -> Floats:
    """Rows see what is committed, their ancestors and themselves; a dummy sees no row but itself. (rows, width)."""
    count = len(one.tokens)
    sees = np.eye(one.rows, dtype=np.bool_)
    sees[:count, :count] = np.tri(count, dtype=np.bool_) if one.parents is None else tree.ancestor_mask(one.parents)
    mask = np.full((one.rows, width), _HIDDEN_HALF)
    mask[:, : one.start] = 0
    mask[:, own : own + one.rows][sees] = 0
    return mask
