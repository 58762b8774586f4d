"""What one conversation tells the drafter, and what came back: the edge's half of a session, without any I/O.

The conversation's thread reports tokens and features; the link's thread asks for the next message to send and hands in
what arrives. Nothing waits in a queue of messages: what is still to be said is worked out from the conversation when
there is room for it. So a slow link makes verdicts longer and features late, and memory stays what it was.

After a reconnect the server knows nothing. The session opens again and says the last `window` tokens with their
features, the newest first. So it does when it is used again after it was idle for long: then it had been closed, to
leave its place at the server to others.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from starsd.edge.estimates import Response
from starsd.edge.feature_rows import FeatureRows
from starsd.edge.projector import Projector
from starsd.shared.clock import Clock, Mailbox
from starsd.shared.features import Codec, Floats, holdable
from starsd.shared.messages import Close, Draft, Features, Message, Open, Opened, Prefix, Race, Verdict

CHUNK = 4096  # bytes of features in a message: what a verdict may have to wait for
MAX_PREFIX, MAX_VERDICT = 16_384, 2048  # tokens in one message
REOPEN_SECONDS = 0.5  # at least, after the server closed a session
MOST_WAITING = 4096  # nodes and messages of drafts that nobody has taken; what comes beyond is dropped
_SENT_AT = 64  # verdicts whose sending is remembered


class Urgency(IntEnum):
    """What goes first when there is room for one message."""

    CONTROL = 0
    TOKENS = 1
    NEWEST = 2
    BACKFILL = 3
    NOTHING = 4


class Due(NamedTuple):
    """Seconds from now."""

    likely: float
    latest: float


class RemoteSession:
    """Made by a channel. `padding` bytes go behind every row of features: benches stand in for wider models. After
    `idle_seconds` in which the conversation did nothing the server may forget it."""

    # what the server knows of us; `_start_over` says that it knows nothing
    _asked: bool
    _reopening: bool
    _opened: Opened | None
    _begun: int  # the epoch that it has been told of
    _origin: int  # the first token that it knows
    _said: int  # tokens that it has been told
    _seq: int
    _received: int
    _lag: int
    _sent_at: dict[int, float]

    def __init__(
        self,
        *,
        fingerprint: str,
        vocab: int,
        width: int,
        codec: Codec,
        clock: Clock,
        wake: Callable[[], None],
        window: int = 2048,
        padding: int = 0,
        idle_seconds: float = math.inf,
    ) -> None:
        self.number = 0  # what the server knows it by
        self.response = Response()
        self.bytes_up = self.bytes_down = 0
        self.resting = False  # nothing more comes before the server hears of new tokens or features
        self.fingerprint = fingerprint
        self._projector: Projector | None = None
        self._tokens: list[int] = []  # the conversation so far
        self._vocab, self._width, self._codec, self._clock, self._wake = vocab, width, codec, clock, wake
        self._padding = bytes(padding)
        self._lock = threading.Lock()
        self._inbox: Mailbox[Any] = clock.mailbox()
        self._waiting = 0  # nodes and messages in it, about
        self._window = window
        self.rows = FeatureRows(window, width)
        self._idle_seconds, self._used_at = idle_seconds, clock.now()
        self._race: Race | None = None
        self._epoch = 0  # lives of the text so far; 0: there is none yet
        self._closing = self.closed = False
        self.lost()

    # The conversation's side.

    def begin(self, tokens: Sequence[int], kept: int, race: Race | None = None) -> None:
        """The conversation is now these tokens, the first `kept` of which are what they were. The server is told of
        `race`, by which what follows is drawn, so that its drafts are."""
        with self._lock:
            self._epoch += 1
            self._used_at = self._clock.now()
            self._race = race
            self._tokens = list(tokens)
            self._said = min(self._said, kept)
            self.rows.forget(kept)
        self._wake()

    def held(self, start: int, stop: int) -> tuple[int, Floats]:
        """Of the features of rows `start` to `stop` the last that are here without a gap, and the first one's row."""
        with self._lock:
            return self.rows.last(start, stop)

    def features(self, start: int, rows: Floats) -> None:
        """What the target computed for the tokens from position `start` on, float32 (n, width)."""
        with self._lock:
            self._used_at = self._clock.now()
            self.rows.put(start, rows)
        self._wake()

    def commit(self, tokens: Sequence[int]) -> None:
        """The conversation goes on with these."""
        with self._lock:
            self._used_at = self._clock.now()
            self._tokens += tokens
        self._wake()

    def drafts(self, wait: float) -> list[Draft]:
        """What has arrived of the present epoch; when nothing has, waits for something up to `wait` seconds."""
        arrived = self._inbox.take(wait)
        self._waiting = 0
        return [draft for draft in arrived if draft.epoch == self._epoch]

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self.closed = not self._asked
        self._wake()

    @property
    def epoch(self) -> int:
        """Rises whenever node numbers begin anew."""
        return self._epoch

    @property
    def live(self) -> bool:
        """Whether the server has the session, and has been told of the present text."""
        return self._opened is not None and self._begun == self._epoch and not self._closing

    @property
    def due(self) -> Due | None:
        """When all drafts that know the newest verdict are likely to be here; None: overdue, or never seen yet."""
        with self._lock:
            now = self._clock.now()
            oldest = next(iter(self._sent_at.values()), now)
            if now - oldest > self.response.late or math.isinf(self.response.mean):
                return None
            newest = self._sent_at.get(self._seq, now) if self._said == len(self._tokens) else now
            return Due(max(0.0, newest + self.response.mean - now), max(0.0, newest + self.response.late - now))

    # The link's side.

    @property
    def unnumbered(self) -> bool:
        """Whether it is about to open, for which it needs a number that was not used lately."""
        return not self._asked and not self._closing

    def lost(self) -> None:
        """The server knows nothing of this session, and has to be told from the beginning."""
        with self._lock:
            self._offered = False
            self._reopen_at = -math.inf
            self._start_over()
            self.closed = self._closing

    def refused(self, retry_after: float) -> None:
        """The server has closed the session; it may be opened again in so many seconds (negative: not with it)."""
        with self._lock:
            self._start_over()
            self._offered = self._offered and retry_after >= 0
            self._reopen_at = self._clock.now() + max(retry_after, REOPEN_SECONDS)

    def offer(self, projector: Projector | None) -> None:
        """The server drafts for our model; with a projector, rows go through it first. Where that is another one than
        the session was opened with it is opened again."""
        if projector is not None and projector.width != self._width:
            projector = None
        with self._lock:
            self._offered = True
            self._reopening = self._reopening or (self._asked and projector is not self._projector)
            self._projector = projector

    def opened(self, message: Opened) -> bool:
        """The server has the session; False when its features are of another width than ours."""
        with self._lock:
            if self._reopening:
                return True
            self._opened = message if message.width == self.sent_width else None
            return self._opened is not None

    def arrived(self, draft: Draft, size: int) -> None:
        now = self._clock.now()
        with self._lock:
            self.bytes_down += size
            if draft.epoch != self._epoch:
                return
            self._received = draft.first + len(draft.tokens)
            self._lag = len(self._tokens) - draft.base
            self.resting = draft.rest and draft.seq == self._seq and self._said == len(self._tokens)
            if draft.rest and (sent := self._sent_at.get(draft.seq)) is not None:
                self.response.observe(now - sent)
                self._sent_at = {seq: at for seq, at in self._sent_at.items() if seq > draft.seq}
            self._waiting += 1 + len(draft.tokens)
            if self._waiting > MOST_WAITING:
                return
        self._inbox.put(draft)

    def urgency(self) -> Urgency:
        """Of what `next_message` would give."""
        with self._lock:
            return self._urgency()

    def next_message(self, chunk: int = CHUNK) -> Message | None:
        """What to say next, features in pieces of `chunk` bytes or one row. It counts as said: whoever takes it sends
        it, or tells us that the server is lost."""
        with self._lock:
            match self._urgency():
                case Urgency.CONTROL:
                    return self._control()
                case Urgency.TOKENS:
                    return self._say()
                case Urgency.NEWEST | Urgency.BACKFILL:
                    return self._show(chunk)
                case Urgency.NOTHING:
                    return None

    def sent(self, message: Message, size: int) -> None:
        with self._lock:
            self.bytes_up += size
            if isinstance(message, Verdict):
                self._sent_at[message.seq] = self._clock.now()
                while len(self._sent_at) > _SENT_AT:
                    del self._sent_at[next(iter(self._sent_at))]

    def _start_over(self) -> None:
        self._epoch += self._epoch > 0
        self._asked = self._reopening = False
        self._opened, self._begun, self._origin = None, -1, sys.maxsize
        self._said = self._seq = self._received = self._lag = 0
        self._sent_at = {}
        self.rows.resend(0)
        self.resting = False

    def _urgency(self) -> Urgency:
        if self.closed or not (self._closing or self._asked or self._may_open):
            return Urgency.NOTHING
        if self._closing or self._reopening or not self._asked or self._idle:
            return Urgency.CONTROL
        if self._opened is None or not self._epoch:
            return Urgency.NOTHING
        if self._begun != self._epoch or self._said < len(self._tokens):
            return Urgency.TOKENS
        newest = self._newest_unsent
        if newest < 0:
            return Urgency.NOTHING
        return Urgency.NEWEST if newest >= self._said - 2 else Urgency.BACKFILL

    @property
    def _may_open(self) -> bool:
        return self._offered and self._clock.now() >= self._reopen_at and not self._idle

    @property
    def _idle(self) -> bool:
        return self._clock.now() - self._used_at > self._idle_seconds

    def _control(self) -> Message | None:
        if self._closing:
            self.closed = True
            return Close(self.number) if self._asked else None
        if self._asked and (self._reopening or self._idle):
            self._start_over()
            return Close(self.number)
        self._asked = True
        projected = self._projector is not None
        return Open(self.number, self.fingerprint, self._vocab, self._codec.name, projected, padding=len(self._padding))

    def _say(self) -> Message:
        """A Prefix when the server's text is not ours, else a Verdict; what does not fit in one follows in the next."""
        assert self._opened is not None
        self.resting = False
        if self._begun != self._epoch:
            start = self._said if self._begun >= 0 else max(0, len(self._tokens) - self._looks_back)
            self._begun, self._seq, self._received = self._epoch, 0, 0
            self._said = min(len(self._tokens), start + MAX_PREFIX)
            self._origin = min(self._origin, start)
            self.rows.resend(max(start - 1, 0))  # row i is made of token i + 1, too
            self._sent_at.clear()
            tokens = np.array(self._tokens[start : self._said], np.int64)
            return Prefix(self.number, self._epoch, start, tokens, self._race)
        start, self._seq = self._said, self._seq + 1
        self._said = min(len(self._tokens), start + MAX_VERDICT)
        tokens = np.array(self._tokens[start : self._said], np.int64)
        return Verdict(self.number, self._epoch, self._seq, start, self._received, min(self._lag, 255), tokens)

    def _show(self, chunk: int) -> Message:
        """The newest rows that were not sent, as many as a chunk holds."""
        size = self._codec.row_bytes(self.sent_width) + len(self._padding)
        first, rows = self.rows.take(self._newest_unsent, max(self._oldest_wanted, 0), max(1, chunk // size))
        encoded = self._codec.encode(holdable(rows if self._projector is None else self._projector(rows)))
        if self._padding:
            step = len(encoded) // len(rows)
            encoded = b"".join(encoded[i : i + step] + self._padding for i in range(0, len(encoded), step))
        return Features(self.number, self._epoch, first, encoded)

    @property
    def sent_width(self) -> int:
        return self._width if self._projector is None else self._projector.hidden

    @property
    def _looks_back(self) -> int:
        """Rows that the drafter sees, or that are held here where those are fewer."""
        return min(self._opened.window, self._window) if self._opened is not None else self._window

    @property
    def _oldest_wanted(self) -> int:
        """No row before this one is of use: the server does not know its token, or the drafter looks back less far."""
        return max(self._origin, len(self._tokens) - self._looks_back) - 1

    @property
    def _newest_unsent(self) -> int:
        """The newest row that waits and whose following token the server knows, -1 when none does."""
        return self.rows.newest_unsent(self._oldest_wanted, self._said - 1)
