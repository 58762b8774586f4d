"""Prompts behind a long conversation: earlier turns are those of chats that the model wrote itself.

So a context of any length is made of text as the model writes it, and nothing else is needed but a file of chats
(`starsd-export train-drafter` reads and writes them).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path
from random import Random

from starsd.edge.text import Text
from starsd.export.train_data import Chats, Role, read_chats
from starsd.shared.errors import UsageError

_SPEAKERS = {Role.USER: "user", Role.ANSWER: "assistant"}

Messages = list[dict[str, str]]


class Conversations:
    """Puts prompts behind other conversations, each time others."""

    def __init__(self, text: Text, chats: Path, vocab: int) -> None:
        """Raises UsageError for a file of chats that cannot be read."""
        self._text, self._chats, self._source = text, read_chats(chats, vocab), chats

    def ending_with(self, prompt: str, tokens: int, seed: int) -> list[int]:
        """Ids of a conversation of at most so many tokens whose last turn is `prompt`; `seed` chooses which.

        Less than a chat's worth is missing. Raises UsageError where the chats do not suffice.
        """
        last = [{"role": "user", "content": prompt}]
        earlier: Messages = []
        ids = self._text.encode_chat(last)
        for turns in self._drawn(seed):
            longer = self._text.encode_chat([*earlier, *turns, *last])
            if len(longer) > tokens:
                return ids
            earlier, ids = [*earlier, *turns], longer
        raise UsageError(f"{self._source} has {len(ids)} tokens of other turns, expected {tokens}: give more chats")

    def _drawn(self, seed: int) -> Iterator[Messages]:
        order = list(range(len(self._chats)))
        Random(seed).shuffle(order)
        for chat in order:
            yield turns_of(self._chats, chat, self._text)


def turns_of(chats: Chats, chat: int, text: Text) -> Messages:
    """The messages of a chat, from its first user turn to its last answer."""
    rows = chats.rows(chat)
    spoken: Messages = []
    for role, group in groupby(zip(chats.roles[rows], chats.tokens[rows], strict=True), key=lambda pair: int(pair[0])):
        if role in _SPEAKERS:
            # some files count what the template puts behind a turn as the turn's
            said = list(takewhile(lambda token: token not in text.special_ids, (int(token) for _, token in group)))
            spoken.append({"role": _SPEAKERS[Role(role)], "content": text.decode(said).strip()})
    while spoken and spoken[-1]["role"] == "user":
        spoken.pop()
    return spoken
