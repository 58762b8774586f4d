"""`starsd bench wire`: bytes of a round and of a prefill, as encoded here and as the paper's reference code sends them.

A round is a verdict of `accepted` drafts and the token after them, the features of their rows, and a new tree of so
many `nodes`. Ours are the lengths of real frames; WebSocket and TLS add a few bytes to each. The reference's are what
its arrays hold (StarSD, arXiv 2601.21622, its published code), without what its serialisation adds:

    verdict            the whole id sequence again, int64
    features           fp16, as wide as the target
    draft              int64 ids, a float32 mask of nodes × nodes, int64 positions, int64 paths of leaves × levels
    prefix             the id sequence, and its features as above
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from starsd.edge.remote import CHUNK
from starsd.server.live_tree import LiveTree
from starsd.shared import tree
from starsd.shared.codec import Layout, encode
from starsd.shared.console import emit
from starsd.shared.errors import UsageError
from starsd.shared.features import codec
from starsd.shared.limits import MAX_DRAFT_NODES, MAX_FEATURE_BYTES, MAX_PREFIX_TOKENS, MAX_VERDICT_TOKENS, MAX_VOCAB
from starsd.shared.messages import Draft, Features, Prefix, Verdict

DEPTH, TOP_K = 5, 10  # the paper's tree
SESSION, EPOCH = 1, 1
_INT64, _FLOAT32, _FLOAT16 = 8, 4, 2


@dataclass(frozen=True)
class WireBench:
    """One round of one session; the defaults are Vicuna-7B's width and a vocabulary as large as they get."""

    hidden: int = 4096
    nodes: int = 60
    accepted: int = 2
    context: int = 500
    codec: str = "int4"
    vocab: int = 151_936

    def __post_init__(self) -> None:
        row = codec(self.codec).row_bytes(max(self.hidden, 1))
        most = {
            "hidden": (1, MAX_FEATURE_BYTES),
            "nodes": (1, MAX_DRAFT_NODES),
            "accepted": (0, MAX_VERDICT_TOKENS - 1),
            "context": (2, MAX_PREFIX_TOKENS),
            "vocab": (2, MAX_VOCAB),
        }
        for name, (low, high) in most.items():
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} is {getattr(self, name)}, expected {low} to {high}")
        if row > MAX_FEATURE_BYTES:
            raise UsageError(f"a feature row takes {row} bytes, expected at most {MAX_FEATURE_BYTES}: use int4")


def run(bench: WireBench) -> Iterator[dict[str, Any]]:
    """A row per message, then the sums of a round."""
    draw = np.random.default_rng(0)
    layout = Layout(bench.vocab, codec(bench.codec).row_bytes(bench.hidden))
    new = bench.accepted + 1
    draft = grown(bench.nodes, bench.vocab, base=bench.context + new)

    verdict = Verdict(SESSION, EPOCH, 1, bench.context, bench.nodes, bench.accepted, draw.integers(0, bench.vocab, new))
    prefix = Prefix(SESSION, EPOCH, 0, draw.integers(0, bench.vocab, bench.context))
    sizes = {
        "verdict": (_bytes([verdict], layout), _ids(bench.context + new)),
        "features": (_bytes(chunks(bench.context - 1, new, layout), layout), _reference_features(new, bench.hidden)),
        "draft": (_bytes([draft], layout), _reference_draft(draft)),
        "prefix": (_bytes([prefix], layout), _ids(bench.context)),
        "prefix features": (
            _bytes(chunks(0, bench.context - 1, layout), layout),
            _reference_features(bench.context, bench.hidden),
        ),
    }
    up = [sizes["verdict"], sizes["features"]]
    sizes["round up"] = sum(ours for ours, _ in up), sum(theirs for _, theirs in up)
    sizes["round down"] = sizes["draft"]
    for name, (ours, theirs) in sizes.items():
        yield {"message": name, "bytes": ours, "reference_bytes": theirs}


_DEFAULT = WireBench()


def command(
    *,
    hidden: Annotated[int, typer.Option(help="Width of a feature row.")] = _DEFAULT.hidden,
    nodes: Annotated[int, typer.Option(help="Nodes of a tree.")] = _DEFAULT.nodes,
    accepted: Annotated[int, typer.Option(help="Drafts that a verdict accepts.")] = _DEFAULT.accepted,
    context: Annotated[int, typer.Option(help="Tokens of the conversation so far.")] = _DEFAULT.context,
    codec: Annotated[str, typer.Option(help="Of the features: a name in docs/features.md.")] = _DEFAULT.codec,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = _DEFAULT.vocab,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")] = False,
) -> None:
    """Bytes of each message of a round, beside those of the paper's reference code."""
    for row in run(WireBench(hidden, nodes, accepted, context, codec, vocab)):
        if as_json:
            emit(row)
        else:
            print(f"{row['message']:16} {row['bytes']:12,} bytes {row['reference_bytes']:12,} in the reference")


def chunks(start: int, rows: int, layout: Layout) -> Iterator[Features]:
    """Features of so many rows, as they are sent."""
    each = max(1, CHUNK // layout.row_bytes)
    for at in range(start, start + rows, each):
        yield Features(SESSION, EPOCH, at, bytes(layout.row_bytes * min(each, start + rows - at)))


def grown(nodes: int, vocab: int, *, base: int, seed: int = 0) -> Draft:
    """The best `nodes` nodes of a tree that a made-up drafter grows: log-probabilities like a language model's, whose
    first choice has some 0.6 of the probability."""
    draw = np.random.default_rng(seed)
    top_k = min(TOP_K, vocab)
    depth = DEPTH if top_k == TOP_K else nodes.bit_length()
    live = LiveTree(0, top_k=top_k, depth=depth, entries=nodes + 1)
    while len(due := live.frontier(TOP_K, nodes + 1)):
        live.claim(due)
        logits = np.sort(draw.normal(scale=3.0, size=(len(due), min(vocab, 1000))), axis=1)[:, ::-1]
        steps = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        tokens = np.stack([draw.choice(vocab, top_k, replace=False) for _ in due])
        live.expand(due, tokens, steps[:, :top_k].astype(np.float32))
    best = live.best(nodes + 1)
    steps = best.scores[1:] - best.scores[best.parents[1:]]
    return Draft(SESSION, EPOCH, 1, base, 0, best.parents[1:] - 1, best.tokens[1:], steps)


def _bytes(messages: Any, layout: Layout) -> int:
    return sum(len(encode(message, layout)) for message in messages)


def _ids(count: int) -> int:
    return _INT64 * count


def _reference_features(rows: int, hidden: int) -> int:
    return _FLOAT16 * hidden * rows


def _reference_draft(draft: Draft) -> int:
    """The paths run from the root to every leaf, all as long as the longest."""
    count = len(draft.tokens)
    parents = [-1, *(int(parent) + 1 for parent in draft.parents)]
    leaves = len(parents) - len(set(parents[1:]))
    levels = 1 + int(tree.depths(parents).max())
    return _ids(count) + _FLOAT32 * count**2 + _ids(count) + _ids(leaves * levels)
