"""Drives TensorRT's builder: a graph's bytes in, a plan and the timing cache out.

The network is strongly typed: every type is the graph's. Building runs in a thread of its own, so that an interrupt is
noticed at once and ends the build at its next step, instead of throwing through TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from starsd.shared.console import Progress
from starsd.shared.errors import BundleError

Shape = tuple[int, ...]
ProfileShapes = Mapping[str, tuple[Shape, Shape, Shape]]  # input → fewest, likeliest, most


class Built(NamedTuple):
    plan: Any  # has a buffer: written without a copy
    timing: bytes  # of the tactics that were tried; empty where TensorRT keeps none


def build_plan(
    trt: Any, graph: bytes, graph_file: Path, profiles: Sequence[ProfileShapes], timing: bytes, progress: Progress
) -> Built:
    """Parse the graph (its weights lie beside `graph_file`) and build an engine with these profiles.

    `trt` is the module. Raises BundleError with TensorRT's own words when it takes the graph not, or builds it not.
    """
    log = _make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(graph, str(graph_file)):
        raise BundleError(f"{graph_file} does not parse in TensorRT {trt.__version__}: {_parse_error(parser)}")
    config = builder.create_builder_config()
    for shapes in profiles:
        _add_profile(builder, config, network, shapes)
    cache = config.create_timing_cache(timing)
    if not config.set_timing_cache(cache, ignore_mismatch=False):  # another version's: it starts anew
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    monitor = _make_monitor(trt, progress)
    if monitor is not None:
        config.progress_monitor = monitor
    with ThreadPoolExecutor(1, "tensorrt") as thread:
        running = thread.submit(builder.build_serialized_network, network, config)
        try:
            plan = running.result()
        except BaseException:
            if monitor is not None:
                monitor.stopped = True
            wait([running])
            raise
    if plan is None:
        raise BundleError(f"{graph_file} does not build in TensorRT {trt.__version__}: {log.last or 'no reason given'}")
    kept = config.get_timing_cache()
    return Built(plan, bytes(kept.serialize()) if kept is not None else b"")


def _add_profile(builder: Any, config: Any, network: Any, shapes: ProfileShapes) -> None:
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if -1 not in tuple(tensor.shape):
            continue
        if tensor.name not in shapes:
            raise BundleError(f"input {tensor.name} of the graph is unknown, expected {', '.join(sorted(shapes))}")
        try:
            profile.set_shape(tensor.name, *shapes[tensor.name])
        except ValueError as error:
            raise BundleError(
                f"input {tensor.name} of the graph is {tuple(tensor.shape)}, expected {shapes[tensor.name][1]}"
            ) from error
    if config.add_optimization_profile(profile) < 0:
        raise BundleError("TensorRT refuses an optimisation profile of the graph")


def _parse_error(parser: Any) -> str:
    if not parser.num_errors:
        return "no reason given"
    error = parser.get_error(0)
    return f"{' '.join(error.desc().split())} (at {error.node_operator() or 'no operator'} {error.node_name()})"


def _make_log(trt: Any) -> Any:
    """A logger that keeps the newest error: a failed build returns nothing else."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.last = " ".join(msg.split())

    return Log()


def _make_monitor(trt: Any, progress: Progress) -> Any | None:
    """Reports the outermost phase, whose steps are the build's; None where TensorRT has no such interface."""
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.stopped = False
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._steps[phase_name] = num_steps
                progress(f"building: {phase_name.lower()}", 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._steps and step + 1 < self._steps[phase_name]:
                progress(f"building: {phase_name.lower()}", step + 1, self._steps[phase_name])
            return not self.stopped

        def phase_finish(self, phase_name: str) -> None:
            steps = self._steps.pop(phase_name, None)
            if steps is not None:
                progress(f"building: {phase_name.lower()}", steps, steps)

    return Monitor()
