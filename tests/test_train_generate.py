"""Chats that the target writes: scripts and their roles, caps, prompts, and that what is kept is what it computed."""

from __future__ import annotations

import json
from collections import Counter, deque
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_session import TEMPLATE, VOCAB
from train_helpers import target_folder

from starsd.export.train_chat import (
    ANSWER_TOKENS,
    OPENINGS,
    USER_TOKENS,
    ChatText,
    Forced,
    Written,
    asked,
    invented,
)
from starsd.export.train_data import Role
from starsd.export.train_generate import Chat, batch_chats, sample, write_chats
from starsd.export.train_store import Store
from starsd.export.train_target import BatchTarget, best
from starsd.shared.errors import ModelError

END = 1
ENDS = [END, *range(20, 280, 4)]  # so many that chats end
T, U, A = map(int, Role)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("generate") / "target", eos_token_id=ENDS, initializer_range=0.15)


def chat(*script: Forced | Written, longest: int = 50) -> Chat:
    return Chat(deque(script), frozenset({END}), longest)


def given(*tokens: int) -> Forced:
    return Forced(tokens, (T,) * len(tokens))


def pushed(made: Chat, proposals: list[int]) -> bool:
    return all(made.push(proposal) for proposal in proposals)


def test_forced_tokens_come_first_and_proposals_are_ignored_meanwhile() -> None:
    made = chat(given(5, 6), Written(Role.USER, 9, 1.0), given(END, 7), Written(Role.ANSWER, 9, 0.5))
    temperatures = []
    for proposal in (90, 91, 20, 21, END, 92, 30, END):
        assert made.push(proposal)
        temperatures.append(made.temperature)
    assert made.tokens == [5, 6, 20, 21, END, 7, 30, END]
    assert made.roles == [T, T, U, U, U, T, A, A]
    assert temperatures == [0.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.0]
    assert not made.push(93)


def test_an_end_token_that_the_template_does_not_write_is_dropped() -> None:
    made = chat(given(5), Written(Role.USER, 9, 1.0), given(7, 8), Written(Role.ANSWER, 9, 1.0))
    assert pushed(made, [0, 20, END, 0, 30, END])
    assert made.tokens == [5, 20, 7, 8, 30, END]
    assert made.roles == [T, U, T, T, A, A]


def test_a_long_turn_is_cut() -> None:
    made = chat(given(5), Written(Role.USER, 2, 1.0), given(END, 7), Written(Role.ANSWER, 3, 1.0))
    assert pushed(made, [0, 20, 21, 0, 0, 30, 31, 32])
    assert made.tokens == [5, 20, 21, END, 7, 30, 31, 32]
    assert made.roles == [T, U, U, T, T, A, A, A]
    assert not made.push(33)


def test_a_long_chat_is_cut() -> None:
    made = chat(given(5), Written(Role.ANSWER, 99, 1.0), longest=3)
    assert pushed(made, [0, 20, 21])
    assert not made.push(22)
    assert made.answered


def test_scripts_are_the_chat_template_around_turns(folder: Path) -> None:
    text = ChatText(folder)
    script = next(asked(text, [("hi", "more")], np.random.default_rng(0)))
    first, answer, second, _ = script
    assert isinstance(first, Forced)
    assert isinstance(second, Forced)
    assert isinstance(answer, Written)
    assert text.decode(first.tokens) == "<s>be kind</s><s>user: hi</s><s>assistant: "
    assert text.decode([t for t, r in zip(first.tokens, first.roles, strict=True) if r == U]) == "hi"
    assert text.decode(second.tokens) == "</s><s>user: more</s><s>assistant: "
    assert (answer.role, answer.longest) == (Role.ANSWER, ANSWER_TOKENS)
    assert END in text.ends


def test_all_prompts_are_asked_before_any_is_again(folder: Path) -> None:
    text, prompts = ChatText(folder), [(f"q{i}",) for i in range(5)]
    firsts = [script[0] for script in islice(asked(text, prompts, np.random.default_rng(0)), 10)]
    counts = Counter(text.decode(first.tokens) for first in firsts if isinstance(first, Forced))
    assert sorted(counts.values()) == [2] * 5


def test_invented_chats_are_of_many_kinds(folder: Path) -> None:
    text = ChatText(folder)
    scripts = list(islice(invented(text, np.random.default_rng(0)), 1200))
    heads = [text.decode(script[0].tokens) for script in scripts if isinstance(script[0], Forced)]
    for opening in OPENINGS:
        assert any(head.endswith(f"user: {opening}") for head in heads), opening
    written = [part for script in scripts for part in script if isinstance(part, Written)]
    answers = {part.temperature for part in written if part.role == Role.ANSWER}
    assert answers == {0.0, 0.5, 0.8, 1.0}
    assert {(p.longest, p.temperature) for p in written if p.role == Role.USER} == {(USER_TOKENS, 1.0)}
    lengths = Counter(map(len, scripts))
    assert set(lengths) == {4, 8}
    assert 300 < lengths[8] < 420
    assert 60 < sum("careful programmer" in head or "creative writer" in head for head in heads) < 300


