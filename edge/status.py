"""What a runtime says of itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from starsd.edge.policy import Policy
from starsd.edge.regime import DEVICE_ONLY, IDLE, Lately, Watch, regime
from starsd.edge.telemetry_reading import NOTHING, Reading

if TYPE_CHECKING:
    from starsd.edge.link import Link


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime at one moment."""

    model: str
    precision: str
    context: int  # tokens
    conversations: int  # that it keeps at most
    busy: int  # of them
    link: str  # off, connecting, up or lost
    server: str  # its address, "" without one
    rtt_ms: float | None  # the shortest round trip lately, None before any
    regime: str  # connecting, streams, waits, idle, or device only: the cloud is away, or does not help
    notice: str  # why the server does not help, for people
    device: Reading = NOTHING  # what its sensors say
    tokens_per_joule: float | None = None  # of all answers while the device's power was known


def of_link(link: Link | None, policy: Policy, watch: Watch) -> dict[str, Any]:
    """What a status says of the server; `watch` has seen the newest steps."""
    if link is None:
        return {"link": "off", "rtt_ms": None, "regime": DEVICE_ONLY, "notice": ""}
    rtt, known = link.channel.uplink.round_trip, link.reconnects >= 0
    lately = watch.lately(link.connected)
    lost = "lost" if known else "connecting"
    return {
        "link": "up" if link.connected else lost,
        "rtt_ms": 1e3 * rtt if link.connected and math.isfinite(rtt) else None,
        "regime": IDLE if lately is None and link.connected else regime(policy, known, lately or Lately()),
        "notice": link.channel.notice,
    }
