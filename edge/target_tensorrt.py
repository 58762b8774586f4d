"""A target bundle on TensorRT: K/V stay on the GPU, which a pass reads, writes and tidies up without the host.

Passes over a tree have 1, 2, 4 … 64 rows, real ones and dummies: so few shapes can all be prepared and captured. The
engine finds out from how many rows on these shapes agree to the last bit and uses no fewer (promise 2). Where none do
up to 8, it uses the fewest that come as near as can be, and what is left is `noise`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starsd.edge import probe
from starsd.edge.cuda import Cuda, open_cuda
from starsd.edge.device_cache import DeviceCache
from starsd.edge.padded_target import PaddedTarget, context_of
from starsd.edge.target import Floats, Target, open_target
from starsd.edge.target_tensorrt_engine import PREFILL, TREE, TensorrtEngine
from starsd.shared.config import Engine
from starsd.shared.errors import CapacityError, DeviceError, ModelError
from starsd.shared.graph_contract import Pass, contract_of
from starsd.shared.manifest import Manifest, read
from starsd.shared.tensorrt_bindings import load_tensorrt
from starsd.shared.tensorrt_key import (
    FOLDER,
    PLAN_FILE,
    EngineRecord,
    Machine,
    differences,
    key_for,
    l4t_release,
    read_record,
)


def open_bundle(folder: Path, config: Engine) -> Target:
    """The engine of the bundle in `folder`, or ONNX Runtime on the same bundle when it cannot be used here.

    Says on stderr why not. Raises BundleError for a damaged bundle, UsageError for a configuration out of range.
    """
    try:
        return open_engine(folder, config)
    except DeviceError as error:
        print(f"without TensorRT, on ONNX Runtime: {error}", file=sys.stderr, flush=True)
        return open_target("onnx", folder, config)


def open_engine(folder: Path, config: Engine) -> TensorrtTarget:
    """The same without falling back. Raises DeviceError when there is no GPU, no TensorRT, or no engine that fits."""
    about = read(folder)
    rebuild = f"run starsd-export tensorrt {folder}"
    try:
        record = read_record(folder)
    except ModelError as error:
        raise DeviceError(f"{error}: {rebuild}") from error
    if record is None:
        raise DeviceError(f"{folder} has no engine: {rebuild}")
    cuda = open_cuda()  # before anything of TensorRT: without a device it crashes
    trt = load_tensorrt()
    machine = Machine(tensorrt=trt.__version__, l4t=l4t_release(), gpu=cuda.gpu().name)
    here = key_for(about, machine, record.key.context, record.key.chunk)
    if found := differences(record.key, here):
        raise DeviceError(f"{folder} has an engine for {'; '.join(found)}: {rebuild}")
    return TensorrtTarget(trt, folder, about, record, config, cuda)


class TensorrtTarget(PaddedTarget):
    """One model and one conversation's cache; see `Target` for the life of it."""

    def __init__(
        self, trt: Any, folder: Path, manifest: Manifest, record: EngineRecord, config: Engine, cuda: Cuda
    ) -> None:
        self.manifest, key = manifest, record.key
        context = context_of(config, 2 * probe.WIDE, key.context, "all of the engine's")
        super().__init__(manifest.shape, manifest.features, context, min(config.prefill_chunk, key.chunk))
        self._contract, self._capacity = contract_of(manifest.flavour), key.capacity
        plan, in_place = folder / FOLDER / PLAN_FILE, self._contract.in_place
        self._engine = TensorrtEngine(trt, plan, key, manifest.shape, manifest.features, in_place, cuda)
        self._start_cache()
        self._choose_bucket()

    def sibling(self) -> TensorrtTarget:
        try:
            return super().sibling()
        except DeviceError as error:
            raise CapacityError(
                f"the GPU has no room for another conversation, {self.cache_bytes / 1e6:.0f} MB of K/V: end one, "
                f"or build the engine with a smaller --context ({error})"
            ) from error

    def _run(self, tokens: Sequence[int], parents: Sequence[int] | None) -> tuple[Floats, Floats]:
        count, profile = len(tokens), PREFILL if parents is None else TREE
        rows = count if parents is None else self._padding.rows(count)
        wanted = 1 if parents is None else rows
        one = Pass(tokens, parents, self._length, rows, rows, self._capacity, wanted)
        feeds = self._contract.feeds(one, self.shape.window)
        try:
            self._engine.run(feeds, profile, self._cache, self._length, count)
            logits = self._engine.results("logits", count if parents is not None else 0)
            return logits, self._engine.results("features", count)
        finally:
            self._engine.wait()  # buffers are filled anew by the next pass, be this one interrupted or not

    def _start_cache(self) -> None:
        self._cache: DeviceCache = self._engine.make_cache()

    def _make_room(self, length: int) -> None:
        """All of it is there from the beginning: an engine's K/V have one size."""
