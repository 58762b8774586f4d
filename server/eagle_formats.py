"""What a published EAGLE head is, read from its config and the shapes of its tensors.

Four layouts on disk, one description in memory:

    EAGLE-1      fc, layers.0 without an input norm; the LM head is the target's
    EAGLE-3      fc over three taps, midlayer, norm, its own lm_head, d2t when its vocabulary is smaller
    speculators  EAGLE-3 with the layer's config nested, taps counted as layer inputs, and extra norms by flags
    SpecForge    EAGLE-3 with tap ids nested under eagle_config, counted as layer *outputs*

Shapes are the truth; the config is needed only for what no shape shows (number of heads, epsilon, rope, flags) and is
cross-checked for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starsd.server.eagle_spec import LAYER, HeadSpec
from starsd.shared.errors import ModelError, UnsupportedModelError
from starsd.shared.manifest import ModelShape
from starsd.shared.rope import read_rope

Shapes = Mapping[str, tuple[int, ...]]

# buffers that some trainers save and that no forward pass reads
_NEVER_USED = ("verifier_norm.weight", "verifier_lm_head.weight")
_OMITTED_HEADS = 32  # speculators write only what differs from transformers' defaults
_LAYER_TYPES = ("llama", "qwen2", "qwen3", None)


def normalise(name: str) -> str | None:
    """The name that we use for a tensor on disk; None for buffers that nothing reads."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = LAYER + name.removeprefix("midlayer.")
    return None if name in _NEVER_USED or name.endswith("rotary_emb.inv_freq") else name


def read_spec(config: Mapping[str, Any], shapes: Shapes, target: ModelShape) -> HeadSpec:
    """Describe a head for this target.

    Raises UnsupportedModelError for a layout that is refused and ModelError when head, config and target disagree.
    """
    try:
        return _read_spec(config, shapes, target)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"head's config has a value of the wrong type: {error}") from error


def _read_spec(config: Mapping[str, Any], shapes: Shapes, target: ModelShape) -> HeadSpec:
    layout, layer = _layout(config, shapes)
    eagle3 = layout != "EAGLE-1"
    depth = int(layer.get("num_hidden_layers") or 1)
    deeper = sorted({name.split(".")[1] for name in shapes if name.startswith("layers.")} - {"0"})
    if depth != 1 or deeper:
        raise UnsupportedModelError(f"head has {max(depth, 1 + len(deeper))} layers, expected 1")
    if layer.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"activation {layer['hidden_act']!r} is not supported, expected silu")

    hidden = _rows(shapes, "fc.weight")
    warnings: list[str] = []
    heads, kv_heads, head_dim = _attention(layer, shapes, _OMITTED_HEADS if layout == "speculators" else 0, warnings)
    draft_vocab = _rows(shapes, "lm_head.weight") if eagle3 else target.vocab
    _check_target(config, layer, shapes, hidden, target)
    flags = _flags(config)
    return HeadSpec(
        layout=layout,
        eagle3=eagle3,
        hidden=hidden,
        target_hidden=target.hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=_rows(shapes, f"{LAYER}mlp.gate_proj.weight"),
        vocab=target.vocab,
        draft_vocab=draft_vocab,
        eps=float(layer.get("rms_norm_eps") or 1e-6),
        rope=read_rope(layer, head_dim),
        taps=_taps(config, layout, shapes, target, warnings) if eagle3 else (),
        window=_window(layer),
        own_embedding="embed_tokens.weight" in shapes,
        fc_bias=not eagle3 and bool(config.get("bias", True)),
        qkv_bias=_biased(layer, shapes, "self_attn.q_proj", ("qkv_bias", "attention_bias")),
        o_bias=_biased(layer, shapes, "self_attn.o_proj", ()),
        mlp_bias=_biased(layer, shapes, "mlp.gate_proj", ("mlp_bias",)),
        qk_norm=f"{LAYER}self_attn.q_norm.weight" in shapes or layer.get("model_type") == "qwen3",
        mapped=eagle3 and ("d2t" in shapes or draft_vocab != target.vocab),
        t2d=eagle3 and "t2d" in shapes,
        norm_before_residual=flags["norm_before_residual"],
        input_norm=flags["norm_before_fc"],
        fc_norm=flags["fc_norm"],
        norm_output=flags["norm_output"],
        warnings=tuple(warnings),
    )


def _layout(config: Mapping[str, Any], shapes: Shapes) -> tuple[str, Mapping[str, Any]]:
    """Name of the layout and the config of its layer."""
    layout, layer = "EAGLE-1", config
    if kind := config.get("speculators_model_type"):
        if kind != "eagle3":
            raise UnsupportedModelError(f"speculators model type {kind!r} is not supported, expected eagle3")
        layer = config.get("transformer_layer_config") or {}
        layout = "speculators"
    elif config.get("eagle_config") is not None or "LlamaForCausalLMEagle3" in (config.get("architectures") or ()):
        layout = "SpecForge"
    elif f"{LAYER}hidden_norm.weight" in shapes or config.get("draft_vocab_size"):
        layout = "EAGLE-3"
    if layer.get("model_type") not in _LAYER_TYPES:
        supported = ", ".join(filter(None, _LAYER_TYPES))
        raise UnsupportedModelError(f"head model type {layer['model_type']!r} is not supported, expected {supported}")
    return layout, layer


