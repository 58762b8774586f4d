"""`starsd bench acceptance`: its counts against drafters whose luck is known, its drafts against the server's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_model import ENGINE, export
from tiny_session import EOS, VOCAB, ToyTarget
from torch_helpers import GOLDEN, golden_target
from train_helpers import WIDTH, fresh_head, target_folder

from starsd.edge.projector import Projector
from starsd.edge.target import Target
from starsd.edge.target_onnx import open_bundle
from starsd.export.checkpoint import Checkpoint
from starsd.export.train_save import save_head
from starsd.scripts.bench_acceptance import Tally, decode, parse_tree
from starsd.scripts.cli import main
from starsd.scripts.local_head import LocalHead
from starsd.server.drafter import Draft, DynamicTree, Floats, Ints, chain
from starsd.server.drafter_eagle import open_drafter
from starsd.server.eagle_heads import load_head
from starsd.server.projector import save_projector
from starsd.shared.config import Sampling
from starsd.shared.errors import UsageError
from starsd.shared.features import codec
from starsd.shared.sampling import Sampler

PROMPT = [7, 3, 11, 5]


def plain(target: Target, prompt: Sequence[int], limit: int, eos: Sequence[int], temperature: float = 0) -> list[int]:
    """Plain decoding, a token a pass."""
    sampler, new = Sampler(Sampling(temperature=temperature), prompt=prompt), list[int]()
    target.truncate(0)
    target.prefill(prompt[:-1])
    while len(new) < limit and not (new and new[-1] in eos):
        tip = new[-1] if new else prompt[-1]
        new.append(sampler.choose(target.score([tip], [-1])[0], new, len(new)).token)
        target.commit([0])
    return new


class Scripted:
    """Drafts what it is told to; checks that rows come in order, each with the token behind it."""

    def __init__(self, truth: list[int], draft: Callable[[list[int]], tuple[list[int], list[int]]]) -> None:
        self.truth, self._draft = truth, draft
        self.known = 0
        self.accepted: list[int] = []

    def extend(self, features: Floats, next_tokens: Ints) -> None:
        first = self.known == 0
        new = next_tokens[len(PROMPT) - 1 :].tolist() if first else next_tokens.tolist()
        assert len(features) == len(next_tokens)
        assert not first or next_tokens[: len(PROMPT) - 1].tolist() == PROMPT[1:]
        assert new == self.truth[self.known : self.known + len(new)]
        self.known += len(new)
        if not first:
            self.accepted.append(len(new) - 1)

    def draft(self, shape: DynamicTree) -> Draft:
        tokens, parents = self._draft(self.truth[self.known :])
        scores = np.zeros(1 + len(tokens), np.float32)
        return Draft(np.array([self.truth[self.known - 1], *tokens]), np.array([-1, *parents]), scores)


def right(ahead: list[int]) -> tuple[list[int], list[int]]:
    return ahead[:3], list(range(len(ahead[:3])))


def wrong(ahead: list[int]) -> tuple[list[int], list[int]]:
    tokens, parents = right(ahead)
    return [(token + 1) % VOCAB for token in tokens], parents


def counted(truth: list[int], limit: int, drafts: Scripted, shape: DynamicTree, temperature: float = 0) -> Tally:
    tally = Tally()
    sampler = Sampler(Sampling(temperature=temperature), prompt=PROMPT)
    assert decode(ToyTarget(), drafts, PROMPT, shape, sampler, tally, eos=[EOS], limit=limit) == truth
    return tally


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_always_right_is_the_most_and_always_wrong_is_one(temperature: float) -> None:
    truth = plain(ToyTarget(), PROMPT, 200, [EOS], temperature)
    truth = truth[: 1 + 4 * ((len(truth) - 2) // 4)]  # whole passes before the end
    assert len(truth) >= 9
    best = counted(truth, len(truth), Scripted(truth, right), chain(3), temperature)
    assert (best.tau, best.per_depth, best.passes) == (4.0, [1.0, 1.0, 1.0], len(truth) // 4)
    worst = counted(truth, len(truth), Scripted(truth, wrong), chain(3), temperature)
    assert (worst.tau, worst.per_depth, worst.passes) == (1.0, [0.0], len(truth) - 1)


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_a_walk(seed: int) -> None:
    """Trees that hold the truth down to a random depth, among wrong branches; the end token is drafted too."""
    rng = random.Random(seed)
    truth = plain(ToyTarget(), PROMPT, 60, [EOS])
    held: list[int] = []  # depths of truth in each pass

    def draft(ahead: list[int]) -> tuple[list[int], list[int]]:
        depth = rng.randint(0, min(4, len(ahead)))
        held.append(depth)
        tokens, parents, above = list[int](), list[int](), 0
        for token in ahead[:depth]:
            tokens += [(token + 1) % VOCAB, token]
            parents += [above, above]
            above = len(tokens)
        return [*tokens, (ahead[depth] + 1) % VOCAB if depth < len(ahead) else 0], [*parents, above]

    drafts = Scripted(truth, draft)
    tally = counted(truth, 60, drafts, DynamicTree(16, 4, 4))
    assert tally.passes == len(held) == len(drafts.accepted)
    assert tally.tau == (len(truth) - 1) / len(held)
    reached = [sum(depth >= d for depth in held) for d in range(5)]
    assert tally.hit == [*reached[1:], 0]
    assert tally.reached[0] == len(held)
    # the last pass may have ended with the text, where nothing was left to draft
    assert sum(reached) - sum(tally.reached) in (0, 1)


def test_the_end_of_the_context_cuts_trees() -> None:
    truth = plain(ToyTarget(), PROMPT, 8, [])
    target, tally = ToyTarget(context=len(PROMPT) + 7), Tally()
    sampler = Sampler(Sampling(), prompt=PROMPT)
    assert decode(target, Scripted(truth, right), PROMPT, chain(3), sampler, tally, eos=[], limit=8) == truth
    assert (tally.passes, tally.tokens) == (2, 7)


def test_a_text_that_ends_at_once_counts_nothing() -> None:
    target, tally = ToyTarget(), Tally()
    sampler = Sampler(Sampling(), prompt=PROMPT)
    drafts = Scripted(plain(target, PROMPT, 1, []), right)
    assert decode(target, drafts, PROMPT, chain(3), sampler, tally, eos=[], limit=1) == drafts.truth
    assert (tally.tau, tally.per_depth, tally.passes) == (1.0, [], 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a head and a bundle in fp32."""
    base = tmp_path_factory.mktemp("acceptance")
    source = target_folder(base / "target", initializer_range=0.2)
    (base / "head").mkdir()
    ids = list(range(0, VOCAB, 2))
    save_head(base / "head", fresh_head(source, ids), Checkpoint(source), np.array(ids), 512)
    export(source, base / "bundle")
    (base / "mine.jsonl").write_text(
        '{"id": 1, "turns": ["Is this so?"]}\n{"id": 2, "prompt": "the user said it is"}\n'
    )
    return base


