"""What the target is made to write: scripts of forced and free stretches, from the model's own chat template.

A drafter meets the text that people's questions bring about, so the questions should be of many kinds. A chat model
that is handed its template up to "user" writes a question; handed the first words of one it writes that kind. Left
alone the default model chats; the openings below make it ask for code, arithmetic, lists, letters, stories and facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from starsd.export.chat import ChatRenderer, end_tokens
from starsd.export.train_data import Role
from starsd.shared.errors import ModelError

USER_TOKENS, ANSWER_TOKENS = 160, 384  # where a turn is cut
_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)  # of answers: greedy text and sampled text are both met when serving
_ANOTHER_SYSTEM, _SECOND_TURN = 0.15, 0.3  # shares of chats
_MARKS = ("firstquestion", "thisanswer", "secondquestion")  # words that no template trims, escapes or contains

SYSTEMS = (
    "You are a careful programmer. Answer with code and a short explanation.",
    "You are a patient teacher of mathematics. Show each step.",
    "You answer in as few words as possible.",
    "You are a creative writer.",
)
OPENINGS = (
    "", "", "", "",  # whatever the model asks of itself
    "Write a Python function that", "Write a Python program to", "Fix the bug in this code:\n```python\n",
    "def ", "Complete this function:\n\ndef ", "Write a SQL query that", "Write a JavaScript function that",
    "Explain what this code does:\n", "Implement", "Write a shell command that", "How do I sort",
    "If a train", "A shop sells", "There are", "Anna has", "Tom bought", "A farmer", "Solve for x:",
    "What is the sum of",
    "A rectangle has", "How many", "Each week,", "The price of", "What is the probability that",
    "List", "Give me ten ideas for", "Make a table of", "What are the pros and cons of", "Compare", "Name five",
    "Write an e-mail to", "Write a letter to", "Write a cover letter for", "Draft a blog post about",
    "Write a short story about", "Write a poem about", "Describe a character who", "Continue this story: ",
    "Pretend to be", "You are a", "Imagine that", "Act as",
    "Explain", "What is the difference between", "Why does", "How does", "What causes", "Who was", "When did",
    "Summarize the following text:\n", "Translate into French:", "Rewrite this sentence:", "Correct the grammar:",
    "Extract the names from this text:", "Classify", "Answer with yes or no:", "Give me a recipe for",
    "Plan a three-day trip to", "How can I improve my", "What should I do if", "Is it true that", "Convert",
)  # fmt: skip
FOLLOW_UPS = ("", "", "Now ", "Can you ", "Thank you. ", "Rewrite ", "Why ", "Give an example", "What if ", "Make it ")


@dataclass(frozen=True)
class Forced:
    """Tokens that are given, with who they are from."""

    tokens: tuple[int, ...]
    roles: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """Tokens that the target chooses, until an end token or `longest` of them."""

    role: Role
    longest: int
    temperature: float


Script = tuple[Forced | Written, ...]


class ChatText:
    """The tokenizer and the pieces of the chat template around what users and the model say."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"{folder} has no tokenizer.json, expected one to write chats: give --data instead")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        renderer = ChatRenderer.find(folder)
        if renderer is None:
            raise ModelError(f"{folder} has no chat template, expected one to write chats: give --data instead")
        self._renderer = renderer
        one = self._split(_messages(1), _MARKS[:1])
        two = self._split(_messages(3), _MARKS)
        self._heads = {"": one[0]}
        self.to_answer, self._to_user = one[1], two[2]
        for system in SYSTEMS:
            try:
                self._heads[system] = self._split(_messages(1, system), _MARKS[:1])[0]
            except ModelError:
                continue  # this template knows no system message
        self.systems = tuple(system for system in self._heads if system)
        end = self._tokenizer.token_to_id(renderer.special.get("eos_token", ""))
        self.ends = frozenset(end_tokens(folder)) | ({end} if end is not None else set())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def said(self, turn: str, *, first: bool, asked: bool, system: str = "") -> Forced:
        """The template up to a user's turn and what is given of it; with `asked` all of it, up to the answer."""
        before = self._heads[system] if first else self._to_user
        lead, given = self.encode(before), self.encode(before + turn)
        tokens = self.encode(before + turn + self.to_answer) if asked else given
        roles = [Role.TEMPLATE] * min(len(lead), len(given)) + [Role.USER] * max(0, len(given) - len(lead))
        roles += [Role.TEMPLATE] * (len(tokens) - len(roles))
        return Forced(tuple(tokens), tuple(map(int, roles[: len(tokens)])))

    def answered(self) -> Forced:
        """From the end of a user's turn to the answer."""
        tokens = self.encode(self.to_answer)
        return Forced(tuple(tokens), (int(Role.TEMPLATE),) * len(tokens))

    def _split(self, messages: list[dict[str, str]], marks: Sequence[str]) -> list[str]:
        """The rendered template between the marks."""
        text = self._renderer.render(messages)
        pieces = []
        for mark in marks:
            if text.count(mark) != 1:
                raise ModelError(f"chat template shows a message {text.count(mark)} times, expected once")
            piece, text = text.split(mark)
            pieces.append(piece)
        return [*pieces, text]


def invented(text: ChatText, rng: np.random.Generator) -> Iterator[Script]:
    """Endless scripts in which the target writes both sides."""
    while True:
        change = text.systems and rng.random() < _ANOTHER_SYSTEM
        system = str(rng.choice(text.systems)) if change else ""
        turns = [str(rng.choice(OPENINGS))] + [str(rng.choice(FOLLOW_UPS))] * int(rng.random() < _SECOND_TURN)
        script: list[Forced | Written] = []
        for number, opening in enumerate(turns):
            script += [
                text.said(opening, first=number == 0, asked=False, system=system),
                Written(Role.USER, USER_TOKENS, 1.0),
                text.answered(),
                Written(Role.ANSWER, ANSWER_TOKENS, float(rng.choice(_TEMPERATURES))),
            ]
        yield tuple(script)


def asked(text: ChatText, prompts: Sequence[tuple[str, ...]], rng: np.random.Generator) -> Iterator[Script]:
    """Endless scripts that put the given user turns, all prompts once before any is put again."""
    while True:
        for index in rng.permutation(len(prompts)):
            script: list[Forced | Written] = []
            for number, turn in enumerate(prompts[index]):
                script.append(text.said(turn, first=number == 0, asked=True))
                script.append(Written(Role.ANSWER, ANSWER_TOKENS, float(rng.choice(_TEMPERATURES))))
            yield tuple(script)


def _messages(count: int, system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)][:count]
    return [{"role": "system", "content": system}] * bool(system) + turns
