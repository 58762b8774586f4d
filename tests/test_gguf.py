from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gguf import FEED_FORWARD, GEMMA_TOKENS, HIDDEN, LAYERS, TOKENS, WINDOW, tiny_gguf
from tokenizers import Tokenizer

from starsd.export.bundle import Options, export_onnx
from starsd.export.checkpoint import Checkpoint
from starsd.export.gguf import convert, read_blocks
from starsd.export.gguf_config import _llama3_scaling, config_from
from starsd.export.gguf_file import open_gguf
from starsd.export.gguf_tokenizer import tokenizer_from
from starsd.shared import manifest
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.families import GLOBAL, LOCAL

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


def converted(path: Path, **options: Any) -> Path:
    """The folder that a tiny GGUF at `path` becomes."""
    folder = path.parent / "out"
    folder.mkdir()
    convert(tiny_gguf(path, **options), folder)
    return folder


@pytest.mark.parametrize(
    "kind",
    ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
)
def test_logits_equal_transformers_own_loading(tmp_path: Path, kind: str) -> None:
    ids = [1, 5, 40, 98, 7, 7, 60]
    ours = reference_logits(converted(tmp_path / "tiny.gguf", kind=kind), ids)
    theirs = reference_logits(tmp_path, ids, gguf_file="tiny.gguf")
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "told", "tied"),  # told: what transformers does not read from a GGUF
    [
        ("llama", {}, False),
        ("qwen2", {}, True),
        ("qwen2", {}, False),
        ("qwen3", {"head_dim": 32}, True),
        ("qwen3", {"head_dim": 32}, False),
        ("gemma2", {"query_pre_attn_scalar": 32}, True),  # there is none with an LM head of its own
        ("gemma3", {"query_pre_attn_scalar": 32}, True),
        ("gemma3", {"query_pre_attn_scalar": 32}, False),
    ],
)
def test_families_equal_transformers_own_loading(
    architecture: str, told: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    """Seven layers, so that a Gemma 3 has one that sees everything."""
    ids = [1, 5, 40, 90, 7, 7, 60, 3]
    folder = converted(tmp_path / "tiny.gguf", architecture=architecture, kind="Q8_0", layers=7, tied=tied)
    ours = reference_logits(folder, ids)
    theirs = reference_logits(tmp_path, ids, gguf_file="tiny.gguf", **told)
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_every_family_is_exported(tmp_path: Path, architecture: str) -> None:
    """The folder is what the exporter takes, and its blocks are the weights: norms and biases are not among them."""
    folder = converted(tmp_path / "tiny.gguf", architecture=architecture)
    (tmp_path / "tiny.gguf").rename(folder / "source.gguf")
    checkpoint = Checkpoint(folder)
    assert checkpoint.architecture.family == {"gemma3": "gemma3_text"}.get(architecture, architecture)
    assert len(checkpoint.blocks) == 1 + 7 * LAYERS
    for name, held in checkpoint.blocks.items():
        np.testing.assert_array_equal(held.dequantise(), checkpoint.tensor(name))


def test_a_file_is_exported_by_its_path(starsd_home: Path, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    report = export_onnx(str(path), Options(precision="int4", check=False))
    found = manifest.read(Path(report.bundle))
    assert Path(report.bundle) == starsd_home / "bundles" / found.name / "ort-int4"
    assert (found.source, found.shape.hidden) == (str(path), HIDDEN)
    assert (Path(report.bundle) / "chat_template.jinja").read_text() == "{{ messages }}"


def test_gemma_norms_are_stored_with_one_more(tmp_path: Path) -> None:
    folder = converted(tmp_path / "tiny.gguf", architecture="gemma3", kind="F32")
    file, weights = open_gguf(tmp_path / "tiny.gguf"), load_file(folder / "model.safetensors")
    names = {
        "output_norm": "model.norm",
        "blk.1.ffn_norm": "model.layers.1.pre_feedforward_layernorm",
        "blk.1.attn_k_norm": "model.layers.1.self_attn.k_norm",
    }
    for theirs, ours in names.items():
        stored = file.data(file.tensors[f"{theirs}.weight"])[0].view(np.float32)
        np.testing.assert_array_equal(weights[f"{ours}.weight"], stored - 1)
    stored = file.data(file.tensors["blk.1.attn_q.weight"]).view(np.float32)
    np.testing.assert_array_equal(weights["model.layers.1.self_attn.q_proj.weight"], stored)


@pytest.mark.parametrize(
    ("architecture", "metadata", "layers", "expected"),
    [
        ("gemma3", {}, 7, {"layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]}),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 2}, 2, {"layer_types": [LOCAL, GLOBAL]}),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [False, True]}, 2, {"layer_types": [GLOBAL, LOCAL]}),
        ("gemma3", {}, 62, {"query_pre_attn_scalar": HIDDEN // 4, "rope_local_base_freq": 10000.0}),
        ("gemma3", {"gemma3.rope.freq_base_swa": 5000.0}, 2, {"rope_local_base_freq": 5000.0}),
        (
            "gemma3",
            {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
            2,
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "eos_token_id": [1, 5]},
        ),
        ("gemma2", {}, 46, {"query_pre_attn_scalar": HIDDEN // 4, "attn_logit_softcapping": 50.0}),
        ("gemma2", {}, 2, {"query_pre_attn_scalar": 32, "final_logit_softcapping": 30.0, "sliding_window": WINDOW}),
        ("qwen2", {}, 2, {"attention_bias": True, "use_sliding_window": False}),
        ("qwen3", {}, 2, {"attention_bias": False, "head_dim": 32}),
    ],
)
def test_what_metadata_mean(
    architecture: str, metadata: dict[str, Any], layers: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture, metadata=metadata, layers=layers)
    config = config_from(open_gguf(path))
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("llama", {"llama.attention.sliding_window": 4096}, "has attention.sliding_window 4096, which a llama lacks"),
        ("qwen3", {"qwen3.logit_scale": 0.5}, "has logit_scale 0.5, which a qwen3 lacks"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, which a gemma3_text lacks"),
        ("qwen2", {"qwen2.expert_count": 8}, "has expert_count 8, which a qwen2 lacks"),
        ("llama", {"llama.attention.value_length": 8}, "has values of 8 channels, expected the 16 of its keys"),
        ("llama", {"llama.rope.dimension_count": 8}, "rotates 8 of 16 dimensions, expected all of them"),
        (
            "qwen2",
            {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0},
            "has rope scaling 'yarn', expected none, linear or llama3",
        ),
        ("llama", {"llama.attention.causal": False}, "has attention.causal False, expected True"),
        ("qwen3", {"qwen3.rope.scaling.attn_factor": 0.5}, "has rope.scaling.attn_factor 0.5, expected 1.0"),
    ],
)
def test_options_that_are_not_taken_over(
    architecture: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=re.escape(message) + "$"):
        convert(path, tmp_path)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.factor": 0.0, "llama.rope.scale_linear": 4.0}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear"}, None),
        ({"llama.rope.scaling.attn_factor": 1.0, "llama.attention.causal": True}, None),
    ],
)
def test_a_factor_without_a_type_scales_linearly(
    metadata: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    """As llama.cpp does."""
    assert config_from(open_gguf(tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)))["rope_scaling"] == expected


def test_gemma_2_has_its_caps_though_the_file_names_none(tmp_path: Path) -> None:
    config = config_from(open_gguf(tiny_gguf(tmp_path / "tiny.gguf", architecture="gemma2", caps=False)))
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", ["llama"], "has architecture ['llama'], expected one of llama"),
        ("llama.rope.freq_base", "much", "rope.freq_base is 'much', expected a number above 0"),
        ("llama.rope.scaling.factor", float("nan"), "rope.scaling.factor is nan, expected a number above 0"),
        ("llama.attention.layer_norm_rms_epsilon", [1], "layer_norm_rms_epsilon is [1], expected a number above 0"),
        ("tokenizer.ggml.pre", ["smollm"], "GGUF pre-tokenizer ['smollm'] is not supported"),
        ("tokenizer.ggml.tokens", [1, 2], "has tokenizer.ggml.tokens [1, 2], expected a list of texts"),
        ("tokenizer.ggml.merges", "h e", "has tokenizer.ggml.merges 'h e', expected a list of texts"),
        ("tokenizer.ggml.token_type", ["a"], "has tokenizer.ggml.token_type ['a'], expected a list of numbers"),
        ("tokenizer.ggml.eos_token_id", "</s>", "GGUF names token '</s>', expected 0 to"),
        ("tokenizer.chat_template", [1], "has a chat template of type list, expected text"),
    ],
)
def test_metadata_of_other_types_are_told(
    key: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_gguf(tiny_gguf(tmp_path / "tiny.gguf"))
    file.metadata[key] = value
    monkeypatch.setattr("starsd.export.gguf.open_gguf", lambda path: file)
    with pytest.raises(ModelError, match=re.escape(message)):
        convert(tmp_path / "tiny.gguf", tmp_path)


def test_tensors_of_another_family_are_refused(tmp_path: Path) -> None:
    raw = bytearray(tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen3").read_bytes())
    path = tmp_path / "other.gguf"
    path.write_bytes(raw.replace(b"qwen3", b"qwen2"))
    with pytest.raises(
        UnsupportedModelError, match=r"has the tensor blk.0.attn_q_norm.weight, which a plain qwen2 lac"
    ):
        convert(path, tmp_path)


def test_qwens_text_is_composed_and_its_digits_stand_alone(tmp_path: Path) -> None:
    ours, _ = tokenizer_from(
        open_gguf(tiny_gguf(tmp_path / "t.gguf", metadata={"tokenizer.ggml.pre": "qwen2"})).metadata
    )
    assert ours.normalizer.normalize_str("e\u0301") == "é"
    words = [word for word, _ in ours.pre_tokenizer.pre_tokenize_str("it's room 1234\n\n (so  far)")]
    assert words == ["it", "'s", "Ġroom", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġ(", "so", "Ġ", "Ġfar", ")"]
    assert ours.encode("he").tokens == ["he"]


def test_gemmas_tokens_equal_sentencepieces(tmp_path: Path) -> None:
    """Its vocabulary as a SentencePiece model, which knows no added tokens: runs of blanks are whole all the same."""
    processor = sentencepiece_model(tmp_path / "spm.model")
    ours, config = tokenizer_from(open_gguf(tiny_gguf(tmp_path / "t.gguf", architecture="gemma3")).metadata)
    for text in ("hello  he", " hello\n\nhe   llo", "he\nhe", "héllo", "", "  "):
        got = ours.encode(text)
        assert got.ids[0] == GEMMA_TOKENS.index("<bos>")
        assert got.ids[1:] == processor.encode(text), text
        assert ours.decode(got.ids[1:]) == text
    assert config["add_bos_token"]
    turn = ours.encode("<start_of_turn>user he<end_of_turn>\n", add_special_tokens=False).tokens
    assert (turn[0], turn[-2:]) == ("<start_of_turn>", ["<end_of_turn>", "\n"])


def sentencepiece_model(path: Path) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    protos = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = protos.ModelProto()
    metadata = open_gguf(tiny_gguf(path.parent / "spm.gguf", architecture="gemma3")).metadata
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for text, score, kind in zip(*columns, strict=True):
        model.pieces.add(piece=text.replace(" ", "▁") if kind == 4 else text, score=score, type=kind)
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.pad_id, model.trainer_spec.eos_id, model.trainer_spec.bos_id = 0, 1, 2
    model.trainer_spec.unk_id = 3
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    path.write_bytes(model.SerializeToString())
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


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
    with pytest.raises(UnsupportedModelError, match=r"architecture 'falcon', expected one of llama, qwen2, .*gemma3$"):
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
