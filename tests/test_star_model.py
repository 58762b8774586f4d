"""The star on the real model, over real sockets: whatever the policy, the distance and the faults, the tokens are those
of plain decoding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from starsd.edge.answer import Outcome
from starsd.edge.policy import Policy
from starsd.edge.runtime import Drafting, Runtime
from starsd.edge.session import Session
from starsd.scripts.link_emulator import EmulatorThread
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.local_server import LocalServer
from starsd.server.packaged import packaged_head
from starsd.shared.config import Engine, Limits, Sampling

pytestmark = pytest.mark.model

QUESTIONS = ("Why do leaves turn red in autumn?", "Write a function that finds the largest of three numbers.")
GREEDY, WARM = Sampling(), Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3)
LIMITS = Limits(max_new_tokens=48)
ENGINE = Engine(threads=1)

Answers = dict[tuple[str, float], list[int]]


def ask(session: Session, question: str, sampling: Sampling) -> Outcome:
    *_, last = session.generate(session.text.encode_chat([{"role": "user", "content": question}]), sampling, LIMITS)
    assert last.outcome is not None
    return last.outcome


@pytest.fixture(scope="module")
def bundle(smollm2_bundle: Callable[[str], Path]) -> str:
    return str(smollm2_bundle("int8"))


@pytest.fixture(scope="module")
def plain(bundle: str) -> Answers:
    with Runtime.open(bundle, engine=ENGINE, drafting=Drafting(policy=Policy.PLAIN)) as runtime:
        session = runtime.session()
        return {(q, s.temperature): ask(session, q, s).token_ids for q in QUESTIONS for s in (GREEDY, WARM)}


@pytest.fixture(scope="module")
def port(smollm2_folder: Path) -> Iterator[int]:
    """Where a server listens."""
    with LocalServer("smollm2-135m", packaged_head("smollm2-135m")) as running:
        yield urlsplit(running.wait()).port or 0


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rtt", [0, 80, 400])
@pytest.mark.parametrize("policy", [Policy.STOP_AND_WAIT, Policy.NEVER_WAIT])
def test_distance_changes_no_token(
    bundle: str, plain: Answers, port: int, policy: Policy, rtt: float, sampling: Sampling
) -> None:
    with EmulatorThread("127.0.0.1", port, LinkSettings(rtt_ms=rtt)) as link:
        drafting = Drafting(policy=policy, server=f"ws://127.0.0.1:{link.port}")
        with Runtime.open(bundle, engine=ENGINE, drafting=drafting) as runtime:
            session = runtime.session()
            outcomes = [ask(session, question, sampling) for question in QUESTIONS]
    assert [outcome.token_ids for outcome in outcomes] == [plain[q, sampling.temperature] for q in QUESTIONS]
    if rtt < 400:  # from so far the answers are over before the session is open
        assert sum(outcome.bytes_down for outcome in outcomes) > 0


@pytest.mark.parametrize("fault", ["close", "hole", "none"])
def test_faults_change_no_token(bundle: str, plain: Answers, port: int, fault: str) -> None:
    with EmulatorThread("127.0.0.1", port, LinkSettings(rtt_ms=20)) as link:
        drafting = Drafting(server=f"ws://127.0.0.1:{link.port}")
        with Runtime.open(bundle, engine=ENGINE, drafting=drafting) as runtime:
            session = runtime.session()
            timers = [threading.Timer(at, link.cut, [fault]) for at in (0.3, 0.6, 0.9)]
            for timer in timers:
                timer.start()
            outcomes = [ask(session, question, GREEDY) for question in QUESTIONS]
            for timer in timers:
                timer.cancel()
    assert [outcome.token_ids for outcome in outcomes] == [plain[q, 0.0] for q in QUESTIONS]


def test_conversations_share_an_engine(bundle: str, plain: Answers, port: int) -> None:
    found: dict[str, list[int]] = {}
    with Runtime.open(bundle, engine=ENGINE, drafting=Drafting(server=f"ws://127.0.0.1:{port}")) as runtime:
        sessions = [runtime.session() for _ in QUESTIONS]

        def talk(session: Session, question: str) -> None:
            found[question] = ask(session, question, WARM).token_ids

        threads = [threading.Thread(target=talk, args=pair) for pair in zip(sessions, QUESTIONS, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {question: plain[question, 0.8] for question in QUESTIONS}
