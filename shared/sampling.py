"""The next token, as a pure function of the logits, the path and the seed (promise 1).

    greedy   argmax of the processed logits                                   (temperature 0)
    sampled  argmax of processed logits / temperature + Gumbel noise          (noise.py), over the tokens that stay

By the Gumbel-max trick the sampled token has exactly the softmax distribution. Its noise depends only on (seed, choice,
output index, token id), so that neither drafts nor the network can change what is chosen. Equal scores: the lowest id.

The order of processing: repetition penalty, presence and frequency penalty, logit bias, the tokens that a grammar
allows, temperature, top-k, top-p, min-p. The repetition penalty follows Hugging Face: tokens of the prompt or the path
have a negative logit multiplied, another divided. Presence and frequency penalties follow the OpenAI API: they count
generated tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from starsd.shared.config import Sampling
from starsd.shared.errors import EngineError, UsageError
from starsd.shared.noise import from_words, gumbel, to_word, words
from starsd.shared.truncation import Kept, is_neutral, keep, leaders

__all__ = ["Choice", "Masks", "Sampler", "TokenLogprob", "check", "gumbel"]

Logits = NDArray[np.float32]

_LOUD = 5.0  # noise above this is had by one token in 150; those are always looked at
_LOUD_WORD = to_word(_LOUD)
_NEAR = 2.0  # logits; tokens further than this below the first one cut are not looked at for `gap`

_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "0 or more"),
    "top_k": (lambda x: x >= 0, "0 (off) or more"),
    "top_p": (lambda x: 0 < x <= 1, "more than 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (lambda x: x > 0, "more than 0"),
    "presence_penalty": (lambda x: True, "a finite number"),
    "frequency_penalty": (lambda x: True, "a finite number"),
    "seed": (lambda x: -(2**63) <= x < 2**64, "-2^63 to 2^64 - 1"),
}


@dataclass(frozen=True)
class Choice:
    """A chosen token, and by how much.

    `gap`, in logits, is how far two logits must move against each other to change the token: the difference between
    the best two scores times the temperature, or less where the token came within less of being cut by top-k, top-p
    or min-p, or where a cut token with a better score came within less of staying. It is infinite with one candidate.
    """

    token: int
    gap: float


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was, and the likeliest ones in its place, the best first.

    Natural logarithms of the softmax of the logits after penalties, bias and grammar, before temperature, top-k, top-p
    and min-p.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Masks(Protocol):
    """What a grammar allows: a pure function of the path, which no draft can change."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.int64]:
        """Ids that may follow these generated ids, rising, at least one."""
        ...


def check(params: Sampling) -> None:
    """Raise UsageError, naming the field, unless every parameter is in its range."""
    for name, (holds, expected) in _RULES.items():
        value = getattr(params, name)
        if not math.isfinite(value) or not holds(value):
            raise UsageError(f"{name} is {value}, expected {expected}")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < 2**31:
            raise UsageError(f"logit_bias names token {token}, expected 0 to {2**31 - 1}")
        if not math.isfinite(bias):
            raise UsageError(f"logit_bias of token {token} is {bias}, expected a finite number")


