"""What one session's messages must say, beyond what its state allows: numbers that go on where the last ones ended.

Both sides keep the same few numbers, however long the text, and check what they send as they check what comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starsd.shared.errors import ProtocolError
from starsd.shared.limits import Layout, name_of
from starsd.shared.messages import Draft, Features, Message, Open, Opened, Prefix, Verdict
from starsd.shared.transitions import SessionState


@dataclass
class SessionRules:
    """One session as one side sees it: `known` tokens, those before `origin` only by number, and `nodes` drafted."""

    request: Open
    state: SessionState = SessionState.OPENING
    layout: Layout | None = None
    max_nodes: int = 0
    epoch: int = 0
    origin: int = 0
    known: int = 0
    seq: int = 0
    nodes: int = 0
    received: int = 0

    def late(self, message: Message) -> bool:
        """Whether it is of an epoch that is over."""
        return isinstance(message, Prefix | Verdict | Features | Draft) and message.epoch < self.epoch

    def check(self, message: Message) -> None:
        """Raises ProtocolError when the message contradicts what was sent before. Changes nothing."""
        if isinstance(message, Verdict | Features | Draft):
            self._equal(message, "epoch", message.epoch, self.epoch)
        if (rule := _CHECKS.get(type(message))) is not None:
            rule(self, message)

    def apply(self, message: Message, state: SessionState) -> None:
        """Take note of a message that was checked."""
        self.state = state
        match message:
            case Opened():
                self.layout = Layout.of(self.request, message)
                self.max_nodes = message.max_nodes
            case Prefix():
                self.origin = min(self.origin, message.start) if self.epoch else message.start
                self.epoch, self.known = message.epoch, message.start + len(message.tokens)
                self.seq = self.nodes = self.received = 0
            case Verdict():
                self.seq, self.received = message.seq, message.received
                self.known += len(message.tokens)
            case Draft():
                self.nodes += len(message.tokens)

    def _opened(self, message: Opened) -> None:
        Layout.of(self.request, message)

    def _prefix(self, message: Prefix) -> None:
        if message.epoch <= self.epoch:
            raise ProtocolError(f"prefix has epoch {message.epoch}, expected {self.epoch + 1} or more")
        if self.epoch and message.start > self.known:
            raise ProtocolError(f"prefix has start {message.start}, expected at most {self.known}")

    def _verdict(self, message: Verdict) -> None:
        self._equal(message, "seq", message.seq, self.seq + 1)
        self._equal(message, "start", message.start, self.known)
        if not self.received <= message.received <= self.nodes:
            raise ProtocolError(f"verdict has received {message.received}, expected {self.received} to {self.nodes}")

    def _features(self, message: Features) -> None:
        """Row i needs token i + 1; of what lies before the first known token only its feature is of use."""
        assert self.layout is not None
        end = message.start + len(message.rows) // self.layout.row_bytes
        if message.start < self.origin - 1 or end > self.known - 1:
            low, high = max(0, self.origin - 1), self.known - 2
            raise ProtocolError(f"features have rows {message.start} to {end - 1}, expected {low} to {high}")

    def _draft(self, message: Draft) -> None:
        self._equal(message, "first", message.first, self.nodes)
        if message.seq > self.seq:
            raise ProtocolError(f"draft has seq {message.seq}, expected at most {self.seq}")
        if not self.origin < message.base <= self.known:
            raise ProtocolError(f"draft has base {message.base}, expected {self.origin + 1} to {self.known}")
        ahead = self.nodes + len(message.tokens) - self.received
        if ahead > self.max_nodes:
            raise ProtocolError(f"draft makes {ahead} nodes under way, expected at most {self.max_nodes}")

    @staticmethod
    def _equal(message: Message, field: str, got: int, expected: int) -> None:
        if got != expected:
            raise ProtocolError(f"{name_of(type(message))} has {field} {got}, expected {expected}")


_CHECKS: dict[type[Any], Callable[[SessionRules, Any], None]] = {
    Opened: SessionRules._opened,
    Prefix: SessionRules._prefix,
    Verdict: SessionRules._verdict,
    Features: SessionRules._features,
    Draft: SessionRules._draft,
}
