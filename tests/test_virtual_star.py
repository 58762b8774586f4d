"""Edges and a server, their loops as they are, over links of every kind: the text is that of plain decoding, and it
takes no longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from star import GREEDY, PLAIN_SECONDS, PROMPT, TOKENS, Star, answer
from tiny_session import EOS, write_text_files

from starsd.edge.answer import Outcome
from starsd.edge.policy import Policy
from starsd.edge.text import Text
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.virtual_star import VirtualLine
from starsd.shared.config import Limits, Sampling

PLAIN = TOKENS * PLAIN_SECONDS
NEAR = LinkSettings(rtt_ms=5)

Disturb = Callable[[Star, VirtualLine], None]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


def run(
    text: Text,
    settings: LinkSettings,
    policy: Policy = Policy.NEVER_WAIT,
    *,
    edges: int = 1,
    tokens: int = TOKENS,
    sampling: Sampling = GREEDY,
    disturb: Disturb = lambda star, line: None,
) -> list[Outcome]:
    """Every edge answers once, over a link of its own, and `disturb` does what it wants in the meantime."""
    outcomes: list[Outcome] = []
    with Star() as star:

        def edge(number: int) -> None:
            line = star.line(f"edge {number}", settings, number)
            line.connect()
            star.clock.sleep(1.0)
            session = star.session(line, text, policy)
            star.clock.spawn(lambda: disturb(star, line), "disturb", daemon=True)
            outcomes.append(answer(session, [*PROMPT, number], tokens, sampling))

        for number in range(edges):
            star.clock.spawn(lambda number=number: edge(number), f"edge {number}")
        star.clock.run()
        assert not star.drafter.wrong
    return outcomes


def test_plain_decoding_takes_a_pass_a_token(text: Text) -> None:
    (outcome,) = run(text, LinkSettings(rtt_ms=20), Policy.PLAIN)
    assert (outcome.passes, outcome.accepted_remote) == (119, 0)


@pytest.mark.parametrize("policy", [Policy.STOP_AND_WAIT, Policy.NEVER_WAIT])
def test_on_a_short_link_drafts_save_passes(text: Text, policy: Policy) -> None:
    (outcome,) = run(text, LinkSettings(rtt_ms=2), policy)
    assert outcome.accepted_remote > 40
    assert outcome.seconds < 0.6 * PLAIN


@pytest.mark.parametrize("rtt", [0, 50, 100, 200, 400, 2000])
def test_nobody_who_never_waits_is_slower_than_alone(text: Text, rtt: float) -> None:
    (outcome,) = run(text, LinkSettings(rtt_ms=rtt))
    print(rtt, outcome.passes, outcome.accepted_remote, outcome.seconds, PLAIN / outcome.seconds)
    assert outcome.tokens_per_second >= 0.98 / PLAIN_SECONDS


def test_edges_share_a_server(text: Text) -> None:
    outcomes = run(text, NEAR, edges=4, sampling=Sampling(temperature=0.3, logit_bias={EOS: -100}))
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == 4
    assert all(outcome.tokens_per_second > 1.2 / PLAIN_SECONDS for outcome in outcomes)


def test_the_same_run_is_the_same(text: Text) -> None:
    settings = LinkSettings(rtt_ms=30, jitter_ms=20, up_kbit=100)
    first, again = run(text, settings, edges=3), run(text, settings, edges=3)
    assert first == again


# what goes wrong


def _restarts(star: Star, line: VirtualLine) -> None:
    while True:
        star.clock.sleep(0.7)
        star.server.restart()


def _replaced(star: Star, line: VirtualLine) -> None:
    while True:
        star.clock.sleep(0.7)
        star.server.replace([star.head()])


def _cut(star: Star, line: VirtualLine) -> None:
    while True:
        star.clock.sleep(0.73)
        line.link.cut("close")
        line.disconnect()
        star.clock.sleep(0.2)
        line.link.cut("none")
        line.connect()


def _half_open(star: Star, line: VirtualLine) -> None:
    """The server believes in the old connection for longer than the edge, whose slots are all taken meanwhile."""
    while True:
        star.clock.sleep(1.1)
        line.disconnect(unnoticed=20.0)
        line.connect()


def _hole(star: Star, line: VirtualLine) -> None:
    star.clock.sleep(1.0)
    line.link.cut("hole")


def _jump(star: Star, line: VirtualLine) -> None:
    star.clock.sleep(1.0)
    line.link.set(rtt_ms=500)


def _swing(star: Star, line: VirtualLine) -> None:
    while True:
        star.clock.sleep(0.4)
        line.link.set(rtt_ms=500 if line.link.settings.rtt_ms < 100 else 20)


def _thin(star: Star, line: VirtualLine) -> None:
    line.link.set(up_kbit=64)


def _thinner(star: Star, line: VirtualLine) -> None:
    line.link.set(up_kbit=4, down_kbit=4)


def _stalls(star: Star, line: VirtualLine) -> None:
    while True:
        star.clock.sleep(0.31)
        line.link.stall(0.4)


def _tired(star: Star, line: VirtualLine) -> None:
    star.clock.sleep(1.0)
    star.pass_seconds = 3.0


FAULTS = [_restarts, _replaced, _cut, _half_open, _hole, _jump, _swing, _thin, _thinner, _stalls, _tired]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rtt", [0, 20, 80])
def test_whatever_goes_wrong_nobody_is_slower_than_alone(text: Text, fault: Disturb, rtt: float) -> None:
    (outcome,) = run(text, LinkSettings(rtt_ms=rtt), disturb=fault)
    print(fault.__name__, rtt, outcome.passes, outcome.accepted_remote, PLAIN / outcome.seconds)
    assert outcome.tokens_per_second >= 0.98 / PLAIN_SECONDS


@pytest.mark.parametrize("seconds", [0.3, 3.0, 10.0])
@pytest.mark.parametrize("how", ["hole", "close"])
def test_after_a_cut_speed_is_back_within_two_seconds(text: Text, how: str, seconds: float) -> None:
    """At 5 Mbit/s and 20 ms; the same tokens take as long as they do without a cut."""

    def times(cut: bool) -> list[float]:
        """When each token was there."""
        out: list[float] = []
        with Star() as star:

            def edge() -> None:
                line = star.line("edge", LinkSettings(rtt_ms=20, up_kbit=5000, down_kbit=5000))
                line.connect()
                star.clock.sleep(1.0)
                session = star.session(line, text)
                if cut:
                    star.clock.spawn(lambda: disturb(line), "cut")
                for piece in session.generate(PROMPT, GREEDY, Limits(max_new_tokens=600)):
                    out.extend([star.clock.now()] * len(piece.tokens))

            def disturb(line: VirtualLine) -> None:
                star.clock.sleep(5.0)
                line.link.cut(how)  # type: ignore[arg-type]
                if how == "close":
                    line.disconnect()
                star.clock.sleep(seconds)
                line.link.cut("none")
                line.connect()

            star.clock.spawn(edge, "edge")
            star.clock.run()
        return out

    whole, broken = times(False), times(True)
    first = next(index for index, at in enumerate(broken) if at > 6 + seconds + 2)
    ratio = (whole[-1] - whole[first]) / (broken[-1] - broken[first])
    cut, end = (next(index for index, at in enumerate(broken) if at > when) for when in (6.2, 6 + seconds))
    alone = (end - cut) * PLAIN_SECONDS / (broken[end] - broken[cut])
    print(how, seconds, "recovered", ratio, "of", len(broken) - first, "alone", alone)
    assert ratio > 0.95
    assert alone >= 0.98
