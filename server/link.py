"""What gateway and worker say to each other besides passing on what peers and sessions say.

Between them go frames `[peer, bytes]` over ZeroMQ, inproc, ipc or tcp, where `bytes` is a message as on the WebSocket:

    gateway ─► worker    a peer's message; no bytes: the peer is gone; no peer: an `Order`
    worker ─► gateway    a message for a peer; for the gateway itself an Ack of the peer's bytes that were taken; no
                         peer: a `Notice`

Every Close is answered by one Close, also for a session that is no more.
"""

from __future__ import annotations

import msgspec

from starsd.server.limits import LIMITS, SCHEDULES, ServerLimits
from starsd.shared.errors import UsageError
from starsd.shared.messages import HeadInfo

NOBODY = b""  # the peer of what gateway and worker say themselves
ENCRYPTED = "tcp://"


class ModelHead(msgspec.Struct, frozen=True):
    """A target to draft for: a model reference, and a head's folder, "" for the packaged one."""

    model: str
    head: str = ""


class Keys(msgspec.Struct, frozen=True):
    """The CURVE keys that a gateway and its workers share, Z85; nobody else is let in."""

    public: str
    secret: str


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know, sent to it as JSON."""

    endpoint: str
    name: str
    models: tuple[ModelHead, ...]
    folder: str  # where it puts projectors for the gateway to serve
    schedule: str = SCHEDULES[0]
    dtype: str = "int8"
    device: str = "cpu"
    threads: int = 1
    limits: ServerLimits = LIMITS
    keys: Keys | None = None

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, self.keys)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """These heads draft from now on. `projectors` are files, by head."""

    heads: tuple[HeadInfo, ...]
    projectors: dict[str, str]
    warnings: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An order was not carried out, and nothing has changed; or the worker could not start."""

    message: str


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """What the worker did lately (`metrics.Metrics`)."""

    values: dict[str, float]


class Order(msgspec.Struct, frozen=True, tag="order"):
    """`reload`: load the heads' folders again; `rollback`: the heads before that; `stop`: end."""

    what: str


RELOAD, ROLLBACK, STOP = "reload", "rollback", "stop"
Notice = Ready | Failed | Figures

encode = msgspec.json.encode
decode_notice = msgspec.json.Decoder(Notice).decode
decode_order = msgspec.json.Decoder(Order).decode


def check_endpoint(endpoint: str, keys: Keys | None) -> None:
    """Raises UsageError for bytes that would go over a network unencrypted."""
    if endpoint.startswith(ENCRYPTED) and keys is None:
        raise UsageError(f"worker endpoint {endpoint} has no CURVE keys, expected some for tcp")
