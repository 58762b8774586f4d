"""An edge and a server that is up to no good: no token changes, nothing grows without end, and nobody is slower."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from liar import LIES, Liar, tampering
from star import PLAIN_SECONDS, PROMPT, Star, answer
from tiny_session import write_text_files

from starsd.edge.drafts import MAX_NODES
from starsd.edge.remote import MOST_WAITING
from starsd.edge.session import Session
from starsd.edge.text import Text
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.virtual_link import VirtualWay
from starsd.scripts.virtual_star import AGAIN_SECONDS, VirtualLine

NEAR = LinkSettings(rtt_ms=5)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


class LyingServer:
    """In place of a VirtualServer."""

    def __init__(self, star: Star, how: str) -> None:
        self.clock, self.how = star.clock, how
        self.connections = self.frames = 0
        self._lines: dict[bytes, tuple[Liar, VirtualWay, Callable[[bytes], None], Callable[[], None]]] = {}

    def connect(
        self, name: bytes, way: VirtualWay, arrive: Callable[[bytes], None], hang_up: Callable[[], None]
    ) -> None:
        self.connections += 1
        self._lines[name] = Liar(self.how, self.connections), way, arrive, hang_up

    def disconnect(self, name: bytes) -> None:
        self._lines.pop(name, None)

    def take(self, name: bytes, data: bytes) -> None:
        if name not in self._lines:
            return
        liar, way, arrive, hang_up = self._lines[name]
        self.frames += 1
        for frame in liar.take(data):
            if way.room:
                way.send(len(frame), lambda frame=frame: arrive(frame))  # type: ignore[misc]
        if liar.over:
            self.disconnect(name)
            self.clock.call_at(self.clock.now() + 0.05, hang_up)


@pytest.mark.parametrize("how", LIES)
def test_whatever_a_server_says_no_token_changes_and_nobody_is_slower(text: Text, how: str) -> None:
    with Star() as star:
        server = LyingServer(star, how)
        line = VirtualLine(server, "edge", NEAR, window=64)  # type: ignore[arg-type]
        line.connect()
        outcomes, sessions = [], [star.session(line, text) for _ in range(2)]

        def edge(session: Session, number: int) -> None:
            star.clock.sleep(1.0)
            said: list[int] = []
            for turn in range(3):
                outcomes.append(answer(session, [*said, *PROMPT, number, turn]))
                said += outcomes[-1].token_ids

        for number, session in enumerate(sessions):
            star.clock.spawn(lambda session=session, number=number: edge(session, number), f"edge {number}")
        star.clock.run()
        for session in sessions:
            remote = session.speculator.remote
            assert remote is not None
            assert sum(1 + len(draft.tokens) for draft in remote._inbox._items) <= MOST_WAITING
            assert len(session.speculator._drafts) <= MAX_NODES
            assert len(remote._sent_at) <= 64
        assert len(line.channel._numbered) <= 2
    speeds = [outcome.tokens_per_second * PLAIN_SECONDS for outcome in outcomes]
    print(how, min(speeds), max(speeds), server.connections, server.frames, line.channel.notice)
    assert len(speeds) == 6
    assert min(speeds[:2]) >= 0.95  # while it learns what such a server is worth
    assert min(speeds[2:]) >= 0.98
    assert server.connections < 3 + 18 / AGAIN_SECONDS  # nobody is hammered


@pytest.mark.parametrize("seed", range(12))
def test_whatever_becomes_of_frames_no_token_changes(text: Text, seed: int) -> None:
    class Tampered(VirtualLine):
        tamper = staticmethod(tampering(seed))

        def _arrive(self, life: int, frame: bytes) -> None:
            for each in self.tamper(frame):
                super()._arrive(life, each)

    outcomes = []
    with Star() as star:

        def edge() -> None:
            line = star.line("edge", NEAR, make=Tampered)
            line.connect()
            star.clock.sleep(1.0)
            session = star.session(line, text)
            outcomes.append(answer(session, PROMPT))
            Tampered.tamper = staticmethod(lambda frame: [frame])  # type: ignore[assignment]
            line.disconnect()  # what was lost, such as a Welcome, is not said again
            line.connect()
            star.clock.sleep(1.0)
            outcomes.append(answer(session, [*PROMPT, 9]))

        star.clock.spawn(edge, "edge")
        star.clock.run()
    assert outcomes[0].tokens_per_second > 0.98 / PLAIN_SECONDS
    assert outcomes[1].tokens_per_second > 1.5 / PLAIN_SECONDS


def test_what_nobody_takes_is_bounded(text: Text) -> None:
    """A server that floods an edge between two answers."""
    with Star() as star:
        server = LyingServer(star, "flood")
        line = VirtualLine(server, "edge", NEAR, window=64)  # type: ignore[arg-type]
        line.connect()
        session = star.session(line, text)
        remote = session.speculator.remote
        assert remote is not None

        def edge() -> None:
            star.clock.sleep(1.0)
            answer(session, PROMPT, 10)
            star.clock.sleep(1.0)
            (liar, way, arrive, _) = next(iter(server._lines.values()))
            for _ in range(60):
                for frame in liar._drafts(_Message(remote.number, remote.epoch), 0):
                    way.send(len(frame), lambda frame=frame: arrive(frame))  # type: ignore[misc]
                star.clock.sleep(0.01)

        star.clock.spawn(edge, "edge")
        star.clock.run()
        assert remote.bytes_down > 400_000
        assert 0 < sum(1 + len(draft.tokens) for draft in remote._inbox._items) <= MOST_WAITING


class _Message:
    def __init__(self, session: int, epoch: int) -> None:
        self.session, self.epoch = session, epoch
