"""`starsd bench acceptance`: how many tokens a head's trees win per pass of the real engine, without any link.

Each prompt's first turn is answered with one official tree a pass, drafted in this process from features as a server
would get them (`local_head.py`). Every row of a pass is trusted: on an engine with noisy branches a text may differ
from plain decoding's where two tokens are nearly tied, which says nothing about a head.

    tau         tokens committed per pass: (new tokens - 1) / passes after the prefill, the end token being one of them;
                plain decoding has 1
    per_depth   for each depth that a pass got to, all drafts above accepted: the share in which it went on
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from starsd.edge.bundle import ensure_bundle
from starsd.edge.race import race_of
from starsd.edge.session import fit
from starsd.edge.target import Target, open_target
from starsd.edge.verify import Verdict, verify
from starsd.scripts.local_head import NO_CODEC, Drafting, LocalHead
from starsd.scripts.own_prompts import OWN_PROMPTS
from starsd.server.drafter import DynamicTree, chain
from starsd.server.packaged import packaged_head
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_MODEL, PRECISIONS, Engine, Limits, Sampling
from starsd.shared.console import Progress, StderrProgress, emit, no_progress
from starsd.shared.errors import ContextOverflowError, MissingExtraError, UsageError
from starsd.shared.features import CODECS
from starsd.shared.prompts import read_prompts
from starsd.shared.sampling import Sampler

DEPTH, TOP_K = 5, 10  # the paper's, for every number of nodes: what is kept of the candidates differs, not they


@dataclass(frozen=True)
class AcceptanceBench:
    """What is measured; `limit` 0 takes all prompts."""

    prompts: Path = OWN_PROMPTS
    trees: tuple[str, ...] = ("chain4", "16", "60")
    temperature: float = 0.0
    codec: str = "fp16"
    max_new_tokens: int = 128
    limit: int = 0
    dtype: str = "fp32"
    threads: int = 0  # of the target; 0: one per physical core
    share_noise: bool = True  # the head knows temperature and noise of what is sampled, and drafts by them

    def __post_init__(self) -> None:
        if self.codec not in (known := [*CODECS, NO_CODEC]):
            raise UsageError(f"codec {self.codec!r} is unknown, expected one of {', '.join(known)}")
        if self.limit < 0:
            raise UsageError(f"limit is {self.limit} prompts, expected 1 or more, or 0 for all")


@dataclass
class Tally:
    """Counts over all prompts. `reached` and `hit` by depth: passes that got there, and those that went on."""

    tokens: int = 0
    passes: int = 0
    reached: list[int] = field(default_factory=list)
    hit: list[int] = field(default_factory=list)

    def add(self, verdict: Verdict, tokens: Sequence[int], parents: Sequence[int], depths: int) -> None:
        """A pass over a tree whose shape allows so many depths."""
        self.passes += 1
        self.tokens += len(verdict.tokens)
        # a token that ends the text is not walked to, though it may have been drafted
        last = (verdict.rows[-1], verdict.tokens[-1]) in set(zip(parents, tokens, strict=True))
        self.reached += [0] * (depths - len(self.reached))
        self.hit += [0] * (depths - len(self.hit))
        for depth in range(min(len(verdict.rows), depths)):
            self.reached[depth] += 1
            self.hit[depth] += depth < verdict.accepted or last

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else 1.0

    @property
    def per_depth(self) -> list[float]:
        """Up to the last depth that was reached."""
        return [hit / reached for hit, reached in zip(self.hit, self.reached, strict=True) if reached]


def parse_tree(name: str) -> DynamicTree:
    """`chainK`, a path of K drafts, or N, the official tree of N nodes with its root. Raises UsageError for others."""
    found = re.fullmatch(r"(chain)?([1-9]\d{0,3})", name.strip())
    if found is None:
        raise UsageError(f"tree is {name!r}, expected chain4 (4 drafts in a row) or a number of nodes such as 60")
    count = int(found[2])
    return chain(count) if found[1] else DynamicTree(count, DEPTH, TOP_K)


def decode(
    target: Target,
    drafts: Drafting,
    prompt: Sequence[int],
    shape: DynamicTree,
    sampler: Sampler,
    tally: Tally,
    *,
    eos: Collection[int],
    limit: int,
) -> list[int]:
    """Answer `prompt` (at least one token) with a tree a pass; the new tokens, at most `limit`, its end included."""
    target.truncate(0)
    before = target.prefill(prompt[:-1])
    new = [sampler.choose(target.score([prompt[-1]], [-1])[0], [], 0).token]
    drafts.extend(np.concatenate([before, target.commit([0])]), np.array([*prompt[1:], new[0]]))
    while new[-1] not in eos and len(new) < limit:
        tree, room = drafts.draft(shape), target.context - target.length
        tokens, parents = tree.tokens[:room].tolist(), tree.parents[:room].tolist()
        logits = target.score(tokens, parents)
        verdict = verify(logits, tokens, parents, sampler, new, index=len(new), eos=eos, limit=limit - len(new))
        tally.add(verdict, tokens, parents, min(shape.depth + 1, shape.total - 1))
        new += verdict.tokens
        drafts.extend(target.commit(verdict.rows), np.array(verdict.tokens))
    return new


def run(
    bench: AcceptanceBench, model: str, precision: str | None, head: str | None, progress: Progress = no_progress
) -> Iterator[dict[str, Any]]:
    """The contract's rows, one a tree. Raises UsageError for options, prompts or a head that do not fit."""
    from starsd.edge.text import Text
    from starsd.server.heads import ensure_model

    shapes = {name: parse_tree(name) for name in bench.trees}
    asked = read_prompts(bench.prompts)[: bench.limit or None]
    sampling, limits = Sampling(temperature=bench.temperature), Limits(max_new_tokens=bench.max_new_tokens)
    bundle = ensure_bundle(model, precision)
    source = manifest.read(bundle).source
    head = head or str(_packaged(source))
    ensure_model(source)
    local = LocalHead(head, source, bench.codec, bench.dtype, list(shapes.values()))
    for warning in local.warnings:
        print(f"{head}: {warning}", file=sys.stderr)
    target, text = open_target("onnx", bundle, Engine(threads=bench.threads)), Text.open(bundle)
    if local.features != target.features:
        raise UsageError(f"head {head} reads {local.features}, expected what {bundle} gives, {target.features}")
    prompts = []
    for prompt in asked:
        try:
            ids = text.encode_chat([{"role": "user", "content": prompt.turns[0]}])
            prompts.append(fit(ids, limits, target.context))
        except ContextOverflowError as error:
            raise ContextOverflowError(f"prompt {prompt.id}: {error}") from error
    for name, shape in shapes.items():
        tally = Tally()
        for done, ids in enumerate(prompts):
            progress(f"tree {name}", done, len(prompts))
            sampler = Sampler(sampling, choice=done, prompt=ids)  # each prompt has noise of its own
            session = local.open(race_of(sampler, len(ids)) if bench.share_noise else None)
            limit = min(bench.max_new_tokens, target.context - len(ids) + 1)  # the last token needs no row
            decode(target, session, ids, shape, sampler, tally, eos=text.eos, limit=limit)
            session.close()
        progress(f"tree {name}", len(prompts), len(prompts))
        yield {
            "set": bench.prompts.stem,
            "tree": name,
            "temperature": bench.temperature,
            "codec": bench.codec,
            "tau": round(tally.tau, 4),
            "per_depth": [round(share, 4) for share in tally.per_depth],
            "passes": tally.passes,
        }