class Sampler:
    """Chooses tokens for one generation; `choice` numbers the generations of one request.

    The only state is a count of the tokens of the path last asked about, for the penalties; another path first takes
    back what it does not share with it, so that rejected branches leave no trace.
    """

    def __init__(
        self, params: Sampling, *, choice: int = 0, prompt: Sequence[int] = (), masks: Masks | None = None
    ) -> None:
        check(params)
        if not 0 <= choice < 2**64:
            raise UsageError(f"choice is {choice}, expected 0 or more")
        self.params = params
        self.choice = choice
        self._prompt = prompt
        self._masks = masks
        self._repetition = params.repetition_penalty != 1
        self._counting = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._path: list[int] = []
        self._counts = np.zeros(0, np.int32)  # of generated tokens, by id
        self._known = np.zeros(0, np.int32)  # the same, those of the prompt included

    def choose(self, logits: Logits, path: Sequence[int], index: int) -> Choice:
        """The token at output index `index`, given raw `logits`, float32 (V,), and the ids generated before it.

        `path` are all generated ids up to here: committed output and accepted drafts. `logits` are not modified.
        Raises EngineError when logits are not finite or not of one vocabulary, UsageError when `logit_bias` or the
        prompt names a token outside it.
        """
        if logits.ndim != 1 or len(logits) == 0 or logits.dtype != np.float32:
            raise EngineError(f"logits are {logits.dtype} {logits.shape}, expected float32 (vocabulary,)")
        if not np.isfinite(logits.min()) or not np.isfinite(logits.max()):
            where = int(np.argmin(np.isfinite(logits)))
            raise EngineError(f"logit of token {where} at output {index} is {logits[where]}, expected a finite number")
        processed = self._process(logits, path)
        if self._masks is None:
            return self._pick(processed, index, None)
        ids = _known(self._masks.allowed(path), len(logits))
        best = self._pick(processed[ids], index, ids)
        return Choice(int(ids[best.token]), best.gap)

    def logprob(self, logits: Logits, path: Sequence[int], token: int, top: int) -> TokenLogprob:
        """How likely `token` was at this place, given what `choose` was given, and the `top` likeliest ones."""
        processed, place, ids = self._process(logits, path), token, None
        if self._masks is not None:
            ids = _known(self._masks.allowed(path), len(logits))
            processed, place = processed[ids], int(np.searchsorted(ids, token))
        behind = processed.astype(np.float64) - float(processed.max())
        logs = behind - math.log(float(np.exp(behind).sum()))
        best = leaders(processed, top)
        names = best if ids is None else ids[best]
        return TokenLogprob(token, float(logs[place]), tuple(zip(names.tolist(), logs[best].tolist(), strict=True)))

    def _pick(self, logits: Logits, index: int, ids: NDArray[np.int64] | None) -> Choice:
        """The place of the chosen one among processed `logits`, which are those of `ids`; None: of all tokens."""
        if self.params.temperature == 0 or len(logits) == 1:
            return _greedy(logits)
        drawn = words(self.params.seed, self.choice, index, len(logits) if ids is None else int(ids[-1]) + 1)
        drawn = drawn if ids is None else drawn[ids]
        with np.errstate(over="ignore"):  # at a tiny temperature every score but the highest may be minus infinity
            if is_neutral(self.params):
                return self._race(logits, drawn)
            return self._race_among(keep(logits, self.params), logits, drawn)

    def _process(self, logits: Logits, path: Sequence[int]) -> Logits:
        """Penalties and bias, on a copy; float32 as in the conventions they follow."""
        params = self.params
        if not (self._repetition or self._counting or len(self._bias_ids)):
            return logits
        out = logits.copy()
        if self._repetition or self._counting:
            self._follow(path, len(logits))
        with np.errstate(over="ignore"):
            if self._repetition:
                ids = np.flatnonzero(self._known)
                penalty = np.float32(params.repetition_penalty)
                out[ids] = np.where(out[ids] < 0, out[ids] * penalty, out[ids] / penalty)
            if self._counting:
                ids = np.flatnonzero(self._counts)
                frequency = np.float32(params.frequency_penalty) * self._counts[ids].astype(np.float32)
                out[ids] -= np.float32(params.presence_penalty) + frequency
            if len(self._bias_ids):
                if (highest := self._bias_ids.max()) >= len(logits):
                    raise UsageError(f"logit_bias names token {highest}, the vocabulary ends at {len(logits) - 1}")
                out[self._bias_ids] += self._bias
        if not np.isfinite(out.min()) or not np.isfinite(out.max()):
            raise UsageError("penalties or logit_bias took a logit out of the range of float32, expected smaller ones")
        return out

    def _follow(self, path: Sequence[int], vocab: int) -> None:
        """Bring the counts from the path last seen to `path`."""
        if len(self._counts) != vocab:
            if len(self._counts):
                raise EngineError(f"logits have {vocab} entries, those before had {len(self._counts)}")
            prompt = np.asarray(self._prompt, np.int64)
            if len(prompt) and not 0 <= prompt.min() <= prompt.max() < vocab:
                raise UsageError(f"prompt has tokens {prompt.min()} to {prompt.max()}, expected 0 to {vocab - 1}")
            self._known = np.bincount(prompt, minlength=vocab).astype(np.int32)
            self._counts = np.zeros(vocab, np.int32)
        old, new = self._path, list(path)
        shared = min(len(old), len(new))
        if old[:shared] != new[:shared]:
            shared = next(i for i in range(shared) if old[i] != new[i])
        for gone in old[shared:]:
            self._counts[gone] -= 1
            self._known[gone] -= 1
        self._path = new[:shared]
        for added in new[shared:]:
            if not 0 <= added < vocab:
                raise EngineError(f"path has token {added}, expected 0 to {vocab - 1}")
            self._counts[added] += 1
            self._known[added] += 1
            self._path.append(added)

    def _race(self, logits: Logits, drawn: NDArray[np.uint64]) -> Choice:
        """Sample from all tokens, computing noise only where it can matter.

        A token whose noise is not loud scores at most its own score plus _LOUD; where that is below the runner-up
        of the loud ones and the highest logit, it is out. Comparing words replaces two logarithms a token.
        """
        highest, temperature = float(logits.max()), self.params.temperature
        listened = drawn > _LOUD_WORD
        listened[logits.argmax()] = True
        first = np.flatnonzero(listened)
        scores = _perturbed(logits, first, drawn, highest, temperature)
        runner_up = float(np.partition(scores, -2)[-2]) if len(scores) > 1 else -math.inf
        bound = _at_most(highest + (runner_up - _LOUD - 1e-6) * temperature)
        ids = np.flatnonzero(listened | (logits >= bound))
        return _best(_perturbed(logits, ids, drawn, highest, temperature), ids, temperature)

    def _race_among(self, kept: Kept, logits: Logits, drawn: NDArray[np.uint64]) -> Choice:
        """Sample from the tokens that stay; lower the gap where the boundary is nearer than the runner-up."""
        highest, temperature = float(logits[kept.order[0]]), self.params.temperature
        ids = np.sort(kept.ids)
        scores = _perturbed(logits, ids, drawn, highest, temperature)
        best = _best(scores, ids, temperature)
        position = int(np.flatnonzero(kept.ids == best.token)[0])
        gap = min(best.gap / temperature, kept.leave_margin(position))
        if kept.count < len(kept.order):
            reach = highest + float(kept.scores[kept.count]) * temperature - _NEAR
            near = np.setdiff1d(np.flatnonzero(logits >= _at_most(reach)), ids, assume_unique=True)
            behind = scores.max() - _perturbed(logits, near, drawn, highest, temperature)
            enter = kept.enter_margins((logits[near].astype(np.float64) - highest) / temperature)
            gap = min(gap, float(np.maximum(enter, behind).min()))
        return Choice(best.token, gap * temperature)


