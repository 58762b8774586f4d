from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gguf import FEED_FORWARD, HIDDEN, LAYERS, TOKENS, tiny_gguf
from tokenizers import Tokenizer

from starsd.export.gguf import convert, read_blocks
from starsd.export.gguf_config import _llama3_scaling
from starsd.export.gguf_file import open_gguf
from starsd.export.gguf_tokenizer import tokenizer_from
from starsd.shared.errors import ModelError, UnsupportedModelError

TEXTS = [
    "Hello world, it's they'll 'S",
    "def f(x):\n    return x**2  # squared\n",
    "naïve café — “quotes” … 日本語 テスト 한국어 العربية",
    "🙂👩‍👩‍👧 e\u0301 a\u00a0b\r\n\t\t x   ",
    "room 1234, 5.67e-8, v2 x86_64",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>a<|endoftext|>b",
    "",
]


def reference_logits(folder: Path, ids: list[int], **options: object) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_logits_equal_transformers_own_loading(tmp_path: Path, kind: str) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    (tmp_path / "out").mkdir()
    convert(path, tmp_path / "out")
    ids = [1, 5, 40, 98, 7, 7, 60]
    ours = reference_logits(tmp_path / "out", ids)
    theirs = reference_logits(tmp_path, ids, gguf_file="tiny.gguf")
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_the_weights(tmp_path: Path, kind: str) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    convert(path, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    blocks = read_blocks(path)
    assert len(blocks) == 1 + 7 * LAYERS
    assert "model.norm.weight" not in blocks
    for name, held in blocks.items():
        assert held.kind == ("Q8_0" if name == "model.embed_tokens.weight" else kind)
        assert (held.minimum is not None) == (held.kind == "Q4_1")
        assert held.quants.dtype == (np.uint8 if held.kind == "Q4_1" else np.int8)
        assert held.scale.shape == (held.quants.shape[0], held.quants.shape[1] // 32)
        np.testing.assert_array_equal(held.dequantise(), weights[name])
    assert blocks["model.layers.1.mlp.down_proj.weight"].quants.shape == (HIDDEN, FEED_FORWARD)


def test_query_rows_are_put_back(tmp_path: Path) -> None:
    """Row i of a head's first half is stored at 2i, of its second half at 2i + 1."""
    path = tiny_gguf(tmp_path / "tiny.gguf", kind="F32")
    convert(path, tmp_path)
    file = open_gguf(path)
    stored = file.data(file.tensors["blk.0.attn_q.weight"]).view(np.float32)
    row = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    half = HIDDEN // 4 // 2
    np.testing.assert_array_equal(row[3], stored[6])
    np.testing.assert_array_equal(row[half + 3], stored[7])


def test_folder_holds_what_transformers_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    convert(tiny_gguf(tmp_path / "tiny.gguf"), tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_key_value_heads, config.vocab_size) == (HIDDEN, 2, len(TOKENS))
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.convert_ids_to_tokens(tokenizer("he he<|im_end|>")["input_ids"]) == ["he", "Ġhe", "<|im_end|>"]


@pytest.mark.parametrize("cut", ["gpt-2", "llama-bpe"])
def test_words_are_cut_as_transformers_cuts_them(tmp_path: Path, cut: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = tiny_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.pre": cut})
    ours, _ = tokenizer_from(open_gguf(path).metadata)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in ("He said he he'LL 12345", "a  he\n\n  he;he", *(text for text in TEXTS if text.isascii())):
        words = [word for word, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert words == [word for word, _ in theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)], text
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text


def test_every_truncation_is_told(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    for size in (0, 3, 20, 30, 500, 2000, len(whole) // 2, len(whole) - 64):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=rf"cut.gguf has {size} bytes, expected "):
            convert(path, tmp_path / "nowhere")


def test_hostile_lengths_are_refused_before_allocation(tmp_path: Path) -> None:
    whole = bytearray(tiny_gguf(tmp_path / "tiny.gguf").read_bytes())
    whole[24:32] = (1 << 62).to_bytes(8, "little")  # the length of the first key
    path = tmp_path / "broken.gguf"
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="truncated or broken"):
        open_gguf(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"architecture 'falcon', expected one of llama$"):
        convert(tiny_gguf(tmp_path / "tiny.gguf", architecture="falcon"), tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.pre", "tekken", "pre-tokenizer 'tekken' is not supported, expected one of gpt-2, smollm"),
        ("tokenizer.ggml.model", "bert", "tokenizer 'bert' is not supported, expected gpt2 or llama"),
        ("llama.rope.scaling.type", "yarn", None),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, key: str, value: str, message: str | None) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", metadata={key: value})
    if message is None:
        convert(path, tmp_path)  # a scaling by factor 1 scales nothing
        return
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        convert(path, tmp_path)


def test_tensor_types_that_cannot_be_decoded_are_refused_by_name(tmp_path: Path) -> None:
    raw = bytearray(tiny_gguf(tmp_path / "tiny.gguf", kind="F32").read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    assert raw[at : at + 4] == (0).to_bytes(4, "little")
    raw[at : at + 4] = (28).to_bytes(4, "little")  # F64
    path = tmp_path / "f64.gguf"
    path.write_bytes(raw + bytes(1 << 16))
    with pytest.raises(UnsupportedModelError, match="tensor type F64 cannot be decoded"):
        convert(path, tmp_path)


def test_llama3_scaling_is_recognised_by_its_frequencies(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_theta=5e5, rope_scaling=dict(scaling)
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = (5e5 ** -(np.arange(0, 64, 2) / 64) / scaled.numpy()).astype(np.float32)
    file = open_gguf(tiny_gguf(tmp_path / "tiny.gguf"))
    assert _llama3_scaling(file, factors, 64, 5e5) == scaling
    with pytest.raises(UnsupportedModelError, match="rope_freqs other than those of Llama 3"):
        _llama3_scaling(file, factors + np.linspace(0, 1, 32, dtype=np.float32), 64, 5e5)


@pytest.mark.model
def test_default_models_logits_equal_transformers_own_loading(smollm2_folder: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. In 1969, "
    ids = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json")).encode(text).ids
    ours = reference_logits(smollm2_folder, ids)
    theirs = reference_logits(smollm2_folder, ids, gguf_file="source.gguf")
    assert np.abs(ours - theirs).max() < 1e-3


@pytest.mark.model
def test_default_models_blocks_are_its_weights(smollm2_folder: Path) -> None:
    weights = load_file(smollm2_folder / "model.safetensors")
    blocks = read_blocks(smollm2_folder / "source.gguf")
    assert sorted({held.kind for held in blocks.values()}) == ["Q4_1", "Q8_0"]
    assert len(blocks) == 211
    for name, held in blocks.items():
        np.testing.assert_array_equal(held.dequantise(), weights[name])


@pytest.mark.model
def test_default_models_tokens_equal_transformers(smollm2_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_folder, gguf_file="source.gguf")
    ours = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_digits_stand_alone_before_anything_else_is_cut(smollm2_folder: Path) -> None:
    """As in the model's own tokenizer; transformers' loading of the GGUF knows no such rule and cuts `Ġ Ġ 1`."""
    ours = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert ours.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]