def _rows(shapes: Shapes, name: str) -> int:
    if name not in shapes:
        raise ModelError(f"head lacks {name}")
    if len(shapes[name]) != 2:
        raise ModelError(f"{name} has shape {list(shapes[name])}, expected two dimensions")
    return shapes[name][0]


def _attention(
    layer: Mapping[str, Any], shapes: Shapes, default_heads: int, warnings: list[str]
) -> tuple[int, int, int]:
    """Heads, K/V heads and head_dim; projections give the sizes, the config only how many heads share them."""
    queries = _rows(shapes, f"{LAYER}self_attn.q_proj.weight")
    keys = _rows(shapes, f"{LAYER}self_attn.k_proj.weight")
    heads = int(layer.get("num_attention_heads") or default_heads)
    if heads <= 0 or queries % heads:
        raise ModelError(f"q_proj has {queries} rows, expected a multiple of num_attention_heads = {heads}")
    head_dim = queries // heads
    kv_heads = keys // head_dim
    stated = int(layer.get("num_key_value_heads") or kv_heads)
    if keys % head_dim or heads % max(kv_heads, 1) or stated != kv_heads:
        raise ModelError(f"k_proj has {keys} rows, expected {stated} heads of {head_dim} = {stated * head_dim}")
    claimed = layer.get("head_dim")
    if claimed and int(claimed) != head_dim:
        warnings.append(
            f"config says head_dim {claimed}, its projections have {head_dim}: the projections are believed"
        )
    return heads, kv_heads, head_dim


def _check_target(
    config: Mapping[str, Any], layer: Mapping[str, Any], shapes: Shapes, hidden: int, target: ModelShape
) -> None:
    problems = []
    vocab = int(layer.get("vocab_size") or target.vocab)
    if vocab != target.vocab:
        problems.append(f"head has vocab_size {vocab}, target has {target.vocab}")
    stated = int(config.get("target_hidden_size") or hidden)
    if stated != target.hidden:
        problems.append(f"head is for targets {stated} wide, target is {target.hidden} wide")
    if "embed_tokens.weight" not in shapes and hidden != target.hidden:
        problems.append(f"head is {hidden} wide and has no embed_tokens.weight, target's is {target.hidden} wide")
    if "lm_head.weight" not in shapes and stated != hidden:
        problems.append(f"head without lm_head.weight is {hidden} wide, expected the target's {target.hidden}")
    draft_vocab = shapes.get("lm_head.weight", (0,))[0]
    if draft_vocab and int(config.get("draft_vocab_size") or draft_vocab) != draft_vocab:
        problems.append(f"lm_head has {draft_vocab} rows, expected draft_vocab_size = {config['draft_vocab_size']}")
    if problems:
        raise ModelError(f"head does not fit: {'; '.join(problems)}")


def _taps(
    config: Mapping[str, Any], layout: str, shapes: Shapes, target: ModelShape, warnings: list[str]
) -> tuple[int, ...]:
    """Layers whose input is tapped, ascending."""
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError("eagle_config.use_aux_hidden_state false is not supported, expected tapped layers")
    width = shapes["fc.weight"][1]
    count = width // target.hidden
    if ids := nested.get("eagle_aux_hidden_state_layer_ids"):
        taps = sorted(int(layer) + 1 for layer in ids)  # the output of a layer is what enters the next one
    elif ids := config.get("eagle_aux_hidden_state_layer_ids"):
        taps = sorted(int(layer) for layer in ids)
    else:
        taps = [2, target.layers // 2, target.layers - 3]
        if layout != "EAGLE-3":
            warnings.append(f"config names no tapped layers, the inputs of layers {taps} are assumed")
    if width != len(taps) * target.hidden:
        raise ModelError(f"fc takes {width} values ({count} taps of {target.hidden}), expected {len(taps)} taps {taps}")
    if len(set(taps)) != len(taps) or taps[0] < 0 or taps[-1] > target.layers:
        raise ModelError(f"taps {taps} do not exist in a target of {target.layers} layers")
    return tuple(taps)


def _window(layer: Mapping[str, Any]) -> int:
    types = layer.get("layer_types") or ()
    sliding = types[0] == "sliding_attention" if types else bool(layer.get("use_sliding_window"))
    return int(layer.get("sliding_window") or 0) if sliding else 0


def _biased(layer: Mapping[str, Any], shapes: Shapes, name: str, keys: tuple[str, ...]) -> bool:
    """Whether a projection has a bias: as its config says, or as the file has it where the config is silent."""
    stated = [bool(layer[key]) for key in keys if layer.get(key) is not None]
    return any(stated) if stated else f"{LAYER}{name}.bias" in shapes


def _flags(config: Mapping[str, Any]) -> dict[str, bool]:
    nested = config.get("eagle_config") or {}
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: bool(config.get(name) or nested.get(name)) for name in names}
