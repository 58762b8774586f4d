"""ONNX Runtime on a GPU, with stand-ins for both, against the same bundle on the processor."""

from __future__ import annotations

import inspect
import re
import threading
from pathlib import Path
from typing import Any

import fake_onnxruntime
import numpy as np
import onnxruntime as ort
import pytest
from engine_walk import close, walk
from fake_onnxruntime import CPU, CUDA, TENSORRT, FakeOnnxruntime, stand_in_gpu
from tiny_families import WINDOW, write_family
from tiny_model import VOCAB, export, write_folder
from torch_helpers import tokens

from starsd.edge import cli, onnx_gpu, onnx_graph, providers
from starsd.edge.padded_target import BUCKETS, Bucket
from starsd.edge.target_onnx import OnnxTarget, open_bundle
from starsd.shared.config import Engine
from starsd.shared.errors import CapacityError, ContextOverflowError, DeviceError, EngineError, UsageError
from starsd.shared.graph_contract import runs_on
from starsd.shared.tensorrt_key import MAX_ROWS

AUTO = Engine(threads=1, initial_context=16, prefill_chunk=17)
ON_CPU = Engine(threads=1, initial_context=16, prefill_chunk=17, provider="cpu")
ON_CUDA = Engine(threads=1, initial_context=16, prefill_chunk=17, provider="cuda")
ON_TENSORRT = Engine(threads=1, initial_context=16, max_context=100, prefill_chunk=17, provider="tensorrt")
MADE = {"ort": "fp16", "portable": "fp32", "decomposed": "fp32"}
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("gpu") / "source", num_hidden_layers=2)


@pytest.fixture(scope="module")
def bundles(source: Path) -> dict[str, Path]:
    made = {}
    for flavour, precision in MADE.items():
        if runs_on(flavour, ort.__version__):
            made[flavour] = export(source, source.parent / flavour, precision, flavour=flavour, last_hidden=True)
    return made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, starsd_home: Path) -> FakeOnnxruntime:
    return stand_in_gpu(monkeypatch)


