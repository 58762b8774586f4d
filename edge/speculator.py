"""Proposes what the next pass verifies, and learns from what came of it: one conversation's drafts from all sources.

    begin(prompt) · read(features) … · propose → pass → learn · propose → pass → learn …

With the policy `plain` it proposes the tip alone, which is plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starsd.edge.drafts import Drafts, Node, Source, layout
from starsd.edge.estimates import Calibration, PassCosts, ngram_step
from starsd.edge.ngram import NgramIndex
from starsd.edge.policy import MOST_DRAFTS, MOST_THROTTLED, Budget, Patience, Policy, budget
from starsd.edge.remote import RemoteSession
from starsd.edge.verify import Verdict
from starsd.shared.clock import REAL, Clock
from starsd.shared.features import Floats
from starsd.shared.messages import Race
from starsd.shared.phrases import Phrasebook

if TYPE_CHECKING:
    from starsd.edge.grammar import Matcher

TARGET = "target"  # where a token comes from that nobody had proposed
GIVE_UP = 2.0  # seconds that stop-and-wait waits for a draft before it takes a plain step


@dataclass(frozen=True)
class Proposal:
    """A tree to verify: `tokens` and `parents` of all rows, the tip first; `nodes` are those of the rows behind it."""

    tokens: list[int]
    parents: list[int]
    nodes: list[Node] = field(default_factory=list)

    def source(self, row: int, token: int) -> Source:
        """Who proposed this token behind a row."""
        children = zip(self.nodes, self.parents[1:], strict=True)
        return next(node.source for node, parent in children if parent == row and node.token == token)

    def sources(self, rows: Sequence[int]) -> list[str]:
        """Who proposed each of the tokens that a verdict with these rows commits; the last one nobody did."""
        return [*(self.nodes[row - 1].source.name.lower() for row in rows[1:]), TARGET]


@dataclass
class Counts:
    """Of one answer: drafts accepted, by who proposed them; seconds spent waiting for one; bytes on the wire.

    `ngram` are the device's own: n-grams of the conversation, and phrases."""

    remote: int = 0
    ngram: int = 0
    waited: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class Speculator:
    """What it learned about costs and acceptance outlives a conversation; its drafts do not."""

    def __init__(
        self,
        policy: Policy = Policy.PLAIN,
        remote: RemoteSession | None = None,
        *,
        clock: Clock = REAL,
        ngrams: bool = True,
        costs: PassCosts | None = None,
        share_noise: bool = True,
        phrases: Phrasebook | None = None,
        throttled: Callable[[], bool] = lambda: False,
    ) -> None:
        """With `share_noise` the server may know how answers are drawn, and drafts accordingly. `phrases` are the
        model's; never-wait alone uses them, as it does n-grams. While the device is `throttled` less is verified."""
        self.policy, self.remote = policy, remote
        self.share_noise = share_noise
        self.costs = costs or PassCosts()
        self.calibration = Calibration()
        self.patience = Patience()
        self.counts = Counts()
        self.clock = clock
        self._throttled = throttled
        self._tokens: list[int] = []
        self._drafts = Drafts(self._tokens)
        self._phrases = phrases if policy is Policy.NEVER_WAIT else None
        self._ngrams = NgramIndex(self._tokens) if ngrams and policy is Policy.NEVER_WAIT else None
        self._base = -1  # of the newest draft that came
        self._epoch = 0  # that node numbers are of
        self._began = 0.0
        self._traffic = 0, 0  # bytes up and down before this answer
        self._matcher: Matcher | None = None
        self._start = 0  # of the answer
        self._forced: list[int] = []  # what must follow the tip

    @property
    def speculates(self) -> bool:
        return self.policy is not Policy.PLAIN

    def begin(self, prompt: Sequence[int], kept: int, matcher: Matcher | None = None, race: Race | None = None) -> None:
        """The conversation is now `prompt`, the first `kept` tokens of which are what they were.

        With a matcher only what its grammar allows is proposed, and what it forces always. `race` says how what
        follows is drawn.
        """
        self._tokens[:] = prompt
        self._matcher, self._start = matcher, len(prompt)
        self.counts = Counts()
        if self.speculates:
            self._drafts.begin()
            if self._ngrams is not None:
                self._ngrams.begin()
            if self.remote is not None:
                self._traffic = self.remote.bytes_up, self.remote.bytes_down
                self.remote.begin(prompt, kept, race if self.share_noise else None)
        self._base, self._began = -1, self.clock.now()

    def read_by(self, other: Speculator, start: int, stop: int) -> None:
        """What the target computed for these tokens of the prompt when it read another conversation."""
        if self.speculates and self.remote is not None and other.remote is not None and start < stop:
            self.remote.features(*other.remote.held(start, stop))

    def close(self) -> None:
        """The conversation is over: the server may forget it."""
        if self.remote is not None:
            self.remote.close()

    def read(self, start: int, features: Floats) -> None:
        """What the target computed for the prompt's tokens from `start` on."""
        if self.speculates and self.remote is not None:
            self.remote.features(start, features)

    def propose(self, room: int) -> Proposal:
        """The tree to verify now, of at most `room` rows."""
        tip = self._tokens[-1]
        self._began = self.clock.now()
        if not self.speculates:
            return Proposal([tip], [-1])
        if self._matcher is not None:
            self._forced = self._matcher.forced(self._tokens[self._start :], min(MOST_DRAFTS, room - 1))
        self._collect(0.0)
        nodes, held = self._choose(room)
        in_vain = False
        while not in_vain and (wait := self._patience(held)) > 0:
            in_vain = not self._collect(wait)
            nodes, held = self._choose(room)
        self.counts.waited += self.clock.now() - self._began
        if in_vain or self._settled():
            self.patience.saw_fresh(held)
        rows, parents = layout(nodes)
        return Proposal([tip, *(node.token for node in rows)], parents, rows)

    def learn(self, proposal: Proposal, verdict: Verdict, kept: int, features: Floats, seconds: float) -> None:
        """A pass took `seconds` and committed the first `kept` tokens of its verdict; `features` (kept, width)."""
        tokens, rows = verdict.tokens[:kept], verdict.rows[:kept]
        start = len(self._tokens)
        self._tokens += tokens
        if not self.speculates:
            return
        self.costs.observe(len(proposal.tokens), seconds)
        self._judge(proposal, rows, tokens)
        if self.remote is not None:
            self.remote.commit(tokens)
            self.remote.features(start - 1, features)
            up, down = self._traffic
            self.counts.bytes_up, self.counts.bytes_down = self.remote.bytes_up - up, self.remote.bytes_down - down
        self._drafts.commit()
        if verdict.preview and kept == len(verdict.tokens):
            self._drafts.expect(verdict.preview, proposal.source(rows[-1], tokens[-1]))
        self.patience.passed(kept, self.clock.now() - self._began)

    def _collect(self, wait: float) -> bool:
        """Graft what has arrived; whether something had."""
        if self.remote is None:
            return False
        arrived = self.remote.drafts(wait)
        if self.remote.epoch != self._epoch:
            self._epoch = self.remote.epoch
            self._drafts.renumber()
            arrived = [draft for draft in arrived if draft.epoch == self._epoch]
        for draft in arrived:
            self._drafts.graft(draft)
            self._base = max(self._base, draft.base)
        return bool(arrived)

    def _choose(self, room: int) -> tuple[list[Node], Budget]:
        """The drafts that are worth verifying now."""
        if self._ngrams is not None:
            matched, tokens = self._ngrams.propose()
            if matched:
                self._drafts.suggest(tokens, ngram_step(matched))
        most = min(MOST_DRAFTS, room - 1)
        if self._matcher is None:
            found = self._drafts.best(most, self.calibration.probability, None, self._phrases)
        else:
            self._drafts.force(self._forced)
            found = self._drafts.best(most, self._probability, self._allows, self._phrases)
        worthwhile = found[:MOST_THROTTLED] if self._throttled() else found
        chosen = budget([probability for _, probability in worthwhile], self.costs)
        least = sum(node.source is Source.GRAMMAR for node, _ in found)  # these must be computed anyway
        return [node for node, _ in found[: max(chosen.drafts, least)]], chosen

    def _probability(self, node: Node) -> float:
        return 1.0 if node.source is Source.GRAMMAR else self.calibration.probability(node)

    def _allows(self, node: Node) -> bool:
        """Whether the answer's grammar does."""
        assert self._matcher is not None
        path, above = [node.token], node.parent
        while above is not None:
            path.append(above.token)
            above = above.parent
        return node.source is Source.GRAMMAR or self._matcher.allows([*self._tokens[self._start :], *reversed(path)])

    def _patience(self, held: Budget) -> float:
        """Seconds that it is worth waiting for more than what is held."""
        remote = self.remote
        if remote is None or not remote.live or self._settled():
            return 0.0
        if self.policy is Policy.STOP_AND_WAIT:
            return self._began + GIVE_UP - self.clock.now()
        due = remote.due
        return due.latest if due is not None and self.patience.worth_waiting(held, due.likely) else 0.0

    def _settled(self) -> bool:
        """Whether the newest draft is from the tip, and all that will come of it."""
        return self.remote is not None and self.remote.resting and self._base == len(self._tokens)

    def _judge(self, proposal: Proposal, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Count what was right, and compare every child of every accepted row with the token that was chosen there."""
        children = self._drafts.roots
        for step, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if step:
                node = proposal.nodes[row - 1]
                children = node.children
                self.counts.remote += node.source is Source.REMOTE
                self.counts.ngram += node.source in (Source.NGRAM, Source.PHRASE)
            for child in children:
                self.calibration.observe(child, child.token == token)
