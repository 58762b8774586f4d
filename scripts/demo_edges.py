"""The edges of a demo: each a thread that answers recorded prompts until it is told to stop, at a device's pace.

The first computes its target with the real engine, the others replay what that engine said. Either way every answer is
held against the recording, which is plain decoding by the same engine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from starsd.edge.channel import Model
from starsd.edge.paced_target import PacedTarget
from starsd.edge.phrasebooks import find_phrases
from starsd.edge.policy import Policy
from starsd.edge.recordings import Header, Recording
from starsd.edge.regime import Lately, Step, Watch, regime
from starsd.edge.session import Session
from starsd.edge.speculator import Counts, Speculator
from starsd.edge.target import Target
from starsd.edge.text import Text
from starsd.scripts.demo_table import EdgeRow
from starsd.shared.clock import REAL
from starsd.shared.config import DEFAULT_CODEC, Limits, Sampling
from starsd.shared.profiles import Profile

if TYPE_CHECKING:
    from starsd.edge.link import Link

TAIL = 200  # characters of text that are kept


class Edge:
    """`start` it, look at `row` at any time, `stop` it; `error` is what ended it before that."""

    def __init__(
        self,
        row: EdgeRow,
        target: Target,
        text: Text,
        runs: Sequence[Recording],
        profile: Profile,
        policy: Policy,
        header: Header,
        server: str,
    ) -> None:
        """`server` is a ws:// address, or empty: then there is no link, and all drafts come from the conversation."""
        self.row = replace(row, regime=regime(policy, False, Lately()))
        self.answers = 0  # whole ones
        self.new_tokens = 0
        self.late_prefills = 0  # that took longer than the profile's time
        self.differs: list[str] = []  # where answers were not the recorded ones
        self.error: BaseException | None = None
        self._runs = runs
        self._policy = policy
        self._link = open_link(server, profile, header) if server else None
        remote = None
        if self._link is not None:
            remote = self._link.channel.session(Model(header.fingerprint, header.shape, header.features))
        self._target = PacedTarget(target, profile)
        phrases = find_phrases(header.model, header.shape.vocab)
        self._session = Session(self._target, text, Speculator(policy, remote, phrases=phrases))
        self._watch = Watch()
        self._was_connected = False
        self._late_before = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"edge {row.number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the pass that runs; does not wait for it."""
        self._stopping.set()

    def join(self) -> None:
        """Until it has stopped."""
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        self.stop()
        self.join()
        if self._link is not None:
            self._link.close()

    @property
    def identical(self) -> bool:
        """Whether it said something, and nothing but what was recorded."""
        return self.new_tokens > 0 and not self.differs

    @property
    def late_passes(self) -> int:
        return self._target.late - self.late_prefills

    @property
    def server_stats(self) -> dict[str, float]:
        return self._link.channel.server_stats if self._link is not None else {}

    @property
    def notice(self) -> str:
        """Why the server does not help, for people."""
        return self._link.channel.notice if self._link is not None else ""

    def _run(self) -> None:
        try:
            for run in itertools.cycle(self._runs):
                if self._stopping.is_set():
                    return
                self._answer(run)
        except BaseException as error:  # for whoever waits for us to see
            self.error = error

    def _answer(self, run: Recording) -> None:
        """Answer its prompt, or as much as there is time for, and hold that against the recording."""
        recorded = run.tokens[run.prompt :].tolist()
        self._session.forget()
        prompt, limits = run.tokens[: run.prompt].tolist(), Limits(max_new_tokens=len(recorded))
        self._late_before = self._target.late
        pieces = self._session.generate(prompt, Sampling(), limits, progress=self._read)
        answer: list[int] = []
        text, last, whole, seen = "", None, False, Counts()
        for piece in pieces:
            now, whole = REAL.now(), piece.outcome is not None
            answer += piece.tokens
            text = (text + piece.text)[-TAIL:]
            if not whole and (piece.tokens or last is not None):  # a long prompt's pieces are empty
                seen = self._stepped(len(piece.tokens), now, last, seen, text)
                last = now
            if self._stopping.is_set():
                break
        pieces.close()
        self.answers += whole
        self.new_tokens += len(answer)
        said = recorded[:-1] if run.ended else recorded
        if answer != (said if whole else said[: len(answer)]):
            at = next((i for i, (a, b) in enumerate(zip(answer, said, strict=False)) if a != b), len(answer))
            self.differs.append(
                f"edge {self.row.number} answers {run.id} otherwise than plain decoding from token {at} on"
            )

    def _read(self, what: str, done: int, total: int) -> None:
        """A piece of the prompt was read: what was late until here was no step."""
        self.late_prefills += self._target.late - self._late_before
        self._late_before = self._target.late

    def _stepped(self, tokens: int, now: float, last: float | None, seen: Counts, text: str) -> Counts:
        """A step ended; the one before it at `last`, None for an answer's first. What the answer has counted so far."""
        counts = replace(self._session.speculator.counts)
        remote, waited = counts.remote - seen.remote, counts.waited - seen.waited
        link, session = self._link, self._session.speculator.remote
        seconds = 0.0 if last is None else now - last
        live = session is not None and session.live
        self._watch.saw(Step(now, seconds, waited if seconds else 0.0, remote, live))
        lately = self._watch.lately(link is not None and link.connected) or Lately()
        self._was_connected |= lately.connected
        row = self.row
        self.row = replace(
            row,
            regime=regime(self._policy, self._was_connected, lately),
            tokens=row.tokens + (tokens if last is not None else max(0, tokens - 1)),
            seconds=row.seconds + seconds,
            passes=row.passes + (last is not None),
            remote=row.remote + remote,
            ngram=row.ngram + counts.ngram - seen.ngram,
            bytes_up=link.channel.bytes_up if link is not None else 0,
            bytes_down=link.channel.bytes_down if link is not None else 0,
            rtt_ms=1e3 * link.channel.uplink.round_trip if link is not None else row.rtt_ms,
            text=text,
        )
        return counts


def open_link(server: str, profile: Profile, header: Header) -> Link:
    """A connection whose features weigh what the profile's model's would."""
    from starsd.edge.link import Link

    return Link(
        server,
        client=f"starsd-demo {version('starsd')}",
        codec_name=DEFAULT_CODEC,
        padding=profile.padding(DEFAULT_CODEC, header.shape.hidden),
    )