def local(folder: Path, codec_name: str, *shapes: DynamicTree) -> LocalHead:
    return LocalHead(str(folder / "head"), str(folder / "target"), codec_name, "fp32", shapes)


@pytest.mark.parametrize("codec_name", ["none", "fp16"])
def test_drafts_are_the_servers(folder: Path, codec_name: str) -> None:
    """Rows that came through projector and float16 barely move the scores."""
    shapes = (DynamicTree(16, 3, 4), chain(3))
    head = local(folder, codec_name, *shapes)
    session, reference = head.open(), open_drafter(str(folder / "head"), str(folder / "target")).open()
    rng = np.random.default_rng(0)
    for count in (9, 1, 3):
        rows = rng.normal(size=(count, WIDTH)).astype(np.float32)
        following = rng.integers(0, VOCAB, count)
        session.extend(rows, following)
        reference.extend(rows, following)
        for shape in shapes:
            got, wanted = session.draft(shape), reference.draft(shape)
            tolerance = 3e-5 if codec_name == "none" else 0.1
            np.testing.assert_allclose(np.sort(got.scores), np.sort(wanted.scores), atol=tolerance)
            if codec_name == "none":
                assert (got.tokens.tolist(), got.parents.tolist()) == (wanted.tokens.tolist(), wanted.parents.tolist())
    session.close()
    head.open().close()


