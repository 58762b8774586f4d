"""A bundle's graph in onnxruntime: opened with its providers, checked against its manifest, run in its own thread."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from starsd.edge.providers import Options, has_provider
from starsd.shared.errors import BundleError, DeviceError
from starsd.shared.graph_contract import Pass, contract_of
from starsd.shared.manifest import GRAPH_FILE, Manifest
from starsd.shared.onnx_file import constant_shapes

VERSION: str = ort.__version__
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_MASKS = {"mask", "local_mask"}  # a graph has those that its layers need
_ANYWHERE = {"Shape"}  # computes sizes, which every provider has in the host's memory


def available() -> list[str]:
    """The providers of this onnxruntime, in its own names; whether they work is another matter."""
    return list(ort.get_available_providers())


class OnnxGraph:
    """Shared by all conversations of an engine.

    Raises BundleError when the file is not the manifest's or does not load on the processor, and DeviceError when the
    provider does not take the whole of it. `sizes` are of dimensions by their name in the graph.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        threads: int,
        provider: str = "cpu",
        providers: Options | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.shape, self.features, self.provider = manifest.shape, manifest.features, provider
        self.contract, self._path = contract_of(manifest.flavour), folder / GRAPH_FILE
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # attention weights fall below 1e-38, where arithmetic is many times slower; they add nothing to a sum. The
        # runtime sets this for the thread that calls it, and for good: so it gets a thread of its own
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        if provider != "tensorrt":  # that one reads packed weights itself
            for name, value in self.contract.options.items():
                options.add_session_config_entry(name, value)
        if provider != "cpu":
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for name, size in (sizes or {}).items():
            options.add_free_dimension_override_by_name(name, size)
        self._thread = ThreadPoolExecutor(1, "target")
        self._left: deque[tuple[Callable[[int], None], int]] = deque()
        weakref.finalize(self, _clear, self._left).atexit = False
        self.session = self._open(options, providers or [("CPUExecutionProvider", {})])
        self.cache_type = self._check(manifest.flavour)

    def _open(self, options: Any, providers: Options) -> Any:
        told = {} if self.provider == "cpu" else {"enable_fallback": 0}  # else it prints, and goes on without a GPU
        try:
            session = self.apart(ort.InferenceSession, str(self._path), options, providers=providers, **told)
        except Exception as error:  # onnxruntime's exceptions share no base but this one
            if self.provider != "cpu":
                reason = " ".join(str(error).split())  # of several lines
                raise DeviceError(f"{self._path} does not load on provider {self.provider}: {reason}") from error
            raise BundleError(f"{self._path} does not load in onnxruntime {VERSION}: {error}") from error
        if not has_provider(self.provider, session.get_providers()):
            raise DeviceError(f"onnxruntime {VERSION} cannot load provider {self.provider}, for want of its libraries")
        if self.provider != "cpu" and (left := _left_over(session)):
            raise DeviceError(
                f"{self._path} does not run on provider {self.provider} of onnxruntime {VERSION}: "
                f"it has no kernel for {', '.join(left)}"
            )
        return session

    def _check(self, flavour: str) -> Any:
        """The type of K/V. Raises BundleError unless the graph has the inputs and outputs of the manifest's shape and
        flavour, and positions for all of its context."""
        shape, features = self.shape, self.features
        self.inputs = inputs = {tensor.name: tensor for tensor in self.session.get_inputs()}
        outputs = {tensor.name: tensor for tensor in self.session.get_outputs()}
        got = {
            "layers": sum(name.startswith("past_k_") for name in inputs),
            "K/V heads": inputs["past_k_0"].shape[1] if "past_k_0" in inputs else None,
            "head_dim": inputs["past_k_0"].shape[3] if "past_k_0" in inputs else None,
            "vocab": outputs["logits"].shape[1] if "logits" in outputs else None,
            "feature width": outputs["features"].shape[1] if "features" in outputs else 0,
            "a window": "local_mask" in inputs,
        }
        expected = (shape.layers, shape.kv_heads, shape.head_dim, shape.vocab, features.width, shape.window > 0)
        for (what, found), value in zip(got.items(), expected, strict=True):
            if found != value:
                raise BundleError(f"{self._path} has {what} {found}, its manifest says {value}")
        fed = self.contract.feeds(Pass([0], None, 0, 1, 1, 1, 1), shape.window).keys() - _MASKS
        if (read := {name for name in inputs if not name.startswith("past_")} - _MASKS) != fed:
            here, there = (", ".join(sorted(names)) for names in (read, fed))
            raise BundleError(f"{self._path} has inputs {here}, flavour {flavour} has {there}")
        tables = (size[0] for name, size in constant_shapes(self._path).items() if name.endswith("rope_cos"))
        if (positions := min(tables, default=shape.context)) < shape.context:
            raise BundleError(f"{self._path} has {positions} positions, its manifest says context {shape.context}")
        return _TYPES[inputs["past_k_0"].type]

    def apart(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`call` in the runtime's thread. It is over when this returns, be it by an interrupt."""
        running = self._thread.submit(self._do, call, *args, **options)
        try:
            return running.result()
        finally:
            wait([running])
            del running  # an error holds this frame, and with it what the caller would free

    def later(self, call: Callable[[int], None], value: int) -> None:
        """The same at the beginning of the next one. Takes no lock: what is called when an object goes may not."""
        self._left.append((call, value))

    def _do(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        _clear(self._left)
        return call(*args, **options)


def _clear(left: deque[tuple[Callable[[int], None], int]]) -> None:
    while left:
        call, value = left.popleft()
        call(value)


def _left_over(session: Any) -> list[str]:
    """Operators of which nodes are left to the processor. Older versions of onnxruntime do not tell."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return []
    parts = session.get_provider_graph_assignment_info()
    nodes = (node for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes())
    return sorted({node.op_type for node in nodes} - _ANYWHERE)
