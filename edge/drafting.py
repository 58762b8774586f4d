"""Where a runtime's drafts come from, and the link to their server."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from starsd.edge.policy import Policy
from starsd.shared.config import DEFAULT_CODEC
from starsd.shared.errors import MissingExtraError, UsageError
from starsd.shared.features import codec
from starsd.shared.profiles import Profile

if TYPE_CHECKING:
    from starsd.edge.link import Link


class Drafting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where drafts come from."""

    policy: Policy = Policy.NEVER_WAIT
    server: str = ""  # ws:// or wss:// address; "": drafts come from the conversation alone
    token: str = ""  # the device's, for wss://
    trust: Path | None = None  # certificates to trust beside the system's
    codec: str = DEFAULT_CODEC  # of features on the wire
    share_noise: bool = True  # the server may know temperature and seed, and drafts by them
    idle_seconds: float = 300.0  # after which the server may forget a conversation, until its next use
    phrases: bool = True  # from the model's phrasebook, where it has one

    def __post_init__(self) -> None:
        codec(self.codec)
        if not self.idle_seconds > 0:
            raise UsageError(f"idle_seconds is {self.idle_seconds}, expected more than 0")
        if self.policy is Policy.STOP_AND_WAIT and not self.server:
            raise UsageError("policy is stop-and-wait without a server, expected --server URL")


def open_link(
    drafting: Drafting, profile: Profile | None, hidden: int, figures: Callable[[], dict[str, float]] = dict
) -> Link:
    """A connection to its server, which may hear the device's `figures` now and then.

    With a profile features of a model `hidden` wide weigh what the device's would.
    """
    try:
        from starsd.edge.link import Link
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "websockets", "edge") from error
    return Link(
        drafting.server,
        token=drafting.token,
        trust=drafting.trust,
        client=f"starsd-edge {version('starsd')}",
        codec_name=drafting.codec,
        padding=profile.padding(drafting.codec, hidden) if profile is not None else 0,
        figures=figures,
        idle_seconds=drafting.idle_seconds,
    )