def test_rows_go_through_projector_and_codec(folder: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float32)
    rows[0, 0] = 1e6  # beyond float16: the edge keeps the largest it can
    halves = np.clip(rows, -65504, 65504).astype(np.float16).astype(np.float32)
    save_projector(load_head(str(folder / "head"), str(folder / "target")), tmp_path / "p.safetensors")
    projected = Projector(tmp_path / "p.safetensors")(halves)
    int4 = codec("int4")
    expected = int4.decode(int4.encode(projected), WIDTH // 3)
    np.testing.assert_array_equal(local(folder, "int4", chain(1)).received(rows), expected)
    assert local(folder, "none", chain(1)).received(rows) is rows
    eagle1 = LocalHead(
        str(GOLDEN / "e1_gqa_nobias" / "head"), str(golden_target("e1_gqa_nobias")), "int4", "fp32", [chain(1)]
    )
    np.testing.assert_array_equal(eagle1.received(rows), int4.decode(int4.encode(halves), WIDTH))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_real_engine_says_what_it_says_plainly(folder: Path, temperature: float) -> None:
    target = open_bundle(folder / "bundle", ENGINE)
    truth = plain(target, PROMPT, 30, [EOS], temperature)
    for name in ("chain3", "12"):
        shape = parse_tree(name)
        session, tally = local(folder, "fp16", shape).open(), Tally()
        sampler = Sampler(Sampling(temperature=temperature), prompt=PROMPT)
        assert decode(target, session, PROMPT, shape, sampler, tally, eos=[EOS], limit=30) == truth
        assert tally.tokens == len(truth) - 1


def test_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--prompts", str(folder / "mine.jsonl"), "--model", str(folder / "bundle"), "--head", str(folder / "head")]
    options = ["--tree", "chain2,16", "--temperature", "0.5", "--codec", "int8", "--max-new-tokens", "12"]
    assert main(["bench", "acceptance", *files, *options, "--json"]) == 0
    out = capsys.readouterr().out
    found = [json.loads(line) for line in out.splitlines()]
    assert [list(row) for row in found] == [["set", "tree", "temperature", "codec", "tau", "per_depth", "passes"]] * 2
    assert [(row["set"], row["tree"], row["temperature"], row["codec"]) for row in found] == [
        ("mine", "chain2", 0.5, "int8"),
        ("mine", "16", 0.5, "int8"),
    ]
    for row in found:
        assert 1 <= row["tau"] <= 7
        assert 2 <= row["passes"] <= 22
        assert all(0 <= share <= 1 for share in row["per_depth"])
    assert main(["bench", "acceptance", *files, *options[:2], "--limit", "1", "--max-new-tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("tree  chain2   tau ")


def test_tree_names() -> None:
    assert parse_tree("chain4") == DynamicTree(5, 3, 1)
    assert parse_tree(" 60 ") == DynamicTree(60, 5, 10)
    assert parse_tree("16") == DynamicTree(16, 5, 10)
    for name in ("", "chain", "chain0", "0", "-3", "tree16", "1e3"):
        with pytest.raises(UsageError, match=r"expected chain4 \(4 drafts in a row\) or a number of nodes such as 60"):
            parse_tree(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tree", "chain4,sixty"], "tree is 'sixty', expected chain4 (4 drafts in a row) or a number of nodes"),
        (["--tree", "600"], "depth 5 and top_k 10 give 511 nodes, expected 600"),
        (["--codec", "int2"], "codec 'int2' is unknown, expected one of fp16, int8, int4, rot4, rot3, rot2, none"),
        (["--limit", "-1"], "limit is -1 prompts, expected 1 or more, or 0 for all"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0, expected 1 or more"),
        (["--temperature", "-1"], "temperature"),
        (["--dtype", "fp4"], "dtype 'fp4' is unknown"),
        (["--prompts", "{base}/none.jsonl"], "none.jsonl cannot be read"),
        (["--prompts", "{base}/long.jsonl"], "prompt long: prompt has "),
        (["--model", "{base}/last"], "expected what"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "long.jsonl").write_text(json.dumps({"id": "long", "prompt": "so " * 600}))
    if not (folder / "last").exists():
        export(folder / "target", folder / "last", taps=(1, 4, 6))
    base = {"--prompts": str(folder / "mine.jsonl"), "--model": str(folder / "bundle"), "--head": str(folder / "head")}
    given = base | {options[0]: options[1].format(base=folder)}
    assert main(["bench", "acceptance", *(part for pair in given.items() for part in pair)]) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_a_model_without_a_packaged_head_needs_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "acceptance", "--model", str(folder / "bundle")]) == 1
    assert f"no head is packaged for {folder / 'target'}: give one with --head" in capsys.readouterr().err