def _packaged(model: str) -> Path:
    try:
        return packaged_head(model)
    except UsageError as error:
        raise UsageError(f"no head is packaged for {model}: give one with --head") from error


_BENCH = AcceptanceBench()


def command(
    *,
    prompts: Annotated[
        Path, typer.Option(help='Lines {"id", "turns"} (the first counts) or {"id", "prompt"}.')
    ] = _BENCH.prompts,
    tree: Annotated[str, typer.Option(help="chainK or a number of nodes, by commas.")] = ",".join(_BENCH.trees),
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token, always.")] = _BENCH.temperature,
    codec: Annotated[str, typer.Option(help=f"{', '.join(CODECS)} or {NO_CODEC}.")] = _BENCH.codec,
    model: Annotated[str, typer.Option(help="A model reference or a bundle folder.")] = DEFAULT_MODEL,
    precision: Annotated[str | None, typer.Option(help=", ".join(PRECISIONS))] = None,
    head: Annotated[str | None, typer.Option(help="Folder or hf:org/name; default: the packaged one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = _BENCH.max_new_tokens,
    limit: Annotated[int, typer.Option(help="Prompts to answer; 0: all.")] = _BENCH.limit,
    dtype: Annotated[str, typer.Option(help="Of the head: fp32, bf16, fp16, or int8 products.")] = _BENCH.dtype,
    threads: Annotated[int, typer.Option(help="Of the target; 0: one for each physical core.")] = _BENCH.threads,
    share_noise: Annotated[
        bool, typer.Option(help="The head knows the noise that tokens are drawn with, and drafts by it.")
    ] = _BENCH.share_noise,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")] = False,
) -> None:
    """Tokens per pass that a head's trees win on these prompts."""
    bench = AcceptanceBench(
        prompts=prompts,
        trees=tuple(tree.split(",")),
        temperature=temperature,
        codec=codec,
        max_new_tokens=max_new_tokens,
        limit=limit,
        dtype=dtype,
        threads=threads,
        share_noise=share_noise,
    )
    try:
        for row in run(bench, model, precision, head, StderrProgress()):
            if as_json:
                emit(row)
            else:
                shares = " ".join(f"{share:.1%}" for share in row["per_depth"])
                print(f"tree {row['tree']:>7}   tau {row['tau']:.2f}   accepted by depth {shares}")
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "server") from error
