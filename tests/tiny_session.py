"""A tokenizer of a few hundred tokens with a chat template, and a target whose logits are a hash of the context."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from starsd.edge.answer import Outcome
from starsd.edge.session import Session
from starsd.edge.target import Target
from starsd.shared import tree
from starsd.shared.config import Limits, Sampling
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import ContextOverflowError, EngineError
from starsd.shared.manifest import FeatureSpec, ModelShape

VOCAB = 300
EOS = 1
TEMPLATE = """{% if messages[0].role != 'system' %}<s>be kind</s>{% endif %}
{%- for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<s>assistant: {% endif %}"""


def write_text_files(folder: Path) -> Path:
    """The text side of a model folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Is this so? Yes, the user said it is. Grüße an alle, 你好."] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return folder


def toy_logits(context: Sequence[int]) -> NDArray[np.float32]:
    """A language model: a fixed function of the whole context; ends now and then."""
    seed = zlib.crc32(np.asarray(context, np.int32).tobytes())
    logits = np.random.default_rng(seed).standard_normal(VOCAB, np.float32)
    logits[EOS] += 1.5
    return logits


class ToyTarget:
    """Keeps the contract of `Target` to the letter, refuses everything else, and counts what it is asked to read."""

    shape = ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, vocab=VOCAB, context=0)
    features = FeatureSpec((), True, 1)

    def __init__(self, context: int = 4096, noise: float = 0.0) -> None:
        self.context = context
        self.noise = self.branch_noise = noise
        self.rows: list[int] = []
        self.read: list[int] = []  # prompt tokens of each prefill
        self._pass: tuple[list[int], list[int]] | None = None

    @property
    def length(self) -> int:
        return len(self.rows)

    def prefill(self, tokens: Sequence[int], progress: Progress = no_progress) -> NDArray[np.float32]:
        self._require(len(tokens))
        self._pass = None
        self.rows += tokens
        self.read.append(len(tokens))
        progress("reading the prompt", len(tokens), len(tokens))
        return np.zeros((len(tokens), 1), np.float32)

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.float32]:
        self._require(len(tokens))
        tree.check(parents)
        self._pass = list(tokens), list(parents)
        paths = [tree.path_to(parents, row) for row in range(len(tokens))]
        return np.stack([self.logits([*self.rows, *(tokens[row] for row in path)]) for path in paths])

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        return toy_logits(context)

    def commit(self, rows: Sequence[int]) -> NDArray[np.float32]:
        if self._pass is None:
            raise EngineError("commit without a pass")
        tokens, parents = self._pass
        if not rows or list(rows) != tree.path_to(parents, rows[-1]):
            raise EngineError(f"{rows} is no path")
        self.rows += [tokens[row] for row in rows]
        self._pass = None
        return np.zeros((len(rows), 1), np.float32)

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self.rows):
            raise EngineError(f"truncate to {length} of {len(self.rows)}")
        del self.rows[length:]
        self._pass = None

    def sibling(self) -> ToyTarget:
        return type(self)(self.context)

    def adopt(self, other: Target, length: int) -> None:
        if not isinstance(other, ToyTarget) or not 0 <= length <= other.length:
            raise EngineError(f"adopt {length} rows")
        self._pass = None
        self.rows = other.rows[:length]

    def _require(self, count: int) -> None:
        if len(self.rows) + count > self.context:
            raise ContextOverflowError(f"{len(self.rows) + count} rows, context {self.context}")


class NoisyBranches(ToyTarget):
    """Exact on the trunk; a row behind it has logits of its own, as far off as rounding could ever be."""

    def __init__(self, context: int = 4096) -> None:
        super().__init__(context)
        self.branch_noise = 0.5

    def score(self, tokens: Sequence[int], parents: Sequence[int]) -> NDArray[np.float32]:
        logits = super().score(tokens, parents)
        for row in range(tree.trunk(parents), len(tokens)):
            logits[row] += np.random.default_rng([row, self.length]).uniform(-0.25, 0.25, VOCAB)
        return logits


def outcome_of(
    session: Session, prompt: Sequence[int], sampling: Sampling, limits: Limits, choice: int = 0, **options: Any
) -> Outcome:
    """Run to the end, checking that pieces and outcome tell the same."""
    pieces = list(session.generate(prompt, sampling, limits, choice=choice, **options))
    assert [piece.outcome is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    outcome = pieces[-1].outcome
    assert outcome is not None
    assert "".join(piece.text for piece in pieces) == outcome.text
    assert [token for piece in pieces for token in piece.tokens] == outcome.token_ids
    assert [len(piece.sources) for piece in pieces] == [len(piece.tokens) for piece in pieces]
    assert outcome.new_tokens == len(outcome.token_ids)
    assert len(pieces) == outcome.passes + 2
    assert 0 < outcome.prefill_seconds <= outcome.seconds
    return outcome
