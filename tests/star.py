"""A star on a virtual clock around the model of `bigram`, whose features say which token they are of, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bigram import FINGERPRINT, FOLLOWS, TOP_K, BigramDrafter, BigramTarget, bigram_head, bigram_logits
from tiny_session import EOS, VOCAB

from starsd.edge.answer import Outcome
from starsd.edge.channel import Model
from starsd.edge.paced_target import PacedTarget
from starsd.edge.policy import Policy
from starsd.edge.session import Session
from starsd.edge.speculator import Speculator
from starsd.edge.target import Floats
from starsd.edge.text import Text
from starsd.scripts.link_model import LinkSettings
from starsd.scripts.virtual_clock import VirtualClock
from starsd.scripts.virtual_star import ChargedDrafter, VirtualLine, VirtualServer
from starsd.server.drafter import Draft, DynamicTree, Ints, Total, each
from starsd.server.limits import ServerLimits
from starsd.server.live_session import LiveSession, Plan
from starsd.server.served import Head
from starsd.shared import tree
from starsd.shared.config import Limits, Sampling
from starsd.shared.console import Progress, no_progress
from starsd.shared.manifest import FeatureSpec, ModelShape
from starsd.shared.phrases import Phrasebook
from starsd.shared.profiles import Profile
from starsd.shared.sampling import Sampler

MODEL = Model(
    FINGERPRINT,
    ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, vocab=VOCAB, context=4096),
    FeatureSpec((), True, 1),
)
PLAIN_SECONDS = 0.05
DEVICE = Profile(
    name="toy", hidden=1, pass_ms=((1, 1e3 * PLAIN_SECONDS), (64, 110.0)), interpolation="linear", prefill_tok_s=1000.0
)
WIDE = Profile(name="wide", hidden=1, pass_ms=((1, 50.0), (64, 52.0)), interpolation="linear", prefill_tok_s=None)
WINDOW = 64  # rows that edge and drafter keep
GREEDY = Sampling(temperature=0.0, logit_bias={EOS: -100})
TOKENS = 120  # of an answer, unless something else is said
PROMPT = [40, 41, 42, 43, 44]
LIMITS = ServerLimits(slots=8, window=WINDOW, entries=64, nodes=20, top_k=4)


def truth(prompt: Sequence[int], count: int, sampling: Sampling) -> list[int]:
    """What plain decoding says, without the end token."""
    sampler, ids = Sampler(sampling, prompt=prompt), list[int]()
    for index in range(count):
        token = sampler.choose(bigram_logits([*prompt, *ids]), ids, index).token
        if token == EOS:
            break
        ids.append(token)
    return ids


def answer(session: Session, prompt: list[int], tokens: int = TOKENS, sampling: Sampling = GREEDY) -> Outcome:
    *_, last = session.generate(prompt, sampling, Limits(max_new_tokens=tokens))
    assert last.outcome is not None
    assert last.outcome.token_ids == truth(prompt, tokens, sampling)
    return last.outcome


def marks(start: int, tokens: Sequence[int]) -> Floats:
    """Features of tokens from a position on: whole numbers that float16 holds."""
    positions = np.arange(start, start + len(tokens))
    return ((37 * positions + 11 * np.asarray(tokens, np.int64)) % 2048).astype(np.float32)[:, None]


class Broken(Exception):
    """What an engine may raise at any time."""


class MarkedTarget(BigramTarget):
    breaks_in = 0  # calls; 0: never

    def prefill(self, tokens: Sequence[int], progress: Progress = no_progress) -> Floats:
        self._wear()
        start = self.length
        super().prefill(tokens, progress)
        return marks(start, self.rows[start:])

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Floats:
        self._wear()
        return super().score(tokens, parents)

    def commit(self, rows: Sequence[int]) -> Floats:
        self._wear()
        start = self.length
        super().commit(rows)
        return marks(start, self.rows[start:])

    def _wear(self) -> None:
        self.breaks_in -= 1
        if not self.breaks_in:
            raise Broken


class NoisyMarkedTarget(MarkedTarget):
    """Only its trunk is exact; whoever believes another row goes wrong soon."""

    def __init__(self, context: int = 4096) -> None:
        super().__init__(context)
        self.branch_noise = 0.5

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> Floats:
        logits = super().score(tokens, parents)
        for row in range(tree.trunk(parents), len(tokens)):
            logits[row] += np.random.default_rng([row, self.length]).uniform(-3, 3, VOCAB)
        return logits


class MarkedDrafter(BigramDrafter):
    """Notes rows whose feature is of another token or place than it says. One that is `unsure` does not know which of
    its guesses is the best, so that the truth is often on a branch."""

    def __init__(self, slots: int = 8, window: int = WINDOW, *, unsure: bool = False, mistaken: bool = False) -> None:
        """One that is `mistaken` takes the noise of another position for the one that counts."""
        super().__init__(slots, window)
        self.unsure, self.mistaken = unsure, mistaken
        self.drawn = 0  # rows that it ranked the children of by noise
        self.wrong: list[str] = []
        self.landed = 0

    def advance(self, work: Sequence[tuple[LiveSession, int]], total: Total = None) -> int:
        rows = 0
        for (session, room), nodes in zip(work, each(total, len(work), 20), strict=True):
            session.take_moves()
            self._land(session)
            if (plan := session.plan(room, nodes)) is not None:
                rows += len(plan.tokens)
                session.finish(plan, *self._drawn(session, plan, *self._children(plan.tokens)))
        return rows

    def _children(self, tokens: Ints) -> tuple[Ints, Floats]:
        """Of each token; the usual one is the first, or any of them."""
        others = (FOLLOWS[tokens][:, None] + np.arange(TOP_K)) % VOCAB
        chances = [0.6, 0.1, 0.05, 0.02]
        if self.unsure:
            others = np.stack([np.roll(row, token % TOP_K) for row, token in zip(others, tokens.tolist(), strict=True)])
            chances = [0.24, 0.23, 0.22, 0.21]
        return others, np.broadcast_to(np.log(np.float32(chances)), others.shape)

    def _drawn(self, session: LiveSession, plan: Plan, tokens: Ints, steps: Floats) -> tuple[Ints, Floats]:
        """The same children, or those that are likely now that it knows the noise."""
        tokens, steps = tokens.copy(), steps.copy()
        for row, position in enumerate(plan.positions.tolist()):
            if (noise := session.noise(position + 7 * self.mistaken)) is None:
                continue
            self.drawn += 1
            scores = np.full(VOCAB, np.log(0.2 / VOCAB), np.float32)
            scores[tokens[row]] = steps[row]
            scores += noise
            scores -= np.logaddexp.reduce(scores)
            tokens[row] = np.argsort(-scores, kind="stable")[:TOP_K]
            steps[row] = scores[tokens[row]]
        return tokens, steps

    def trees(self, sessions: Sequence[LiveSession], shape: DynamicTree) -> list[Draft]:
        """The usual next tokens, as a chain."""
        drafts = []
        for session in sessions:
            self._land(session)
            tokens = [session.rows.root]
            for _ in range(shape.depth):
                tokens.append(int(FOLLOWS[tokens[-1]]))
            steps = np.arange(len(tokens), dtype=np.float32) * np.float32(-0.5)
            drafts.append(Draft(np.array(tokens), np.arange(-1, shape.depth), steps))
        return drafts

    def _land(self, session: LiveSession) -> None:
        while (chunk := session.take_features(512)) is not None:
            rows, features = chunk
            self.landed += len(rows)
            known = rows > session.rows._known
            tokens = session.rows.following(rows[known] - 1)  # row i is fed feature i; token i follows row i - 1
            for row, token, got in zip(rows[known].tolist(), tokens.tolist(), features[known], strict=True):
                if got[0] != marks(row, [token])[0, 0]:
                    self.wrong.append(f"row {row} of slot {session.slot} got {got[0]}, expected that of token {token}")
            session.landed(rows)


class Guesses(Phrasebook):
    """Says something of every token, right or wrong."""

    def __init__(self) -> None:
        pass

    def follow(self, older: int, newer: int) -> list[tuple[int, float]]:
        return [((newer + 1) % VOCAB, -0.7), ((older + 3 * newer + 2) % VOCAB, -1.2)]


@dataclass
class Star:
    """Use as a context manager. `pass_seconds` are the drafter's."""

    limits: ServerLimits = LIMITS
    order: str = "batched"
    pass_seconds: float = 0.002
    unsure: bool = False
    mistaken: bool = False
    device: Profile = DEVICE
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        limits, unsure, mistaken = self.limits, self.unsure, self.mistaken
        self.drafter = MarkedDrafter(limits.slots, limits.window, unsure=unsure, mistaken=mistaken)
        self.server = VirtualServer(self.clock, [self.head()], self.limits, self.order)

    def head(self) -> Head:
        """The same head once more: another to a server that is told to change it."""
        return bigram_head(ChargedDrafter(self.drafter, self.clock, lambda rows, sessions: self.pass_seconds))

    def line(self, name: str, settings: LinkSettings, number: int = 0, make: Any = VirtualLine) -> Any:
        return make(self.server, name, settings, number, window=WINDOW, codec_name="fp16")

    def session(
        self,
        line: VirtualLine,
        text: Text,
        policy: Policy = Policy.NEVER_WAIT,
        *,
        ngrams: bool = False,
        noisy: bool = False,
        context: int = 4096,
        share_noise: bool = True,
    ) -> Session:
        remote = line.channel.session(MODEL) if policy is not Policy.PLAIN else None
        target = NoisyMarkedTarget(context) if noisy else MarkedTarget(context)
        phrases = Guesses() if ngrams else None
        speculator = Speculator(
            policy, remote, clock=self.clock, ngrams=ngrams, phrases=phrases, share_noise=share_noise
        )
        return Session(PacedTarget(target, self.device, self.clock), text, speculator)

    def __enter__(self) -> Star:
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.close()
