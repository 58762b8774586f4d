"""A decoder as one ONNX graph: what a model computes, in the spelling of a flavour and the linear forms of a recipe.

Outputs  logits (wanted, vocab) · features (rows, width), where the model has any: tapped states and the last hidden
         one side by side, float32, in the model's own basis. Inputs and K/V are the flavour's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from starsd.export.checkpoint import EMBEDDING, Checkpoint
from starsd.export.flavour import Flavour
from starsd.export.gguf import Blocks
from starsd.export.graph import GraphWriter
from starsd.export.linear import packed_constants
from starsd.export.recipe import Recipe
from starsd.export.rotate import RotatedCheckpoint
from starsd.shared.console import Progress, no_progress
from starsd.shared.manifest import FeatureSpec


def build(
    graph: GraphWriter,
    checkpoint: Checkpoint,
    recipe: Recipe,
    features: FeatureSpec,
    context: int,
    progress: Progress = no_progress,
) -> None:
    """Add the whole model, for texts of at most `context` tokens. `features.taps` name the layers whose input is
    handed out. Raises UnsupportedModelError for sizes that the flavour's operators refuse.
    """
    architecture = checkpoint.architecture.within(context)
    flavour = recipe.flavour(graph, architecture, recipe.dtype)
    builder = _Builder(graph, flavour, checkpoint, recipe)
    layers = architecture.shape.layers
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
    def __init__(self, graph: GraphWriter, flavour: Flavour, checkpoint: Checkpoint, recipe: Recipe) -> None:
        self.graph, self.flavour, self.checkpoint, self.recipe = graph, flavour, checkpoint, recipe
        self.architecture, self.shape = checkpoint.architecture, checkpoint.shape
        self.rotated = checkpoint if isinstance(checkpoint, RotatedCheckpoint) else None

    def typed(self, value: str, got: Any, wanted: Any) -> str:
        """`value`, which is of type `got`, as `wanted`."""
        if np.dtype(got) == np.dtype(wanted):
            return value
        return self.graph.cast(value, wanted, to=value + "_typed")

    def to_stream(self, value: str) -> str:
        return self.typed(value, self.recipe.dtype, self.recipe.stream)

    def from_stream(self, value: str) -> str:
        return self.typed(value, self.recipe.stream, self.recipe.dtype)

    def embed(self) -> str:
        """Token embeddings, scaled where the family scales them, in the basis of the stream."""
        graph = self.graph
        blocks = self.checkpoint.blocks.get(EMBEDDING) if self.recipe.packed_embedding else None
        packed = blocks if blocks is not None and blocks.kind == "Q8_0" else None
        stream = self.embedded_blocks(packed) if packed is not None else self.embedded_rows()
        if (scale := self.checkpoint.embedding_scale) != 1:
            value = graph.constant("embedding_scale", np.array(scale, self.recipe.stream))
            stream = graph.node("Mul", stream, value, to="embedded_scaled")
        if self.rotated:
            stream = graph.node("MatMul", stream, graph.constant("basis", self.rotated.basis), to="embedded_turned")
        return stream

    def embedded_blocks(self, blocks: Blocks) -> str:
        """From a GGUF's own 8-bit blocks, whose bytes the LM head may share."""
        graph = self.graph
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
        embedded = graph.node("Reshape", grouped, graph.ints(0, -1), to="embedded")
        return self.typed(embedded, np.float32, self.recipe.stream)

    def embedded_rows(self) -> str:
        """From a table as it is stored, or as a tied dense head stores it."""
        graph, table = self.graph, self.checkpoint.stored(EMBEDDING)
        if self.recipe.dtype is np.float16:
            table = table.astype(np.float16)  # the very values that a cast behind the gather would give
        shared = table.dtype == self.recipe.dtype and not self.rotated  # with a tied dense head
        name = graph.constant(EMBEDDING if shared else EMBEDDING + "_stored", table)
        embedded = graph.node("Gather", name, "input_ids", to="embedded")
        return self.typed(embedded, table.dtype, self.recipe.stream)

    def norm_weight(self, name: str) -> str:
        if self.rotated:
            return self.graph.constant("folded_norm", np.ones(self.shape.hidden, np.float32))
        return self.graph.constant(name, self.checkpoint.norm(name).astype(self.recipe.stream))

    def first_norm(self, stream: str) -> str:
        weight = self.norm_weight("model.layers.0.input_layernorm.weight")
        return self.from_stream(self.flavour.norm(stream, weight, to="normed_0"))

    def add(self, stream: str, update: str, name: str, after: str, to: str) -> tuple[str, str]:
        """The residual sum, and its norm `name` for whatever reads it next; `after` is the update's own norm."""
        update = self.to_stream(update)
        if self.architecture.post_norms:
            update = self.flavour.norm(update, self.norm_weight(after), to=to + "_update")
        stream, normed = self.flavour.add_and_norm(stream, update, self.norm_weight(name), to=to)
        return stream, self.from_stream(normed)

    def layer(self, index: int, stream: str, normed: str) -> tuple[str, str]:
        """One transformer layer; its output and that output normed for the next layer or the LM head."""
        name = f"model.layers.{index}."
        attended = self.attention(index, normed, name + "self_attn.")
        before, after = f"{name}{self.architecture.before_mlp}.weight", name + "post_attention_layernorm.weight"
        stream, normed = self.add(stream, attended, before, after, to=f"stream_{index}_mid")
        last = index + 1 == self.shape.layers
        following = "model.norm.weight" if last else f"model.layers.{index + 1}.input_layernorm.weight"
        after = name + "post_feedforward_layernorm.weight"
        return self.add(stream, self.mlp(index, normed, name + "mlp."), following, after, to=f"stream_{index + 1}")

    def attention(self, index: int, normed: str, name: str) -> str:
        qkv: tuple[str, ...]
        qkv = (
            self.recipe.body(self.graph, normed, [f"{name}{part}_proj.weight" for part in "qkv"], to=f"qkv_{index}"),
        )
        if self.architecture.head_norms:
            qkv = self.normed_heads(index, qkv[0], name)
        attended = self.flavour.attend(index, qkv, to=f"attended_{index}")
        return self.recipe.body(self.graph, attended, [name + "o_proj.weight"], to=f"attention_{index}")

    def normed_heads(self, index: int, qkv: str, name: str) -> tuple[str, str, str]:
        graph, shape = self.graph, self.shape
        sizes = graph.ints(*(heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)))
        q, k, v = graph.nodes("Split", qkv, sizes, to=(f"q_{index}", f"k_{index}", f"v_{index}"), axis=-1)
        normed = []
        for part, value, heads in (("q", q, shape.heads), ("k", k, shape.kv_heads)):
            weight = self.checkpoint.norm(f"{name}{part}_norm.weight").astype(self.recipe.dtype)
            constant = graph.constant(f"{name}{part}_norm.weight", weight)
            normed.append(self.flavour.head_norm(value, constant, heads, to=f"{value}_headed"))
        return normed[0], normed[1], v

    def mlp(self, index: int, normed: str, name: str) -> str:
        graph = self.graph
        weights = [name + "gate_proj.weight", name + "up_proj.weight"]
        both = self.recipe.body(graph, normed, weights, to=f"gate_up_{index}")
        gate, up = graph.nodes("Split", both, to=(f"gate_{index}", f"up_{index}"), axis=-1, num_outputs=2)
        active = self.flavour.activate(gate, to=f"{self.architecture.activation}_{index}")
        inner = graph.node("Mul", active, up, to=f"inner_{index}")
        return self.recipe.down(graph, inner, [name + "down_proj.weight"], to=f"mlp_{index}")

    def features(self, taps: list[str], last_hidden: str | None, spec: FeatureSpec) -> None:
        """Tapped states and the last normed one side by side, in float32 and in the model's own basis."""
        graph, parts = self.graph, []
        if not spec.width:
            return
        for i, tap in enumerate(taps):
            parts.append(self.turned_back(tap, "basis_back", None, to=f"tap_{i}"))
        if last_hidden is not None:
            last_hidden = self.to_stream(last_hidden)
            parts.append(self.turned_back(last_hidden, "last_back", "model.norm.weight", to="last_hidden"))
        joined = graph.node("Concat", *parts, to="features_typed", axis=-1) if len(parts) > 1 else parts[0]
        graph.cast(joined, np.float32, to="features")
        graph.output("features", np.float32, ["rows", spec.width])

    def turned_back(self, state: str, constant: str, norm: str | None, to: str) -> str:
        if not self.rotated:
            return state
        back = self.rotated.basis.T
        if norm is not None:
            back = back * self.checkpoint.norm(norm)
        return self.graph.node("MatMul", state, self.graph.constant(constant, back), to=to)

    def logits(self, normed: str) -> None:
        graph, cap = self.graph, self.architecture.logit_cap
        wanted = graph.node("Gather", normed, "logit_rows", to="wanted")
        scored = self.recipe.head(graph, wanted, [self.checkpoint.head], to="logits_typed")
        if cap:
            whole = graph.cast(scored, np.float32, to="logits_whole")
            share = graph.node("Div", whole, graph.constant("logit_cap", cap), to="logits_share")
            graph.node(
                "Mul", graph.node("Tanh", share, to="logits_bent"), graph.constant("logit_cap", cap), to="logits"
            )
        else:
            graph.cast(scored, np.float32, to="logits")
        graph.output("logits", np.float32, ["wanted", self.shape.vocab])
