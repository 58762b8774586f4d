from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from starsd.export.gguf_tokenizer import tokenizer_from
from starsd.export.hf_folder import VICUNA_TEMPLATE, chat_template, ensure_chat_template
from starsd.export.tokenizer_model import build, ensure_tokenizer, load_tokenizer, read_model
from starsd.shared.errors import ModelError

sentencepiece = pytest.importorskip("sentencepiece")

TRAINING = """
The people of the town said that they would have to find water before the long summer was over, but only two of them
knew where to look for it. What can you do with 3.14 litres a day, they asked, when there are 2024 of us and more come
down the river each week? Some went up into the hills; others made a list: f(x) = x_y + 1, for all x who want to drink.
So it was for many years. It is like him, she said, to see no other way than his own, and these were her first words.
"""
TEXTS = [
    "the people said that they would make more water",
    "  two  leading and   inner spaces ",
    "naïve café 日本語 🙂👩‍👩‍👧\tand\nnew lines",
    "3.14 + 2024 == f(x_y); aaaaaaa thethethe",
    "▁ a real lower block",
    "",
    " ",
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer.model, trained as Llama's were."""
    place = tmp_path_factory.mktemp(request.param)
    chance = random.Random(5)
    words = TRAINING.split()
    lines = (" ".join(chance.choices(words, k=12)) for _ in range(400))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(place / "tokenizer"),
        model_type=request.param,
        vocab_size=380,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    return place


def test_ids_and_text_equal_sentencepieces_own(folder: Path) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ours = load_tokenizer(folder)
    assert ours.get_vocab_size() == theirs.vocab_size()
    chance = random.Random(9)
    letters = ["the", "water", "e", "t", "h", " ", " ", "  ", "1", "9", ".", "é", "日", "🙂", "\n", "_"]
    texts = TEXTS + ["".join(chance.choices(letters, k=chance.randint(1, 30))) for _ in range(500)]
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


def test_a_gguf_with_the_same_vocabulary_gives_the_same_ids(folder: Path) -> None:
    vocabulary = read_model(folder / "tokenizer.model")
    if vocabulary.unigram:
        pytest.skip("a GGUF of tokenizer type llama is BPE")
    tokens, scores, kinds = zip(*vocabulary.pieces, strict=True)
    metadata = {"model": "llama", "tokens": list(tokens), "scores": list(scores), "token_type": list(kinds)}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer, config = tokenizer_from({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", "</s>", True)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == load_tokenizer(folder).encode(text).ids


def test_the_name_of_a_byte_is_text_in_bpe(folder: Path) -> None:
    """In a unigram model tokenizers takes it for the byte; no Llama is one."""
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = load_tokenizer(folder).encode("<0x0A> is", add_special_tokens=False).ids
    assert (ids == theirs.encode("<0x0A> is")) == (folder.name.startswith("bpe"))


def test_bos_comes_first_unless_the_config_says_otherwise(folder: Path) -> None:
    ours = load_tokenizer(folder)
    assert ours.encode("the").tokens[0] == "<s>"
    assert ours.encode("a</s>b").tokens.count("</s>") == 1
    plain = build(read_model(folder / "tokenizer.model", {"add_bos_token": False, "add_eos_token": True}))
    assert plain.encode("the").tokens[0] != "<s>"
    assert plain.encode("the").tokens[-1] == "</s>"


def test_blank_after_special_tokens_follows_legacy(folder: Path) -> None:
    path = folder / "tokenizer.model"
    old, new = build(read_model(path)), build(read_model(path, {"legacy": False}))
    assert old.encode("a</s>the").tokens[-1] == "▁the"
    assert new.encode("a</s>the").tokens[-1] != "▁the"
    assert new.encode("the").tokens == old.encode("the").tokens == ["<s>", "▁the"]


def test_added_tokens_keep_their_ids(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 380}))
    ensure_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    assert load_tokenizer(tmp_path).token_to_id("<pad>") == 380


def test_added_token_with_a_contradicting_id_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 500}))
    with pytest.raises(ModelError, match="added token '<pad>' has id 500, which the vocabulary contradicts"):
        load_tokenizer(tmp_path)


def test_what_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer, expected tokenizer.json or tokenizer.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff not a model")
    with pytest.raises(ModelError, match="expected a SentencePiece model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)


def render(template: str, messages: list[dict[str, str]]) -> str:
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True
    )


def test_vicuna_turns_are_as_it_was_trained() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert render(VICUNA_TEMPLATE, turns) == "<s>Be brief. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"
    assert render(VICUNA_TEMPLATE, turns[1:2]).endswith("answers to the user's questions. USER: Hi ASSISTANT:")


def test_the_trained_one_gets_its_template_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_name_or_path": "someone/alpaca"}')
    assert not ensure_chat_template(tmp_path)
    assert chat_template(tmp_path) is None
    (tmp_path / "config.json").write_text('{"_name_or_path": "lmsys/Vicuna-7b-v1.5"}')
    assert ensure_chat_template(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == VICUNA_TEMPLATE
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "own"}')
    assert chat_template(tmp_path) == "own"
