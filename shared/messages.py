"""Every message between edge and server, one frozen type each. Their bytes: `docs/protocol.md`, `codec.py`.

    edge ─► server                                     server ─► edge
    Hello      who I am, what I speak                  Welcome    what is spoken, which heads there are, limits
    Open       a session for a model                   Opened     it exists; how much may wait
    Prefix     the conversation anew from a token on   Draft      tree nodes that were not sent before
    Verdict    tokens a step committed                 Ack        bytes of this connection that have been read
    Features   what the target computed for rows       Close      the session is over, as the edge wished
    Close      the session is over                     Error      a session, or the connection (session 0), is over
    Error      the same, and whose fault it is         Stats      how the server fares
    Stats      how the edge fares

A *session* is a number from 1 to 65,535 that the edge chooses, unique among the open ones of its connection. An *epoch*
is one life of a session's text: every Prefix begins the next. What names an older epoch is late and ignored; what names
a newer one that no Prefix announced is an error.

Positions count the tokens of a conversation from 0. Row i pairs the feature of token i with token i + 1.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

VERSION = 2  # of the protocol; a peer states the lowest and highest that it speaks
CONNECTION = 0  # the session number of an Error that ends the connection
EDGE_FIGURES = ("power_w", "temperature_c", "throttled", "memory_used", "memory_total", "gpu_load", "cpu_load")


class HeadInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A head that a server drafts with, and the model it is for."""

    fingerprint: str  # of the target: source weights, tokenizer, taps
    head: str  # hexadecimal, of the head's own weights
    model: str  # for people
    projector_bytes: int = 0  # size of the file at /projector/HEAD; 0: features go as they are


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first message of a connection."""

    lowest: int
    highest: int
    client: str  # name and version, for people


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The answer to Hello."""

    version: int
    server: str
    heads: tuple[HeadInfo, ...]
    max_sessions: int  # that this connection may have open
    max_message: int  # bytes that a message to the server may have


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Asks for a session. The drafter holds nothing of it until a Prefix comes."""

    session: int
    fingerprint: str  # of the target
    vocab: int  # token ids are below it; decides how many bits one takes
    codec: str  # of its features, a name of `features.CODECS`
    projected: bool = False  # features went through the head's projector
    padding: int = 0  # bytes behind every row that mean nothing: benches stand in for wider models


class Opened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """The session exists."""

    session: int
    head: str
    width: int  # values in a row of features
    window: int  # rows that the drafter looks back on
    max_nodes: int  # nodes that may be under way to the edge


class Close(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """The session is over; its number may be used again."""

    session: int


class Error(msgspec.Struct, frozen=True, tag="error", forbid_unknown_fields=True):
    """A session is over, or with session 0 the whole connection, and whether to try again is of use."""

    session: int
    message: str
    retry_after: float = -1.0  # seconds; negative: do not


class Stats(msgspec.Struct, frozen=True, tag="stats", forbid_unknown_fields=True):
    """Figures for people and dashboards; nothing depends on them. An edge's are among EDGE_FIGURES."""

    values: dict[str, float]


class Race(msgspec.Struct, frozen=True):
    """How a sampled answer is drawn: its token at position p is the argmax of logits / `temperature` + noise(`seed`,
    `choice`, p - `start`, token), where the target's sampling cuts none (`noise.py`)."""

    temperature: float  # of float32 precision, more than 0
    seed: int  # modulo 2^64
    choice: int
    start: int  # position of the answer's first token


class Prefix(msgspec.Struct, frozen=True):
    """The text is now its first `start` tokens and these. To a session that holds none, `start` may be any position:
    what lies before stays unknown. With a `race`, drafts are ranked as it draws; without, by probability."""

    session: int
    epoch: int
    start: int
    tokens: Ints
    race: Race | None = None


class Verdict(msgspec.Struct, frozen=True):
    """Tokens that follow the first `start`. `received` is how many draft nodes of this epoch have arrived, `lag` how
    many tokens had been committed since the base of the newest draft when it arrived."""

    session: int
    epoch: int
    seq: int  # counts the verdicts of an epoch from 1
    start: int
    received: int
    lag: int
    tokens: Ints


class Features(msgspec.Struct, frozen=True):
    """Rows from `start` on, as `features.Codec` wrote them, `padding` bytes behind each."""

    session: int
    epoch: int
    start: int
    rows: bytes | memoryview


class Draft(msgspec.Struct, frozen=True):
    """Nodes (n,) that were not sent before, parents first, numbered from `first` on within the epoch.

    A parent is a node's number, or -1 for the newest of the `base` tokens that the tree grows from. `steps` are
    log-probabilities of a node after its parent, as coarse as 4 bits. `seq` is the newest verdict that the tree knows
    (0: the Prefix alone). `rest` says that nothing more comes until the server hears of tokens or features; a Draft
    that says only that has no nodes.
    """

    session: int
    epoch: int
    seq: int
    base: int
    first: int
    parents: Ints
    tokens: Ints
    steps: Floats
    rest: bool = False


class Ack(msgspec.Struct, frozen=True):
    """`received` counts all bytes of messages that came over this connection so far."""

    received: int


Control = Hello | Welcome | Open | Opened | Close | Error | Stats
Hot = Prefix | Verdict | Features | Draft | Ack
Message = Control | Hot

SESSION_MESSAGES: tuple[Any, ...] = (Open, Opened, Close, Error, Prefix, Verdict, Features, Draft)
