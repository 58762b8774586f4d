"""The target writes chats, many at a time, and keeps what a drafter will learn from: taps and likeliest next tokens.

Every step runs one token of every chat, forced ones included: a template and the start of a question are some 40 of 400
tokens, fewer than what ragged prefills would waste on padding. A chat that ends makes room for the next at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from starsd.export.train_chat import Forced, Script, Written
from starsd.export.train_data import SHORTEST, Role
from starsd.export.train_store import Store
from starsd.export.train_target import BatchTarget, best
from starsd.shared.console import Progress, no_progress

LONGEST = 640  # tokens of a written chat: two turns
_MOST_CHATS = {"cpu": 96}  # a step then reads each weight once for so many tokens that arithmetic is the limit
_MANY_CHATS = 768
_CPU_BYTES = 3_000_000_000
_SHARE = 0.4  # of an accelerator's free memory
_COMMIT_SECONDS = 60.0
_COLDEST = 0.05  # temperatures below are greedy


@dataclass
class Chat:
    """One chat being written: its tokens and roles so far."""

    script: deque[Forced | Written]
    ends: frozenset[int]
    longest: int
    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    _forced: deque[tuple[int, int]] = field(default_factory=deque)
    _writing: Written | None = None
    _left: int = 0
    answered: bool = False

    @property
    def temperature(self) -> float:
        """Of the token that comes next; 0 where it is forced."""
        return self._writing.temperature if self._writing and not self._forced else 0.0

    @property
    def worth(self) -> int:
        """Tokens that would be stored if the chat ended now, its newest one aside, which has not been run yet."""
        return len(self.tokens) - 1 if self.answered else 0

    def push(self, proposed: int) -> bool:
        """Append the script's next token, which is `proposed` where the target writes. False when the chat is over."""
        if len(self.tokens) >= self.longest:
            return False
        if not self._forced and self._writing is None:
            self._enter()
        if not self._forced and self._writing is not None:
            role, ended = int(self._writing.role), proposed in self.ends
            self._left -= 1
            more = bool(self.script)
            if ended or not self._left:
                self._writing = None
                self._enter()
            if not (ended and more):
                self._add(proposed, role)
                return True
            # this end token is the template's to give; where it does, it counts as chosen by the target
            if self._forced and self._forced[0][0] == proposed:
                self._forced[0] = (proposed, role)
        if not self._forced:
            return False
        self._add(*self._forced.popleft())
        return True

    def _add(self, token: int, role: int) -> None:
        self.tokens.append(token)
        self.roles.append(role)
        self.answered = self.answered or role == Role.ANSWER

    def _enter(self) -> None:
        """Take what is forced from the script, and the stretch to write behind it."""
        while self.script and self._writing is None:
            part = self.script.popleft()
            if isinstance(part, Forced):
                self._forced.extend(zip(part.tokens, part.roles, strict=True))
            else:
                self._writing, self._left = part, part.longest


def batch_chats(target: BatchTarget, longest: int) -> int:
    """How many chats to write at a time on the target's device."""
    shape, width = target.shape, target.dtype.itemsize
    each = longest * (2 * shape.layers * shape.kv_heads * shape.head_dim * width + 2 * target.width)
    on_gpu = target.device.type == "cuda"
    room = int(_SHARE * torch.cuda.mem_get_info(target.device)[0]) if on_gpu else _CPU_BYTES
    return max(4, min(_MOST_CHATS.get(target.device.type, _MANY_CHATS), room // each))


@torch.no_grad()
def write_chats(
    target: BatchTarget,
    scripts: Iterator[Script],
    ends: frozenset[int],
    store: Store,
    *,
    tokens: int,
    chats: int = 0,
    longest: int = LONGEST,
    deadline: float = float("inf"),
    seed: int = 0,
    progress: Progress = no_progress,
) -> None:
    """Fill the store until it holds about `tokens` or the monotonic clock shows `deadline`.

    Chats that are under way then are stored as far as they are: left out, only short ones would ever be kept.
    """
    chats = chats or max(1, min(batch_chats(target, longest), tokens // longest))
    work = _Desk(target, store, chats, longest)
    draw = torch.Generator(target.device).manual_seed(seed + store.chats)
    slots = [_start(scripts, ends, longest) for _ in range(chats)]
    decoder, committed = target.decoder(chats, longest), time.monotonic()
    while store.tokens + sum(chat.worth for chat in slots) < tokens and time.monotonic() < deadline:
        newest = torch.tensor([chat.tokens[-1] for chat in slots], device=target.device)
        positions = [len(chat.tokens) - 1 for chat in slots]
        temperatures = torch.tensor([chat.temperature for chat in slots], device=target.device)
        at = torch.tensor(positions, device=target.device)
        taps, last = decoder.step(newest, at, max(positions))
        logits = target.logits(last)
        top = best(logits, store.top)
        work.keep(at, taps, *top)
        proposals = sample(logits, temperatures, top[0][:, 0], draw).tolist()
        for slot, chat in enumerate(slots):
            if not chat.push(proposals[slot]):
                work.file(slot, chat, len(chat.tokens))
                slots[slot] = _start(scripts, ends, longest)
        progress("writing chats", min(store.tokens, tokens - 1), tokens)
        if time.monotonic() - committed > _COMMIT_SECONDS:
            store.commit()
            committed = time.monotonic()
    for slot, chat in enumerate(slots):
        work.file(slot, chat, len(chat.tokens) - 1)
    store.commit(complete=True)
    progress("writing chats", tokens, tokens)


class _Desk:
    """What has been kept of the chats under way."""

    def __init__(self, target: BatchTarget, store: Store, chats: int, longest: int) -> None:
        place = target.device
        self._store = store
        self._taps = torch.empty(chats, longest, store.width, dtype=torch.bfloat16, device=place)
        self._ids = torch.empty(chats, longest, store.top, dtype=torch.int32, device=place)
        self._probs = torch.empty(chats, longest, store.top, dtype=torch.float16, device=place)
        self._slots = torch.arange(chats, device=place)

    def keep(self, at: torch.Tensor, taps: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> None:
        """One row of every chat, at its position."""
        self._taps[self._slots, at] = taps.to(torch.bfloat16)
        self._ids[self._slots, at] = ids
        self._probs[self._slots, at] = probs

    def file(self, slot: int, chat: Chat, rows: int) -> None:
        """Store the first `rows` tokens of a chat; one in which nothing was answered is thrown away."""
        if Role.ANSWER not in chat.roles[:rows] or rows < SHORTEST:
            return
        top = (self._ids[slot, :rows], self._probs[slot, :rows])
        tokens, roles = torch.tensor(chat.tokens[:rows]), torch.tensor(chat.roles[:rows])
        self._store.append(tokens, roles, self._taps[slot, :rows], top)


def _start(scripts: Iterator[Script], ends: frozenset[int], longest: int) -> Chat:
    chat = Chat(deque(next(scripts)), ends, longest)
    chat.push(-1)  # a script starts with forced tokens
    return chat


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, greedy: torch.Tensor, draw: torch.Generator
) -> torch.Tensor:
    """One id of each row (n, vocab) at its temperature (n,); `greedy` (n,) where that is 0. int64 (n,).

    By inverting the cumulative distribution: one random number a row, where Gumbel noise needs one a token."""
    cumulated = (logits / temperatures.clamp(min=_COLDEST)[:, None]).softmax(-1).cumsum(-1)
    points = torch.rand(len(logits), 1, generator=draw, device=logits.device) * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, points, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return torch.where(temperatures < _COLDEST, greedy.long(), drawn)