@torch.no_grad()
def test_what_is_kept_is_what_the_target_computes(folder: Path, tmp_path: Path) -> None:
    target = BatchTarget(folder, torch.device("cpu"), torch.float32)
    store = Store(tmp_path / "cache", "x", target.width, 6, 1 << 30)
    text = ChatText(folder)
    write_chats(
        target, invented(text, np.random.default_rng(0)), text.ends, store, tokens=900, chats=5, longest=90, seed=1
    )
    rows = store.load()
    assert store.complete
    assert 850 < store.tokens < 1000
    assert len(rows.chats) > 7
    assert rows.chats.lengths.max() <= 90
    ended = 0
    for number in range(len(rows.chats)):
        place = rows.chats.rows(number)
        tokens, roles = rows.chats.tokens[place], rows.chats.roles[place]
        assert text.decode(tokens.tolist()).startswith("<s>")
        assert A in roles
        ended += tokens[-1] in text.ends
        taps, last = target.forward(torch.from_numpy(tokens)[None])
        np.testing.assert_allclose(rows.taps[place].float(), taps[0], rtol=5e-3, atol=2e-3)
        probs = best(target.logits(last[0]), 6)[1]
        np.testing.assert_allclose(rows.top_probs[place].float(), probs.float(), rtol=5e-3, atol=1e-3)
    assert ended


@torch.no_grad()
def test_greedy_answers_are_the_targets_best_tokens(folder: Path, tmp_path: Path) -> None:
    target = BatchTarget(folder, torch.device("cpu"), torch.float32)
    store = Store(tmp_path / "cache", "x", target.width, 2, 1 << 30)
    scripts = iter([(given(5, 6, 7 + i), Written(Role.ANSWER, 20, 0.0)) for i in range(60)])
    write_chats(target, scripts, frozenset({END}), store, tokens=150, chats=3)
    rows = store.load()
    for number in range(len(rows.chats)):
        place = rows.chats.rows(number)
        tokens, top = rows.chats.tokens[place], rows.top_ids[place, 0].tolist()
        assert tokens[3:].tolist() == top[2:-1]


def test_a_deadline_keeps_what_is_under_way(folder: Path, tmp_path: Path) -> None:
    target = BatchTarget(folder, torch.device("cpu"), torch.float32)
    store = Store(tmp_path / "cache", "x", target.width, 2, 1 << 30)
    scripts = iter([(given(5), Written(Role.ANSWER, 20, 0.0))] * 9)
    write_chats(target, scripts, frozenset({END}), store, tokens=10_000, chats=3, deadline=0)
    assert store.complete
    assert store.chats == 0


def test_samples_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(20_000, 1)
    warm = torch.full((20_000,), 0.7)
    drawn = sample(logits, warm, torch.zeros(20_000, dtype=torch.int32), torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=4) / 20_000
    np.testing.assert_allclose(shares, (logits[0] / 0.7).softmax(-1), atol=0.012)
    mixed = sample(logits[:2], torch.tensor([0.0, 0.0]), torch.tensor([3, 2]), torch.Generator())
    assert mixed.tolist() == [3, 2]


def test_memory_bounds_how_many_are_written_at_a_time(folder: Path) -> None:
    target = BatchTarget(folder, torch.device("cpu"), torch.float32)
    assert batch_chats(target, 640) == 96
    assert batch_chats(target, 640_000) == 4


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content", "chat template has a syntax error in line 1"),
        ("no messages at all", "shows a message 0 times, expected once"),
        (TEMPLATE + "{{ messages[0].content }}", "shows a message 2 times, expected once"),
        (None, "has no chat template, expected one to write chats: give --data instead"),
    ],
)
def test_templates_that_cannot_be_used(template: str | None, message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config: dict[str, Any] = {"eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        ChatText(tmp_path)


def test_a_model_without_tokenizer_needs_data(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, expected one to write chats: give --data instead$"):
        ChatText(tmp_path)


def test_a_template_without_system_messages_is_used_without(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": refusing}))
    text = ChatText(tmp_path)
    assert text.systems == ()
    assert len(next(invented(text, np.random.default_rng(0)))) >= 4
    assert VOCAB == 300
