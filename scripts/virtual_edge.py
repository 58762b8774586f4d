"""An edge of a virtual star: a replay target at a device's pace, the real session and channel, a modelled link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec

from starsd.edge.answer import Piece
from starsd.edge.channel import Model
from starsd.edge.paced_target import PacedTarget
from starsd.edge.policy import Policy
from starsd.edge.recordings import Recording, Recordings
from starsd.edge.session import Session
from starsd.edge.speculator import Speculator
from starsd.edge.target_replay import ReplayTarget
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.virtual_head import DraftCost, VirtualHead
from starsd.scripts.virtual_star import VirtualLine, VirtualServer
from starsd.server.limits import LIMITS, ServerLimits
from starsd.shared.config import DEFAULT_CODEC, Limits, Sampling
from starsd.shared.phrases import Phrasebook
from starsd.shared.profiles import Profile

SETTLE_SECONDS = 3.0  # for a connection to be made, before the first prompt


class Star(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a virtual star is made of."""

    profile: Profile
    link: LinkSettings = LinkSettings()
    codec: str = DEFAULT_CODEC
    cost: DraftCost = DraftCost()
    limits: ServerLimits = LIMITS
    schedule: str = "batched"
    ngrams: bool = True
    phrases: Phrasebook | None = None


class VirtualEdge:
    """Answers recorded prompts; its own thread of the clock calls `begin` and then `answer`."""

    def __init__(
        self,
        star: Star,
        server: VirtualServer,
        head: VirtualHead,
        recordings: Recordings,
        policy: Policy,
        number: int = 0,
    ) -> None:
        about = recordings.header
        self._star, self._policy, self._clock = star, policy, server.clock
        self.line = VirtualLine(
            server,
            f"edge {number}",
            star.link,
            number,
            codec_name=star.codec,
            padding=star.profile.padding(star.codec, about.shape.hidden),
            projectors=lambda info: head.projector,
        )
        self.target = PacedTarget(ReplayTarget(recordings), star.profile, server.clock)
        self._model = Model(about.fingerprint, about.shape, about.features)
        self._text: Any = _Text(about.eos)

    def begin(self) -> None:
        """Open a session; the line may have been connected before."""
        star = self._star
        remote = self.line.channel.session(self._model)
        speculator = Speculator(self._policy, remote, clock=self._clock, ngrams=star.ngrams, phrases=star.phrases)
        self._session = Session(self.target, self._text, speculator)
        self._clock.sleep(SETTLE_SECONDS)

    def answer(self, run: Recording) -> Iterator[Piece]:
        """The pieces of a recorded answer. Raises AssertionError when it is another."""
        self._session.forget()
        limits = Limits(max_new_tokens=len(run.tokens) - run.prompt)
        with closing(self._session.generate(run.tokens[: run.prompt].tolist(), Sampling(), limits)) as pieces:
            for piece in pieces:
                yield piece
                if piece.outcome is not None:
                    expected = run.tokens[run.prompt :].tolist()
                    if piece.outcome.token_ids != (expected[:-1] if run.ended else expected):
                        raise AssertionError(f"answer to {run.id} is not the recorded one")


class _Text:
    """As much of `Text` as a session needs that shows nobody what it says."""

    def __init__(self, eos: Sequence[int]) -> None:
        self.eos = frozenset(eos)

    def stream(self, stop: Sequence[str]) -> _Silence:
        return _Silence()


class _Silence:
    def push(self, token: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> tuple[str, bool]:
        return "", False
