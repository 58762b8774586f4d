"""The Llama family as one ONNX graph, flavour `ort`: GroupQueryAttention with an additive mask, K/V updated in place.

Inputs   input_ids (rows,) · logit_rows (wanted,): rows that go through the LM head
         attention_rows (1, attending): the rows that attention sees, the pass's own and perhaps a dummy behind them
         position_ids (1, attending) · mask (1, 1, attending, total) added to attention scores · own_rows (rows,)
         last_row (1,) = total - 1 · total (): committed rows + attending
         past_k_i, past_v_i (1, kv heads, capacity, head_dim): rows before the pass; new ones are written behind them
Outputs  logits (wanted, vocab) · features (rows, width) · present_k_i, present_v_i: the same buffers as past

Attention alone rounds differently for one row than for several; with a dummy for it, all else stays at one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from starsd.export.checkpoint import EMBEDDING, Checkpoint
from starsd.export.graph import CONTRIB, GraphWriter
from starsd.export.linear import Linear, packed_constants
from starsd.export.rotate import RotatedCheckpoint
from starsd.shared.console import Progress, no_progress
from starsd.shared.errors import UnsupportedModelError
from starsd.shared.manifest import FeatureSpec

_SPARE_POSITIONS = 8  # rows of the rope tables past the context, for the dummy rows behind its last token
_HEAD_MULTIPLE = 16  # what GroupQueryAttention's rotary embedding takes


@dataclass(frozen=True)
class Recipe:
    """How each part is computed: hidden states in `dtype`, linear layers by their form."""

    dtype: Any
    body: Linear
    down: Linear
    head: Linear


def build(
    graph: GraphWriter,
    checkpoint: Checkpoint,
    recipe: Recipe,
    features: FeatureSpec,
    context: int,
    progress: Progress = no_progress,
) -> None:
    """Add the whole model. `features.taps` name the layers whose input is handed out.

    Raises UnsupportedModelError for sizes that an operator refuses.
    """
    if checkpoint.shape.head_dim % _HEAD_MULTIPLE:
        raise UnsupportedModelError(
            f"head_dim {checkpoint.shape.head_dim} is not supported, expected a multiple of {_HEAD_MULTIPLE}"
        )
    layers = checkpoint.shape.layers
    builder = _Builder(graph, checkpoint, recipe, context)
    stream, taps = builder.embed(), []
    normed = builder.first_norm(stream)
    for layer in range(layers):
        if layer in features.taps:
            taps.append(stream)
        stream, normed = builder.layer(layer, stream, normed)
        progress("writing layers", layer + 1, layers)
    builder.features(taps, normed if features.last_hidden else None, features)
    builder.logits(normed)


class _Builder:
    def __init__(self, graph: GraphWriter, checkpoint: Checkpoint, recipe: Recipe, context: int) -> None:
        self.graph, self.checkpoint, self.recipe = graph, checkpoint, recipe
        self.shape = checkpoint.shape
        self.rotated = checkpoint if isinstance(checkpoint, RotatedCheckpoint) else None
        graph.input("input_ids", np.int64, ["rows"])
        graph.input("attention_rows", np.int64, [1, "attending"])
        graph.input("own_rows", np.int64, ["rows"])
        graph.input("position_ids", np.int64, [1, "attending"])
        graph.input("mask", np.float32, [1, 1, "attending", "total"])
        graph.input("last_row", np.int32, [1])
        graph.input("total", np.int32, [])
        graph.input("logit_rows", np.int64, ["wanted"])
        tables = [np.pad(t, ((0, _SPARE_POSITIONS), (0, 0)), "edge") for t in checkpoint.rope.tables(context)]
        self.cos, self.sin = (
            graph.constant(name, table.astype(recipe.dtype))
            for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True)
        )
        self.mask = self.typed("mask", np.float32)

    def typed(self, value: str, dtype: Any) -> str:
        """`value`, which is of `dtype`, in the type of the hidden states."""
        if np.dtype(dtype) == np.dtype(self.recipe.dtype):
            return value
        return self.graph.cast(value, self.recipe.dtype, to=value + "_typed")

    def embed(self) -> str:
        """Token embeddings; from a GGUF's own 8-bit blocks where it has them, the LM head may share their bytes."""
        graph, blocks = self.graph, self.checkpoint.blocks.get(EMBEDDING)
        if blocks is not None and blocks.kind == "Q8_0":
            packed, scale = packed_constants(graph, EMBEDDING, blocks)
            quants = graph.cast(graph.node("Gather", packed, "input_ids", to="embedded_q"), np.float32, "embedded_qf")
            centred = graph.node("Sub", quants, graph.constant("128", 128.0), to="embedded_centred")
            column = graph.node(
                "Unsqueeze",
                graph.node("Gather", scale, "input_ids", to="embedded_scale"),
                graph.ints(-1),
                to="embedded_column",
            )
            grouped = graph.node("Mul", centred, column, to="embedded_groups")
            stream = self.typed(graph.node("Reshape", grouped, graph.ints(0, -1), to="embedded"), np.float32)
        else:
            table = self.checkpoint.stored(EMBEDDING)
            if self.recipe.dtype is np.float16:
                table = table.astype(np.float16)  # the very values that a cast behind the gather would give
            shared = (
                table.dtype == self.recipe.dtype and not self.rotated
            )  # a tied dense head multiplies by these bytes
            name = graph.constant(EMBEDDING if shared else EMBEDDING + "_stored", table)
            stream = self.typed(graph.node("Gather", name, "input_ids", to="embedded"), table.dtype)
        if self.rotated:
            stream = graph.node("MatMul", stream, graph.constant("basis", self.rotated.basis), to="embedded_turned")
        return stream

    def norm_weight(self, name: str) -> str:
        if self.rotated:
            return self.graph.constant("folded_norm", np.ones(self.shape.hidden, np.float32))
        return self.graph.constant(name, self.checkpoint.stored(name).astype(self.recipe.dtype))

    def first_norm(self, stream: str) -> str:
        weight = self.norm_weight("model.layers.0.input_layernorm.weight")
        epsilon = self.checkpoint.norm_epsilon
        return self.graph.node(
            "SimplifiedLayerNormalization", stream, weight, to="normed_0", axis=-1, epsilon=epsilon, stash_type=1
        )

    def add_and_norm(self, stream: str, update: str, weight: str, to: str) -> tuple[str, str]:
        """The residual sum, and its RMSNorm for whatever reads it next."""
        outputs = (to + "_normed", "", "", to)
        self.graph.nodes(
            "SkipSimplifiedLayerNormalization",
            stream,
            update,
            self.norm_weight(weight),
            to=outputs,
            domain=CONTRIB,
            epsilon=self.checkpoint.norm_epsilon,
        )
        return to, to + "_normed"

    def layer(self, index: int, stream: str, normed: str) -> tuple[str, str]:
        """One transformer layer; its output and that output normed for the next layer or the LM head."""
        name = f"model.layers.{index}."
        attended = self.attention(index, normed, name + "self_attn.")
        stream, normed = self.add_and_norm(
            stream, attended, name + "post_attention_layernorm.weight", to=f"stream_{index}_mid"
        )
        last = index + 1 == self.shape.layers
        following = "model.norm.weight" if last else f"model.layers.{index + 1}.input_layernorm.weight"
        return self.add_and_norm(stream, self.mlp(index, normed, name + "mlp."), following, to=f"stream_{index + 1}")

    def attention(self, index: int, normed: str, name: str) -> str:
        graph, shape = self.graph, self.shape
        past, present = (f"past_k_{index}", f"past_v_{index}"), (f"present_k_{index}", f"present_v_{index}")
        size: list[int | str] = [1, shape.kv_heads, "capacity", shape.head_dim]
        for tensor in past:
            graph.input(tensor, self.recipe.dtype, size)
        weights = [f"{name}{part}_proj.weight" for part in "qkv"]
        fused = self.recipe.body(graph, normed, weights, to=f"qkv_{index}")
        batched = graph.node("Gather", fused, "attention_rows", to=f"qkv_{index}_attending")
        attended = (f"attended_{index}_batch", *present)
        graph.nodes(
            "GroupQueryAttention",
            batched,
            "",
            "",
            *past,
            "last_row",
            "total",
            self.cos,
            self.sin,
            "position_ids",
            self.mask,
            to=attended,
            domain=CONTRIB,
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
            scale=float(shape.head_dim**-0.5),
        )
        for tensor in present:
            graph.output(tensor, self.recipe.dtype, size)
        single = graph.node("Squeeze", attended[0], graph.ints(0), to=f"attended_{index}_all")
        joined = graph.node("Gather", single, "own_rows", to=f"attended_{index}")
        return self.recipe.body(graph, joined, [name + "o_proj.weight"], to=f"attention_{index}")

    def mlp(self, index: int, normed: str, name: str) -> str:
        graph = self.graph
        weights = [name + "gate_proj.weight", name + "up_proj.weight"]
        both = self.recipe.body(graph, normed, weights, to=f"gate_up_{index}")
        gate, up = graph.nodes("Split", both, to=(f"gate_{index}", f"up_{index}"), axis=-1, num_outputs=2)
        silu = graph.node("QuickGelu", gate, to=f"silu_{index}", domain=CONTRIB, alpha=1.0)
        inner = graph.node("Mul", silu, up, to=f"inner_{index}")
        return self.recipe.down(graph, inner, [name + "down_proj.weight"], to=f"mlp_{index}")

    def features(self, taps: list[str], last_hidden: str | None, spec: FeatureSpec) -> None:
        """Tapped states and the last normed one side by side, in float32 and in the model's own basis."""
        graph, parts = self.graph, []
        if not spec.width:
            return
        for i, tap in enumerate(taps):
            parts.append(self.turned_back(tap, "basis_back", None, to=f"tap_{i}"))
        if last_hidden is not None:
            parts.append(self.turned_back(last_hidden, "last_back", "model.norm.weight", to="last_hidden"))
        joined = graph.node("Concat", *parts, to="features_typed", axis=-1) if len(parts) > 1 else parts[0]
        graph.cast(joined, np.float32, to="features")
        graph.output("features", np.float32, ["rows", spec.width])

    def turned_back(self, state: str, constant: str, norm: str | None, to: str) -> str:
        if not self.rotated:
            return state
        back = self.rotated.basis.T
        if norm is not None:
            back = back * self.checkpoint.stored(norm).astype(np.float32)
        return self.graph.node("MatMul", state, self.graph.constant(constant, back), to=to)

    def logits(self, normed: str) -> None:
        graph = self.graph
        wanted = graph.node("Gather", normed, "logit_rows", to="wanted")
        scored = self.recipe.head(graph, wanted, [self.checkpoint.head], to="logits_typed")
        graph.cast(scored, np.float32, to="logits")
        graph.output("logits", np.float32, ["wanted", self.shape.vocab])