@pytest.fixture(params=list(MADE))
def flavour(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> str:
    if request.param not in bundles:
        pytest.skip(f"onnxruntime {ort.__version__} has no {request.param}")
    return str(request.param)


@pytest.fixture
def bundle(bundles: dict[str, Path], flavour: str) -> Path:
    return bundles[flavour]


@pytest.fixture
def plain(bundles: dict[str, Path], machine: FakeOnnxruntime) -> OnnxTarget:
    """The decomposed graph on the GPU."""
    return open_bundle(bundles["decomposed"], AUTO)


def runs(machine: FakeOnnxruntime) -> list[str]:
    """What the device was told to compute since the last time."""
    told = [call for call in machine.cuda.calls if call in ("run", "capture", "replay")]
    machine.cuda.calls.clear()
    return told


def settle(target: OnnxTarget) -> None:
    """Let the engine's thread do what was left for later."""
    target._graph.apart(int)


def test_equals_the_processor(machine: FakeOnnxruntime, bundle: Path, flavour: str) -> None:
    target, other, tolerance = open_bundle(bundle, AUTO), open_bundle(bundle, ON_CPU), TOLERANCE[MADE[flavour]]
    assert (target.provider, other.provider) == ("cuda", "cpu")
    assert isinstance(target.padding, Bucket)
    assert (target.shape, target.features, target.context) == (other.shape, other.features, other.context)
    walk(target, other, tolerance=tolerance)
    for one in (target, other):
        one.truncate(20)
    walk(target, other, rounds=1, tolerance=tolerance)


def test_a_conversation_goes_to_the_end_of_its_context(machine: FakeOnnxruntime, bundle: Path, flavour: str) -> None:
    small = Engine(threads=1, initial_context=8, max_context=70, prefill_chunk=66)
    target, other = open_bundle(bundle, small), open_bundle(bundle, ON_CPU)
    for one in (target, other):
        one.prefill(tokens(67, VOCAB))
    drafted, chain = [5, 6, 7], [-1, 0, 1]
    tolerance = TOLERANCE[MADE[flavour]]
    assert close(target.score(drafted, chain), other.score(drafted, chain), tolerance)
    assert close(target.commit([0, 1, 2]), other.commit([0, 1, 2]), tolerance)
    with pytest.raises(ContextOverflowError, match=r"^71 tokens do not fit, the context holds 70$"):
        target.score([5], [-1])


def test_windows_are_kept(machine: FakeOnnxruntime, tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "mistral", num_hidden_layers=2)
    bundle = export(source, tmp_path / "windowed", "fp32", flavour="decomposed")
    engine = Engine(threads=1, max_context=2 * WINDOW + 30)
    walk(open_bundle(bundle, engine), open_bundle(bundle, ON_CPU))


def test_conversations_do_not_see_each_other(machine: FakeOnnxruntime, bundle: Path, flavour: str) -> None:
    target, tolerance = open_bundle(bundle, AUTO), TOLERANCE[MADE[flavour]]
    one, other = target.sibling(), open_bundle(bundle, ON_CPU)
    target.prefill(tokens(20, VOCAB, seed=1))
    walk(one, other, tolerance=tolerance)
    own = other.sibling()
    own.prefill(tokens(20, VOCAB, seed=1))
    for mine in (target, own):
        mine.score([3, 4, 5], [-1, 0, 0])
    assert close(target.commit([0, 2]), own.commit([0, 2]), tolerance)
    heirs = target.sibling(), own.sibling()
    heirs[0].adopt(target, 15)
    heirs[1].adopt(own, 15)
    target.truncate(0)
    target.prefill(tokens(40, VOCAB, seed=5))
    assert close(heirs[0].score([5, 6], [-1, 0]), heirs[1].score([5, 6], [-1, 0]), tolerance)


def test_only_rows_that_are_wanted_come_back(machine: FakeOnnxruntime, plain: OnnxTarget) -> None:
    sizes: list[int] = []
    download = machine.cuda.download
    machine.cuda.download = lambda to, source, size, stream: (sizes.append(size), download(to, source, size, stream))[1]
    plain.prefill(tokens(10, VOCAB))
    plain.score([1, 2, 3], [-1, 0, 0])  # in a pass of four rows
    width = plain.features.width
    assert [size // 4 for size in sizes if size] == [10 * width, 3 * VOCAB, 3 * width]


def test_passes_over_trees_are_graphs(machine: FakeOnnxruntime, plain: OnnxTarget) -> None:
    """For each number of rows and each place of K/V; a prompt's parts are none."""
    plain.prefill(tokens(16, VOCAB))
    assert plain.captures
    runs(machine)
    plain.truncate(0)
    plain.prefill(tokens(10, VOCAB))
    assert runs(machine) == ["run"]

    def rows(target: OnnxTarget, count: int) -> list[str]:
        target.score([1] * count, [-1] + [0] * (count - 1))
        return runs(machine)

    other = plain.sibling()
    assert [rows(other, count) for count in (5, 8, 6)] == [["capture", "capture"], ["replay"], ["replay"]]
    other.prefill(tokens(30, VOCAB))
    runs(machine)
    assert rows(other, 5) == ["capture", "capture"]  # it has grown, and lies elsewhere
    assert rows(other, 7) == ["replay"]
    with pytest.raises(EngineError, match=r"^a pass of 65 rows, expected at most 64$"):
        other.score([1] * 65, [-1] + [0] * 64)


def test_there_are_not_more_graphs_than_onnxruntime_can_be_left_with(
    machine: FakeOnnxruntime, plain: OnnxTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_gpu, "MOST_GRAPHS", len(machine.sessions[-1].graphs) + 1)
    other = plain.sibling()
    runs(machine)
    for count in (1, 30):
        other.score([1] * count, [-1] + [0] * (count - 1))
    assert runs(machine) == ["capture", "capture", "run"]


def test_ort_is_not_captured(machine: FakeOnnxruntime, bundles: dict[str, Path]) -> None:
    target = open_bundle(bundles["ort"], AUTO)
    target.score([1], [-1])
    assert not target.captures
    assert set(runs(machine)) == {"run"}


def test_without_graphs_it_runs_too(machine: FakeOnnxruntime, bundles: dict[str, Path]) -> None:
    machine.refuses_graphs = True
    target = open_bundle(bundles["decomposed"], ON_CUDA)
    assert (target.provider, target.captures) == ("cuda", False)
    walk(target, open_bundle(bundles["decomposed"], ON_CPU), rounds=1)


def test_only_the_graphs_own_thread_deals_with_the_device(
    machine: FakeOnnxruntime, plain: OnnxTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, memory that is had or freed while a graph is captured breaks it."""
    seen: set[str] = set()
    for name in ("allocate", "release", "move", "upload", "download", "wait"):
        real = getattr(machine.cuda, name)

        def recorded(*arguments: Any, real: Any = real) -> Any:
            seen.add(threading.current_thread().name)
            return real(*arguments)

        monkeypatch.setattr(machine.cuda, name, recorded)
    other = plain.sibling()
    other.prefill(tokens(40, VOCAB))
    plain.adopt(other, 30)
    plain.score([1, 2, 3], [-1, 0, 0])
    plain.commit([0, 2])
    del other
    settle(plain)
    assert len(seen) == 1
    assert seen.pop().startswith("target")


def test_memory_goes_with_its_conversation(machine: FakeOnnxruntime, plain: OnnxTarget) -> None:
    cuda = machine.cuda
    settle(plain)
    before, shape = len(cuda.blocks), plain.shape
    other = plain.sibling()
    assert len(cuda.blocks) == before + 1
    other.prefill(tokens(20, VOCAB))
    settle(plain)
    assert len(cuda.blocks) == before + 1  # what was outgrown is gone
    assert other.cache_bytes == 2 * shape.layers * shape.kv_heads * (32 + MAX_ROWS) * shape.head_dim * 4
    del other
    settle(plain)
    assert len(cuda.blocks) == before


def test_a_full_device_leaves_conversations_whole(machine: FakeOnnxruntime, plain: OnnxTarget) -> None:
    plain.prefill(tokens(14, VOCAB))
    before, size = plain.score([1, 2], [-1, 0]), plain.cache_bytes
    settle(plain)
    machine.cuda.memory = sum(block.nbytes for block in machine.cuda.blocks.values()) + size // 2
    message = r"^the GPU has no room for {} tokens of K/V, 0 MB: end other conversations, or give a smaller --max-"
    with pytest.raises(CapacityError, match=message.format(16)):
        plain.sibling()
    with pytest.raises(CapacityError, match=message.format(64)):
        plain.prefill(tokens(20, VOCAB))
    assert (plain.length, plain.cache_bytes) == (14, size)
    np.testing.assert_array_equal(plain.score([1, 2], [-1, 0]), before)


def test_memory_of_an_engine_goes_with_it(machine: FakeOnnxruntime, bundles: dict[str, Path]) -> None:
    target = open_bundle(bundles["decomposed"], AUTO)
    target.sibling()
    del target
    assert not machine.cuda.blocks
    assert not machine.cuda.pinned


def test_a_failing_pass_is_an_error_and_no_more(machine: FakeOnnxruntime, plain: OnnxTarget) -> None:
    plain.prefill(tokens(5, VOCAB))
    before = plain.score([1, 2], [-1, 0])
    machine.fails = True
    with pytest.raises(DeviceError) as caught:
        plain.score([1, 2], [-1, 0])
    assert str(caught.value) == (
        f"onnxruntime failed in a pass of {plain.padding.rows(2)} rows on provider cuda: "
        "no kernel image is available for execution on the device"
    )
    machine.fails = False
    np.testing.assert_array_equal(plain.score([1, 2], [-1, 0]), before)


def no_device() -> None:
    raise DeviceError("no GPU can be used: CUDA finds no device")


@pytest.mark.parametrize("missing", ["device", "libraries", "kernels", "code", "memory"])
def test_auto_falls_back_and_says_why(
    missing: str,
    machine: FakeOnnxruntime,
    bundles: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    bundle = bundles["decomposed"]
    kinds: tuple[type[Exception], ...] = (DeviceError,)
    if missing == "device":
        monkeypatch.setattr(providers, "load_cudart", no_device)
        reason = "no GPU can be used: CUDA finds no device"
    elif missing == "libraries":
        machine.lacks_libraries = True
        reason = f"onnxruntime {onnx_graph.VERSION} cannot load provider cuda, for want of its libraries"
    elif missing == "kernels":
        machine.left_over = ["Shape", "Reshape", "Cast", "Cast"]
        reason = (
            f"{bundle / 'model.onnx'} does not run on provider cuda of onnxruntime {onnx_graph.VERSION}: "
            "it has no kernel for Cast, Reshape"
        )
    elif missing == "code":  # as on a Jetson
        machine.fails = True
        reason = "onnxruntime failed in a pass of 1 rows on provider cuda: no kernel image is available for execution"
    else:
        machine.cuda.memory, kinds = 300_000, (CapacityError,)
        reason = "the GPU has no room for 16 tokens of K/V, 0 MB: end other conversations, or give a smaller "
    target = open_bundle(bundle, AUTO)
    assert target.provider == "cpu"
    said = capfd.readouterr().err
    assert said.startswith(f"without a GPU, on the processor: {reason}")
    assert said.count("\n") == 1
    assert target.prefill([1, 2, 3]).shape == (3, target.features.width)
    with pytest.raises(kinds, match=f"^{re.escape(reason)}"):
        open_bundle(bundle, ON_CUDA)
    assert not machine.cuda.blocks or missing == "code"


def test_a_graph_without_kernels_goes_to_the_processor(
    machine: FakeOnnxruntime, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = export(source, tmp_path / "b", "int8")
    assert open_bundle(bundle, AUTO).provider == "cpu"
    said = capfd.readouterr().err
    assert said == (
        "without a GPU, on the processor: flavour ort runs there in fp16 alone, this is int8: "
        "export portable or decomposed instead, or use provider cpu\n"
    )
    with pytest.raises(UsageError, match=r"^provider cuda does not run this bundle: flavour ort runs there in fp16 al"):
        open_bundle(bundle, ON_CUDA)
    assert all(list(session.options) == [CPU] for session in machine.sessions)


def test_where_nobody_expects_a_gpu_nothing_is_said(
    bundles: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert open_bundle(bundles["decomposed"], AUTO).provider == "cpu"
    assert capfd.readouterr().err == ""
    with pytest.raises(UsageError, match=r"^provider cuda is not in this onnxruntime, expected one of cpu: "):
        open_bundle(bundles["decomposed"], ON_CUDA)
    with pytest.raises(UsageError, match=r"^provider is 'gpu', expected one of auto, cpu, cuda, tensorrt$"):
        open_bundle(bundles["decomposed"], Engine(provider="gpu"))


def test_sessions_are_opened_for_our_stream(machine: FakeOnnxruntime, plain: OnnxTarget) -> None:
    session = machine.sessions[-1]
    assert session.made_with == {"enable_fallback": 0}  # else it prints, and computes elsewhere
    assert list(session.options) == [CUDA, CPU]
    assert int(session.options[CUDA]["user_compute_stream"]) in machine.cuda.streams
    assert session.options[CUDA]["use_tf32"] == "0"


def test_tensorrts_provider_gets_shapes_and_one_length(machine: FakeOnnxruntime, bundles: dict[str, Path]) -> None:
    target, other = open_bundle(bundles["decomposed"], ON_TENSORRT), open_bundle(bundles["decomposed"], ON_CPU)
    assert (target.provider, target.captures) == ("tensorrt", False)
    options = machine.sessions[-2].options
    assert list(options) == [TENSORRT, CUDA, CPU]
    assert options[TENSORRT]["user_compute_stream"] == options[CUDA]["user_compute_stream"]
    capacity = 100 + MAX_ROWS
    for kind, rows in (("min", 1), ("opt", 8), ("max", 64)):
        assert options[TENSORRT][f"trt_profile_{kind}_shapes"].split(",") == [
            f"input_ids:{rows}",
            f"position_ids:1x{rows}",
            f"mask:1x1x{rows}x{capacity + rows}",
            f"logit_rows:{rows}",
        ]
    assert target._cache.capacity == capacity
    walk(target, other, rounds=1)
    assert target._cache.capacity == capacity


@pytest.mark.parametrize("command", [cli.generate, cli.chat, cli.run])
def test_commands_take_a_provider(command: Any) -> None:
    assert inspect.signature(command).parameters["provider"].default == Engine().provider == "auto"


def parameters(function: Any) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind) for one in found]


@pytest.mark.parametrize("owner", ["InferenceSession", "IOBinding"])
def test_the_stand_in_is_like_the_real_one(owner: str) -> None:
    mine, real = getattr(fake_onnxruntime, owner), getattr(ort, owner)
    names = [name for name in vars(mine) if not name.startswith("_") and name not in ("captures", "runtime")]
    assert len(names) >= 3
    for name in names:
        if name == "get_provider_graph_assignment_info" and not hasattr(real, name):
            continue  # an older one does not tell
        assert parameters(getattr(mine, name)) == parameters(getattr(real, name)), name
    if owner == "InferenceSession":
        assert parameters(mine.__init__) == parameters(real.__init__)


def test_buckets_are_those_of_an_engine() -> None:
    assert [Bucket(2).rows(count) for count in (1, 3, 33, 64, 65)] == [2, 4, 64, 64, 65]
    assert BUCKETS[-1] == MAX_ROWS
