"""Puts a device's parts together: engine, text, and the drafts that it may ask a server for.

An engine runs one pass at a time, whoever asks for it; conversations that share it have a cache each.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
from threadpoolctl import threadpool_limits

from starsd.edge.bundle import ensure_bundle
from starsd.edge.channel import Model
from starsd.edge.paced_target import PacedTarget
from starsd.edge.policy import Policy
from starsd.edge.session import Session
from starsd.edge.speculator import Speculator
from starsd.edge.target import Target, open_target
from starsd.edge.text import Text
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_CODEC, Engine
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

    def __post_init__(self) -> None:
        codec(self.codec)
        if self.policy is Policy.STOP_AND_WAIT and not self.server:
            raise UsageError("policy is stop-and-wait without a server, expected --server URL")


class Runtime:
    """Use as a context manager; closing it ends the link, and drafts with it."""

    def __init__(
        self,
        model: str,
        precision: str | None = None,
        *,
        engine: Engine | None = None,
        drafting: Drafting | None = None,
        profile: Profile | None = None,
    ) -> None:
        """Pulls and exports what is missing. With a profile passes take a device's time, and features its bytes."""
        self.drafting = drafting or Drafting()
        bundle = ensure_bundle(model, precision)
        about = manifest.read(bundle)
        self.text = Text.open(bundle)
        self.model = Model(about.fingerprint, about.shape, about.features)
        self.profile = profile
        self._target: Target | None = open_target("onnx", bundle, engine or Engine())
        self._first = self._target
        self.link = self._open_link() if self.drafting.server and self.drafting.policy is not Policy.PLAIN else None

        # a product of a few rows is over before a second thread has woken, and the engine wants the cores
        threadpool_limits(limits=1, user_api="blas")

    def session(self) -> Session:
        """A new conversation."""
        target, self._target = self._target or self._first.sibling(), None
        paced = target if self.profile is None else PacedTarget(target, self.profile)
        remote = self.link.channel.session(self.model) if self.link is not None else None
        return Session(paced, self.text, Speculator(self.drafting.policy, remote))

    def close(self) -> None:
        if self.link is not None:
            self.link.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_link(self) -> Link:
        try:
            from starsd.edge.link import Link
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "websockets", "edge") from error
        drafting, hidden = self.drafting, self.model.shape.hidden
        return Link(
            drafting.server,
            token=drafting.token,
            trust=drafting.trust,
            client=f"starsd-edge {version('starsd')}",
            codec_name=drafting.codec,
            padding=self.profile.padding(drafting.codec, hidden) if self.profile is not None else 0,
        )
