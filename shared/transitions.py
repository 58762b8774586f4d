"""Which message each side may send in which state, and the state after it. Data only; `protocol.py` walks it.

connection   START ─Hello► GREETED ─Welcome► OPEN          Error(0) from either side ► CLOSED
session      CLOSED ─Open► OPENING ─Opened► BARE ─Prefix► ACTIVE
             ACTIVE: Prefix, Verdict, Features, Draft       Close, or Error from either side ► CLOSED
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from starsd.shared.limits import name_of
from starsd.shared.messages import (
    Ack,
    Close,
    Draft,
    Error,
    Features,
    Hello,
    Open,
    Opened,
    Prefix,
    Stats,
    Verdict,
    Welcome,
)


class Role(Enum):
    """A side of a connection."""

    EDGE = "edge"
    SERVER = "server"

    @property
    def peer(self) -> Role:
        return Role.SERVER if self is Role.EDGE else Role.EDGE


class ConnectionState(Enum):
    START = "new"
    GREETED = "greeted"  # the edge said Hello
    OPEN = "open"
    CLOSED = "closed"


class SessionState(Enum):
    CLOSED = "closed"  # or never opened
    OPENING = "opening"
    BARE = "bare"  # open, without text
    ACTIVE = "active"
    CLOSING = "closing"  # the edge ended it, the server has not answered


_EITHER = (Role.EDGE, Role.SERVER)

CONNECTION_TABLE: dict[tuple[ConnectionState, Role, type[Any]], ConnectionState] = {
    (ConnectionState.START, Role.EDGE, Hello): ConnectionState.GREETED,
    (ConnectionState.GREETED, Role.SERVER, Welcome): ConnectionState.OPEN,
    (ConnectionState.OPEN, Role.SERVER, Ack): ConnectionState.OPEN,
    **{(ConnectionState.OPEN, role, Stats): ConnectionState.OPEN for role in _EITHER},
    **{
        (state, role, Error): ConnectionState.CLOSED
        for state in (ConnectionState.START, ConnectionState.GREETED, ConnectionState.OPEN)
        for role in _EITHER
    },
}

SESSION_TABLE: dict[tuple[SessionState, Role, type[Any]], SessionState] = {
    (SessionState.CLOSED, Role.EDGE, Open): SessionState.OPENING,
    (SessionState.OPENING, Role.SERVER, Opened): SessionState.BARE,
    (SessionState.BARE, Role.EDGE, Prefix): SessionState.ACTIVE,
    (SessionState.ACTIVE, Role.EDGE, Prefix): SessionState.ACTIVE,
    (SessionState.ACTIVE, Role.EDGE, Verdict): SessionState.ACTIVE,
    (SessionState.ACTIVE, Role.EDGE, Features): SessionState.ACTIVE,
    (SessionState.ACTIVE, Role.SERVER, Draft): SessionState.ACTIVE,
    **{
        (state, Role.EDGE, kind): SessionState.CLOSING
        for state in (SessionState.OPENING, SessionState.BARE, SessionState.ACTIVE)
        for kind in (Close, Error)
    },
    **{
        (state, Role.SERVER, Error): SessionState.CLOSED
        for state in (SessionState.OPENING, SessionState.BARE, SessionState.ACTIVE, SessionState.CLOSING)
    },
    (SessionState.CLOSING, Role.SERVER, Close): SessionState.CLOSED,
    (SessionState.CLOSING, Role.EDGE, Open): SessionState.OPENING,
}


SENT_BY = {role: {kind for _, sender, kind in SESSION_TABLE if sender is role} for role in _EITHER}


def refusal(state: ConnectionState | SessionState, role: Role, kind: type[Any], session: int = 0) -> str:
    """What is said of a message that the state does not allow: who sent what, in which state, what was expected."""
    table: Any = CONNECTION_TABLE if isinstance(state, ConnectionState) else SESSION_TABLE
    allowed = [name_of(k) for s, r, k in table if s is state and r is role]
    if state is ConnectionState.OPEN:
        allowed.append("messages of sessions")
    where = f"session {session}" if isinstance(state, SessionState) else "the connection"
    return f"{role.value} sent {name_of(kind)} while {where} is {state.value}, expected {_or(allowed)}"


def _or(names: list[str]) -> str:
    if not names:
        return "nothing"
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
