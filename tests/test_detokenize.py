"""Pieces joined are the whole decoding, whatever the ids; stop strings are found however the text is cut."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from starsd.edge.detokenize import Detokenizer, StopStrings, TextStream, TokenBytes
from starsd.shared.errors import UnsupportedModelError, UsageError

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 12:45 and 7 degrees.",
    "Grüße aus Köln, où l'été dure — señor, façade, naïve.",
    "你好,世界!今天天气很好。 こんにちは世界 안녕하세요",
    "family 👩‍👩‍👧 flag 🇪🇺 wave 👋🏽 done   with   spaces\n\n\ttabs",
] * 4
SPECIAL = ["<s>", "</s>"]


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("日", special=False)])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """Llama's layout: word-start marks, 256 byte tokens, a decoder that strips one leading space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<s>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=450, special_tokens=SPECIAL + bytes_))
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(state))


@functools.cache
def with_decoder(name: str) -> Tokenizer:
    state = json.loads(byte_fallback().to_str())
    made: dict[str, Any] = {
        "metaspace": decoders.Metaspace(),
        "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
        "fallback-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
        "wordpiece": decoders.WordPiece(),
        "strip-end": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        "ctc": decoders.CTC(),
    }
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = made[name]
    return tokenizer


KINDS = ["byte_level", "byte_fallback", "metaspace", "metaspace-never", "fallback-metaspace", "wordpiece"]


def made(kind: str) -> Tokenizer:
    plain = {"byte_level": byte_level, "byte_fallback": byte_fallback}
    return plain[kind]() if kind in plain else with_decoder(kind)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(id) for id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_pieces_joined_are_the_whole_decoding(kind: str, data: st.DataObject) -> None:
    """Random ids, with runs of byte tokens made likely, and ids outside the vocabulary."""
    tokenizer = made(kind)
    size = tokenizer.get_vocab_size()
    anything, low = st.integers(0, size + 2), st.integers(0, min(size, 270))
    ids = data.draw(st.lists(st.one_of(anything, low), max_size=40))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS[:2])
@given(text=st.text(max_size=30))
@settings(max_examples=150, deadline=None)
def test_no_piece_shows_half_a_character(kind: str, text: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    got = pieces(tokenizer, ids)
    assert "".join(got) == whole
    if "\N{REPLACEMENT CHARACTER}" not in whole:
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in got)


def test_a_byte_level_character_appears_with_its_last_byte() -> None:
    tokenizer = byte_level()
    spelled = [tokenizer.token_to_id(character) for character in "ðŁĳĭ"]  # F0 9F 91 8B in the byte alphabet
    assert None not in spelled
    assert pieces(tokenizer, spelled) == ["", "", "", "👋", ""]
    assert pieces(tokenizer, [*spelled[:2], tokenizer.token_to_id("a")]) == ["", "", "\N{REPLACEMENT CHARACTER}a", ""]


def test_a_run_of_byte_tokens_appears_when_it_ends() -> None:
    tokenizer = byte_fallback()
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é👋".encode()]
    assert None not in run
    a = tokenizer.token_to_id("a")
    assert pieces(tokenizer, [a, *run, a]) == ["a", *[""] * len(run), "é👋a", ""]
    assert pieces(tokenizer, [a, *run]) == ["a", *[""] * len(run), "é👋"]
    assert pieces(tokenizer, [a, *run[:-1]])[-1] == "\N{REPLACEMENT CHARACTER}" * (len(run) - 1)


def test_special_tokens_are_not_shown() -> None:
    tokenizer = byte_level()
    end, a = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("a")
    assert pieces(tokenizer, [end, a, end]) == ["", "a", "", ""]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_the_cost_of_a_token_does_not_grow(kind: str) -> None:
    """Ten times the tokens take about ten times the time; re-decoding would take a hundred times."""
    tokenizer = made(kind)
    ids = tokenizer.encode(" ".join(CORPUS), add_special_tokens=False).ids

    def seconds(count: int) -> float:
        detokenizer, started = Detokenizer(tokenizer), time.process_time()
        for n in range(count):
            detokenizer.push(ids[n % len(ids)])
        return time.process_time() - started

    assert min(seconds(20000) for _ in range(3)) < 40 * min(seconds(2000) for _ in range(3))


@pytest.mark.parametrize(("name", "found"), [("strip-end", r"Fuse \+ Strip at the end"), ("ctc", "CTC")])
def test_decoders_that_look_ahead_are_refused_by_name(name: str, found: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tokenizer decoder is {found}, expected ByteLevel or"):
        Detokenizer(with_decoder(name))


def test_a_tokenizer_without_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="tokenizer decoder is none"):
        Detokenizer(Tokenizer(models.WordLevel({"a": 0}, "a")))


def naive_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first end at which some stop string is complete, of those the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(
    st.lists(st.text("ab<", max_size=4), max_size=12),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(cut: list[str], stops: list[str]) -> None:
    finder, shown = StopStrings(stops), ""
    expected, hit = naive_stop("".join(cut), stops)
    for number, piece in enumerate(cut):
        text, now = finder.push(piece)
        shown += text
        assert expected.startswith(shown)
        assert now == naive_stop("".join(cut[: number + 1]), stops)[1]
    assert shown + finder.finish() == expected
    assert finder.hit == hit


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    finder = StopStrings(["<end>", "\n\n"])
    assert finder.push("a < b <e") == ("a < b ", False)
    assert finder.push("gg\n") == ("<egg", False)
    assert finder.push("x") == ("\nx", False)
    assert finder.push("y<en") == ("y", False)
    assert finder.push("d>z") == ("", True)
    assert finder.push("more") == ("", True)
    assert finder.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="stop string is empty, expected at least one character"):
        StopStrings(["a", ""])


def test_the_token_that_completes_a_stop_string_is_told() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "abcde"]
    stream = TextStream(tokenizer, ["cd"])
    assert [stream.push(id) for id in ids[:4]] == [("a", False), ("b", False), ("", False), ("", True)]
    assert stream.finish() == ("", True)


def test_a_stop_string_in_the_last_bytes_is_found_at_the_end() -> None:
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer, ["👋"])
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é👋".encode()]
    assert [stream.push(id) for id in run] == [("", False)] * len(run)
    assert stream.finish() == ("é", True)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    tokenizer = made(kind)
    bytes_of = TokenBytes(tokenizer)
    for text in CORPUS[:2] if kind != "byte_level" else CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = b"".join(map(bytes_of, ids)).decode()
        assert whole == (text if kind == "byte_level" else f" {text}")  # marks of a word's start are spaces


def test_bytes_of_parts_of_characters_and_of_special_tokens() -> None:
    bytes_of = TokenBytes(byte_level())
    ids = byte_level().encode("👋", add_special_tokens=False).ids
    assert len(ids) > 1
    assert b"".join(map(bytes_of, ids)) == "👋".encode()
    with pytest.raises(UnicodeDecodeError):
        bytes_of(ids[0]).decode()
    assert bytes_of(byte_level().token_to_id("</s>")) == b"</s>"
    assert bytes_of(byte_level().token_to_id("<tool call>")) == b"<tool call>"
    assert bytes_of(10**6) == b""
    fallback = TokenBytes(byte_fallback())
    assert fallback(byte_fallback().token_to_id("<0xE4>")) == b"\xe4"
