"""A target that computes nothing: it answers from recorded greedy runs of a real one.

Along a recorded run a node's logits are zero but at the token that was recorded next. Anywhere else they are zero
throughout: verification never goes where a branch is wrong, so nobody looks. Behind the last recorded token comes the
end token: whoever asks for more than was recorded gets the recorded answer, ended.

At a device's pace (`paced_target`) it stands for one in benches, dozens of which share a processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from starsd.edge.cached_target import CachedTarget
from starsd.edge.recordings import Ids, Recording, Recordings
from starsd.edge.target import Floats
from starsd.shared.errors import UsageError

HEIGHT = 1e4  # of the recorded token's logit: no penalty that people use turns the choice


class ReplayTarget(CachedTarget):
    """Replays whichever of `recordings` begins with the committed rows and the tip; many targets may share them.

    Besides the errors of `Target`, raises UsageError for tokens that no recording begins with: a prompt that was not
    recorded, or an answer that was sampled or otherwise went another way.
    """

    noise = 0.0
    branch_noise = 0.0

    def __init__(self, recordings: Recordings) -> None:
        header = recordings.header
        super().__init__(header.shape, header.features, header.shape.context, header.shape.context)
        self._eos = min(header.eos)
        self._runs = recordings.runs
        self._newest = recordings.runs[0]
        self._rows: Ids
        self._scored: Ids
        self._start_cache()

    def commit(self, rows: Sequence[int]) -> Floats:
        features = super().commit(rows)
        self._rows = np.append(self._rows, self._scored[list(rows)])
        return features

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._rows = self._rows[:length]

    def _run(self, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[Floats, Floats]:
        new = np.asarray(tokens, np.int32)
        if parents is None:
            return self._read(new)
        self._scored = new
        run = self._find(np.append(self._rows, new[0]), answering=True)
        places = self._places(run, new, parents)
        logits = np.zeros((len(new), self._shape.vocab), np.float32)
        features = np.zeros((len(new), self._features.width), np.float32)
        for node, at in enumerate(places):
            if at is not None:
                last = at + 1 == len(run.tokens)
                logits[node, self._eos if last else run.tokens[at + 1]] = HEIGHT
                features[node] = 0.0 if last else run.features[at]
        return logits, features

    def _places(self, run: Recording, tokens: Ids, parents: Sequence[int]) -> list[int | None]:
        """Where in the run each node is; None for nodes that do not follow it."""
        places: list[int | None] = [len(self._rows)]  # `_find` has seen the root there
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            before = places[parent]
            follows = before is not None and before + 1 < len(run.tokens) and run.tokens[before + 1] == token
            places.append(before + 1 if before is not None and follows else None)
        return places

    def _read(self, new: Ids) -> tuple[Floats, Floats]:
        start, rows = len(self._rows), np.append(self._rows, new)
        run = self._find(rows, answering=False)
        self._rows = rows
        return np.empty((0, self._shape.vocab), np.float32), run.features[start : len(rows)].astype(np.float32)

    def _find(self, tokens: Ids, *, answering: bool) -> Recording:
        """The run that begins with these tokens; where it is to answer, with its whole prompt among them."""
        spare = 0 if answering else 1  # a row read has features, which the last token of a run has not
        for run in (self._newest, *self._runs):
            least = run.prompt if answering else 0
            if least <= len(tokens) <= len(run.tokens) - spare and (run.tokens[: len(tokens)] == tokens).all():
                self._newest = run
                return run
        raise UsageError(
            f"none of {len(self._runs)} recordings begins with these {len(tokens)} tokens: "
            "a replay knows recorded prompts and their greedy answers only"
        )

    def _start_cache(self) -> None:
        self._rows = self._scored = np.zeros(0, np.int32)

    def _copy(self, other: ReplayTarget, length: int) -> None:
        self._rows = other._rows[:length]

    def _keep(self, rows: Sequence[int]) -> None:
        pass  # no K/V

    def _make_room(self, length: int) -> None:
        pass
