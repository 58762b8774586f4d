"""Drafts under the noise of a sampled answer: what is told of it, how children are ranked by it, what it wins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from head_builder import base_config, random_tensors, rows, write_head
from star import PROMPT, Star, answer
from tiny_session import EOS, write_text_files
from torch_helpers import tiny_llama

from starsd.edge.cli import _drafting
from starsd.edge.drafting import Drafting
from starsd.edge.race import race_of
from starsd.edge.runtime import Runtime
from starsd.edge.text import Text
from starsd.scripts.link_model import LinkSettings
from starsd.server.batch import BatchDrafter
from starsd.server.drafter import Draft, DynamicTree, SlotLimits, open_drafter
from starsd.server.live_session import LiveSession
from starsd.server.race import KEPT, WEIGHT, RaceNoise
from starsd.shared.config import Sampling
from starsd.shared.messages import Race
from starsd.shared.noise import gumbel
from starsd.shared.sampling import Sampler

WIDTH, VOCAB, DRAFT_VOCAB, COUNT = 96, 96, 48, 12
SHAPE = DynamicTree(24, 1, 5)
RACE = Race(0.75, 7, 2, COUNT - 3)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("race")
    tiny_llama().save_pretrained(base / "target")
    write_head(base / "head", base_config(draft_vocab_size=DRAFT_VOCAB), random_tensors())
    return open_drafter("eagle", str(base / "head"), str(base / "target")).layer  # type: ignore[attr-defined]


@pytest.fixture
def batch(layer: Any) -> BatchDrafter:
    return BatchDrafter(layer, SlotLimits(4, 64, 80), SHAPE)


def batch_of(layer: Any, shape: DynamicTree) -> BatchDrafter:
    return BatchDrafter(layer, SlotLimits(1, 64, 80), shape)


def filled(batch: BatchDrafter, seed: int = 1) -> LiveSession:
    """A session with COUNT + 1 tokens, all of whose features have come."""
    session = batch.open()
    features, following = rows(COUNT, WIDTH, seed)
    session.commit([0, *following.tolist()])
    session.feed(0, features)
    return session


def rested(batch: BatchDrafter, *sessions: LiveSession) -> None:
    while batch.advance([(session, 7) for session in sessions], official=True):
        pass


def same(a: Draft, b: Draft) -> None:
    assert (a.tokens.tolist(), a.parents.tolist()) == (b.tokens.tolist(), b.parents.tolist())
    np.testing.assert_allclose(a.scores, b.scores, atol=3e-5)


def steps_below(draft: Draft, node: int) -> dict[int, float]:
    """Log-probabilities of a node's children by token."""
    below = np.flatnonzero(draft.parents == node)
    return {int(draft.tokens[child]): float(draft.scores[child] - draft.scores[node]) for child in below}


def test_children_win_by_probability_and_noise(batch: BatchDrafter, layer: Any) -> None:
    """Worked out anew from every child's log-probability, two levels deep."""
    session, own = filled(batch), layer.to_target.numpy()
    everything = DynamicTree(1 + DRAFT_VOCAB + DRAFT_VOCAB**2, 1, DRAFT_VOCAB)
    wide = batch_of(layer, everything)
    (plain,) = wide.trees([filled(wide)], everything)
    session.draw(RACE)
    (drawn,) = batch.trees([session], SHAPE)
    of_plain = {int(plain.tokens[node]): node for node in np.flatnonzero(plain.parents == 0)}
    for node in (0, *np.flatnonzero(drawn.parents == 0).tolist()):
        known = steps_below(plain, 0 if node == 0 else of_plain[int(drawn.tokens[node])])
        position = COUNT + 1 + (node > 0)
        noise = gumbel(RACE.seed, RACE.choice, position - RACE.start, VOCAB)
        scores = {token: known[token] + WEIGHT * RACE.temperature * noise[token] for token in own.tolist()}
        total = np.logaddexp.reduce(list(scores.values()))
        best = sorted(scores, key=lambda token: -scores[token])
        found = steps_below(drawn, node)
        assert list(found) == best[: len(found)]
        np.testing.assert_allclose(list(found.values()), [scores[token] - total for token in found], atol=1e-4)
    assert len(steps_below(drawn, 0)) == SHAPE.top_k


def test_a_live_tree_is_the_whole_one_and_leaves_its_neighbours_alone(batch: BatchDrafter) -> None:
    """Also where other sessions of the pass draw otherwise, or not at all."""
    one, other, greedy = (filled(batch) for _ in range(3))
    (plain,) = batch.trees([one], SHAPE)
    one.draw(RACE)
    other.draw(Race(0.75, 8, 2, COUNT - 3))
    trees = batch.trees([one, other, greedy], SHAPE)
    assert len({tuple(tree.tokens.tolist()) for tree in trees}) == 3
    same(trees[2], plain)
    rested(batch, one, other, greedy)
    for session, tree in zip((one, other, greedy), trees, strict=True):
        same(session.tree.best(SHAPE.total, official=True), tree)
    one.draw(None)
    (again,) = batch.trees([one], SHAPE)
    same(again, plain)