def _perturbed(
    logits: Logits, ids: NDArray[np.int64], drawn: NDArray[np.uint64], highest: float, temperature: float
) -> NDArray[np.float64]:
    """Scores of these tokens: (logit - highest) / temperature + noise, float64."""
    return (logits[ids].astype(np.float64) - highest) / temperature + from_words(drawn[ids])


def _at_most(bound: float) -> np.float32:
    """The float32 just below `bound`, so that comparing float32 with it never loses a token."""
    return np.float32(np.nextafter(np.float32(bound), np.float32(-np.inf)))


def _known(ids: NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Those of `ids` that the model has. A tokenizer may know tokens that it has not."""
    ids = ids[: int(np.searchsorted(ids, vocab))]
    if not len(ids):
        raise EngineError("grammar allows no token here, expected at least one")
    return ids


def _greedy(logits: Logits) -> Choice:
    token = int(logits.argmax())
    others = [part.max() for part in (logits[:token], logits[token + 1 :]) if len(part)]
    return Choice(token, float(logits[token]) - float(max(others)) if others else math.inf)


def _best(scores: NDArray[np.float64], ids: NDArray[np.int64], temperature: float) -> Choice:
    """The highest score's token, `ids` ascending, with the gap to the next in logits."""
    winner = int(scores.argmax())
    others = [part.max() for part in (scores[:winner], scores[winner + 1 :]) if len(part)]
    gap = float(scores[winner] - max(others)) * temperature if others else math.inf
    return Choice(int(ids[winner]), gap)
