"""A runtime and its server: what it hears of conversations, what it never hears of private ones, what a status says."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest
from edge_ends import FINGERPRINT
from recording_link import RecordingLink
from runtime_helpers import PROMPT, WARM, run
from star import MarkedTarget, marks
from tiny_session import ToyTarget, outcome_of

from starsd.edge import Drafting, Limits, Piece, Runtime, Status
from starsd.edge.session import Session
from starsd.edge.text import Text
from starsd.shared.errors import UsageError

pytest_plugins = ("runtime_fixtures",)


@pytest.fixture
def linked(text: Text, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Runtime, RecordingLink]]:
    """Features are marked with their token and place."""
    link = RecordingLink()
    monkeypatch.setattr("starsd.edge.runtime.open_link", lambda *_: link)
    drafting = Drafting(server="ws://localhost:1")
    runtime = Runtime.around(MarkedTarget(), text=text, fingerprint=FINGERPRINT, drafting=drafting, conversations=3)
    with runtime:
        yield runtime, link


def test_a_server_hears_of_answers(linked: tuple[Runtime, RecordingLink]) -> None:
    runtime, link = linked
    said = run(runtime, PROMPT).token_ids
    (heard,) = link.texts.values()
    assert heard == [*PROMPT, *said]
    assert {row for _, row, _ in link.rows} == set(range(len(heard) - 1))
    run(runtime, [*PROMPT, *said, 50])
    assert link.opened == 1


def test_private_tokens_never_leave(linked: tuple[Runtime, RecordingLink], text: Text) -> None:
    """Whatever the order of public and private requests, and whoever reuses whose cache."""
    runtime, link = linked
    chance = random.Random(3)
    public: list[list[int]] = []
    chats: list[list[int]] = [[*range(60, 70)]]
    for _ in range(120):
        prompt = [*chance.choice(chats)[: chance.randrange(8, 40)], *(chance.randrange(2, 290) for _ in range(3))]
        private = chance.random() < 0.5
        pieces = runtime.generate(prompt, sampling=WARM, limits=Limits(max_new_tokens=12), private=private)
        said = [token for _ in range(chance.choice([1, 3, 99])) for token in next(pieces, Piece("", [])).tokens]
        pieces.close()
        assert (
            said
            == outcome_of(Session(MarkedTarget(), text), prompt, WARM, Limits(max_new_tokens=12)).token_ids[: len(said)]
        )
        chats.append([*prompt, *said])
        if not private:
            public.append([*prompt, *said])
    assert len(link.told) > 200
    for heard in link.told:
        assert any(chat[: len(heard)] == heard for chat in public), "a server was told what was not public"
    for heard, row, value in link.rows:
        assert value == marks(row, [heard[row]])[0, 0], "a feature is of another token than the server was told"


def test_private_conversations_have_no_session(linked: tuple[Runtime, RecordingLink]) -> None:
    runtime, link = linked
    run(runtime, PROMPT, private=True)
    assert (link.opened, link.told) == (0, [])
    run(runtime, PROMPT)
    assert link.opened == 1
    for first in (5, 6, 7):  # they take the places of all, the public one's too
        run(runtime, [first, 8, 9], private=True)
    assert (link.opened, link.ended, link.open) == (1, 1, set())


def test_a_public_request_reads_what_only_private_ones_have_read(linked: tuple[Runtime, RecordingLink]) -> None:
    """The server has to see its features."""
    runtime, link = linked
    prompt, long = [*range(60, 90)], Limits(max_new_tokens=60)
    for first in range(3):  # a new conversation, and from the third on one that a private one had
        run(runtime, [first, *prompt], limits=long, private=True)
        run(runtime, [first, *prompt, 99], limits=long)
        assert {row for heard, row, _ in link.rows if heard[0] == first} >= set(range(31))
    for last in range(3):  # all are private, and have read what comes
        run(runtime, [9, *prompt, last], limits=long, private=True)
    run(runtime, [9, *prompt, 99], limits=long)
    assert {row for heard, row, _ in link.rows if heard[0] == 9} >= set(range(31))


def test_copied_rows_bring_their_features(linked: tuple[Runtime, RecordingLink]) -> None:
    runtime, link = linked
    system = [*range(60, 90)]
    run(runtime, [*system, 99], limits=Limits(max_new_tokens=60))
    run(runtime, [*system, 98])
    assert link.opened == 2
    assert {row for heard, row, _ in link.rows if heard[30] == 98} >= set(range(30))


def test_status(linked: tuple[Runtime, RecordingLink], open_one: Callable[..., Runtime]) -> None:
    runtime, link = linked
    status = runtime.status()
    assert (status.link, status.regime, status.server, status.notice) == ("up", "idle", "ws://localhost:1", "")
    run(runtime, PROMPT)
    assert runtime.status().regime in ("device only", "waits")  # nothing of the server's was right, if it waited for it
    link.channel.disconnected()
    assert (runtime.status().link, runtime.status().regime) == ("lost", "device only")
    link.reconnects = -1
    assert (runtime.status().link, runtime.status().regime) == ("connecting", "connecting")
    alone = open_one(ToyTarget(context=99), precision="int8", conversations=5)
    assert alone.status() == Status(
        model="toy",
        precision="int8",
        context=99,
        conversations=5,
        busy=0,
        link="off",
        server="",
        rtt_ms=None,
        regime="device only",
        notice="",
    )


def test_a_server_needs_its_library(monkeypatch: pytest.MonkeyPatch, open_one: Callable[..., Runtime]) -> None:
    monkeypatch.setitem(sys.modules, "starsd.edge.link", None)
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(UsageError, match="is not installed: run pip install"):
        open_one(drafting=Drafting(server="ws://localhost:1"))