def test_noise_is_that_of_the_position(batch: BatchDrafter) -> None:
    """The same tree again when the text has gone on by what the answer began later."""
    session, later = filled(batch), filled(batch)
    session.draw(RACE)
    later.draw(Race(RACE.temperature, RACE.seed, RACE.choice, RACE.start + 1))
    one, other = batch.trees([session, later], SHAPE)
    assert one.tokens.tolist() != other.tokens.tolist()
    noise = session.noise(COUNT)
    assert noise is not None
    np.testing.assert_array_equal(noise, later.noise(COUNT + 1))


def test_before_the_answer_there_is_no_noise(batch: BatchDrafter) -> None:
    """Of a prompt that comes in parts the server drafts, too."""
    session = filled(batch)
    (plain,) = batch.trees([session], SHAPE)
    session.draw(Race(0.75, 7, 2, COUNT + 3))
    (tree,) = batch.trees([session], SHAPE)
    same(tree, plain)
    session.draw(Race(0.75, 7, 2, COUNT + 2))  # the root's children are before it, theirs are its first tokens
    (tree,) = batch.trees([session], SHAPE)
    assert steps_below(tree, 0) == pytest.approx(steps_below(plain, 0), abs=3e-5)
    assert tree.tokens.tolist() != plain.tokens.tolist()


def test_a_closed_session_knows_no_seed(batch: BatchDrafter) -> None:
    session = filled(batch)
    session.draw(RACE)
    session.close()
    assert not session.draws


def test_what_a_session_remembers_is_bounded() -> None:
    ids = np.array([3, 40])
    noise = RaceNoise(RACE, VOCAB, ids)
    assert noise.at(RACE.start - 1) is None
    for position in [*range(RACE.start, RACE.start + 2 * KEPT), RACE.start]:
        found = noise.at(position)
        assert found is not None
        expected = WEIGHT * RACE.temperature * gumbel(RACE.seed, RACE.choice, position - RACE.start, VOCAB)[ids]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(noise._kept) == KEPT
    whole = RaceNoise(RACE, VOCAB).at(RACE.start)
    assert whole is not None
    assert whole.shape == (VOCAB,)


def test_what_a_server_is_told() -> None:
    assert race_of(Sampler(Sampling(temperature=0.8, seed=-1), choice=3), 20) == Race(
        float(np.float32(0.8)), 2**64 - 1, 3, 20
    )
    for temperature in (0.0, 1e-50, 1001.0, 1e300):
        assert race_of(Sampler(Sampling(temperature=temperature)), 20) is None


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


def accepted(
    text: Text, seed: int, *, temperature: float = 1.0, share_noise: bool = True, mistaken: bool = False
) -> int:
    """Drafts that were right of an answer, which is plain decoding's."""
    with Star(mistaken=mistaken) as star:
        line, found = star.line("edge", LinkSettings(rtt_ms=20)), list[int]()
        session = star.session(line, text, share_noise=share_noise)
        sampling = Sampling(temperature=temperature, seed=seed, logit_bias={EOS: -100})
        line.connect()
        star.clock.spawn(lambda: found.append(answer(session, PROMPT, 80, sampling).accepted_remote), "edge")
        star.clock.run()
        assert bool(star.drafter.drawn) == (share_noise and temperature > 0)
    return found[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_who_knows_the_noise_drafts_better_and_nobody_changes_the_text(text: Text, seed: int) -> None:
    """Nor does a server that takes other noise for the answer's."""
    told = accepted(text, seed)
    assert told > 4 * accepted(text, seed, share_noise=False)
    assert told > 4 * accepted(text, seed, mistaken=True)
    assert accepted(text, seed, temperature=0.0) == accepted(text, seed, temperature=0.0, share_noise=False)


@pytest.mark.parametrize("options", [{}, {"share_noise": False}])
def test_noise_is_shared_unless_it_is_said_otherwise(options: dict[str, bool]) -> None:
    """A runtime's speculators do as they are told."""
    told: list[Any] = []
    remote = SimpleNamespace(begin=lambda prompt, kept, race: told.append(race), bytes_up=0, bytes_down=0)
    link = SimpleNamespace(channel=SimpleNamespace(session=lambda model: remote))
    runtime = SimpleNamespace(link=link, drafting=Drafting(**options), model=None, _phrases=None)
    runtime.telemetry = SimpleNamespace(throttled=lambda: False)
    Runtime._speculator(runtime, public=True).begin(PROMPT, 0, None, RACE)  # type: ignore[arg-type]
    assert told == [None if options else RACE]


@pytest.mark.parametrize("share", [True, False])
def test_the_command_line_decides(share: bool) -> None:
    assert _drafting("never-wait", "ws://localhost:1", "int8", None, None, share).share_noise is share
