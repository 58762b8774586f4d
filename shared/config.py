"""Every default, once. Command lines read theirs from here; unknown keys are errors."""

from __future__ import annotations

import msgspec

FLAVOURS = ("ort", "portable", "decomposed")
PRECISIONS = ("fp32", "fp16", "int8", "int4")
OVERFLOWS = ("error", "truncate")  # truncate: the oldest tokens go, those of the system message stay
PROVIDERS = ("auto", "cpu", "cuda", "tensorrt")  # where onnxruntime computes; auto: a GPU that runs the graph, or cpu
CONVERSATIONS = 8  # of a device at a time, and caches of K/V that it keeps
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_CODEC = "rot4"  # of features on the wire, a name of `features.CODECS`: the smallest with ≤ 1 % loss
DEFAULT_PRECISION = "int8"  # the cheapest passes of 2 rows and more: docs/targets.md


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen from the target's logits. Neutral values switch a processor off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a generation ends, besides the end token."""

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    overflow: str = "error"  # what a prompt that leaves no room meets, one of OVERFLOWS


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a target engine runs on this machine."""

    threads: int = 0  # 0: one per physical core
    initial_context: int = 512  # tokens of K/V to start with; doubles when full
    max_context: int = 0  # 0: what the model was trained for
    prefill_chunk: int = 256  # tokens a pass while reading a prompt
    provider: str = "auto"  # of onnxruntime, one of PROVIDERS
