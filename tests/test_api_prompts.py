"""Prompts that are far too long are refused before all of them is read."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_session import write_text_files

from starsd.edge.api_errors import ApiError
from starsd.edge.api_prompts import PART, SEAM, encode, raw_prompts
from starsd.edge.text import Text
from starsd.shared.errors import UsageError

MOST = 1000
WORDS = "Is this so? Yes, the user said it is. "


class Counting:
    """A text that knows how many characters were encoded."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self.encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)

    def encode(self, string: str, **named: Any) -> list[int]:
        self.encoded += len(string)
        return self._text.encode(string, **named)


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Counting(Text.open(write_text_files(tmp_path_factory.mktemp("text"))))


def chat(text: Any, content: str) -> list[int]:
    return encode(text, [{"role": "user", "content": content}], None, MOST)


def raw(text: Any, content: str) -> list[int]:
    return raw_prompts(text, content, 300, MOST)[0]


@pytest.mark.parametrize(("read", "param"), [(chat, "messages"), (raw, "prompt")])
@pytest.mark.parametrize("piece", [WORDS, "a", " ", "你", "</s>"])
def test_only_the_beginning_is_read(text: Any, read: Any, param: str, piece: str) -> None:
    long = piece * (1_000_000 // len(piece))
    with pytest.raises(ApiError, match=rf"is {MOST} tokens\. However, your {param} resulted in at least") as refused:
        read(text, long)
    assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")
    assert text.encoded < 200_000


@pytest.mark.parametrize("piece", [WORDS, "a", "你"])
def test_what_fits_is_read_as_ever(text: Any, piece: str) -> None:
    long = piece
    while len(text.encode(2 * long)) < MOST - 100:
        long *= 2
    assert raw(text, long) == text.encode(long)
    assert chat(text, long) == text.encode_chat([{"role": "user", "content": long}])


def test_long_texts_of_few_tokens_pass(text: Any) -> None:
    class Dense(Counting):
        """In which a token has 40 characters."""

        def encode(self, string: str, **named: Any) -> list[int]:
            self.encoded += len(string)
            return [5] * -(-len(string) // 40)

    dense: Any = Dense(text)
    assert len(raw(dense, "x" * 39_000)) == 975
    parts = 39_000 // PART + 1
    assert len(raw(dense, "x" * 40 * MOST)) == MOST  # no more than fit, by a hair
    with pytest.raises(ApiError, match="at least") as refused:
        raw(dense, "x" * 40 * (MOST + SEAM * (parts + 1)))
    assert refused.value.status == 400


def test_bytes_that_are_no_text_are_refused_early_too(text: Any) -> None:
    for read in (chat, raw):
        with pytest.raises((ApiError, UsageError), match="text holds bytes that are not UTF-8"):
            read(text, "\ud800" * 5000)
