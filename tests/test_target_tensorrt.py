"""The TensorRT engine with stand-ins for TensorRT and CUDA, against ONNX Runtime on the same bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from engine_walk import close, walk
from fake_tensorrt import ICudaEngine, IExecutionContext
from fake_tensorrt_build import TensorLocation
from msgspec.structs import replace
from tensorrt_helpers import CONTEXT, Machine, build, stand_in
from tiny_families import WINDOW, write_family
from tiny_model import export, write_folder
from torch_helpers import tokens

from starsd.edge import target_tensorrt
from starsd.edge.padded_target import BUCKETS, Bucket
from starsd.edge.runtime import Runtime
from starsd.edge.target import open_target
from starsd.edge.target_onnx import OnnxTarget
from starsd.edge.target_onnx import open_bundle as open_onnx
from starsd.edge.target_tensorrt import TensorrtTarget, open_bundle, open_engine
from starsd.shared.config import Engine
from starsd.shared.errors import BundleError, CapacityError, ContextOverflowError, DeviceError, EngineError, UsageError
from starsd.shared.tensorrt_key import FOLDER, MAX_ROWS, PLAN_FILE

ENGINE = Engine(threads=1, initial_context=16, prefill_chunk=17)
VERSIONS = {"portable": "10.16.2.10", "decomposed": "10.3.0.30"}
OPSET_24 = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 25)


@pytest.fixture(scope="module", params=["portable", "decomposed"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle and its flavour."""
    if request.param == "portable" and not OPSET_24:
        pytest.skip(f"onnxruntime {ort.__version__} stands in for TensorRT and does not load the portable graph")
    place = tmp_path_factory.mktemp("tensorrt")
    source = write_folder(place / "source", num_hidden_layers=2)
    return export(source, place / "bundle", "fp32", flavour=request.param, last_hidden=True), request.param


@pytest.fixture
def machine(made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, starsd_home: Path) -> Machine:
    monkeypatch.setattr("starsd.export.tensorrt_engine._check_flavour", lambda *_: None)  # the stand-in computes fp32
    return stand_in(monkeypatch, VERSIONS[made[1]])


@pytest.fixture
def bundle(made: tuple[Path, str], machine: Machine, tmp_path: Path) -> Path:
    """The bundle with an engine for this machine."""
    folder = Path(shutil.copytree(made[0], tmp_path / "bundle"))
    build(folder)
    return folder


@pytest.fixture
def target(bundle: Path, machine: Machine) -> TensorrtTarget:
    return open_engine(bundle, ENGINE)


def test_equals_onnx_runtime_on_the_same_bundle(target: TensorrtTarget, bundle: Path) -> None:
    other = open_onnx(bundle, ENGINE)
    assert (target.shape, target.features, target.context) == (other.shape, other.features, CONTEXT)
    walk(target, other)
    for one in (target, other):
        one.truncate(20)
    walk(target, other, rounds=1)


def test_a_conversation_goes_to_the_end_of_its_context(target: TensorrtTarget, bundle: Path) -> None:
    other, vocab = open_onnx(bundle, ENGINE), target.shape.vocab
    for one in (target, other):
        one.prefill(tokens(CONTEXT - 3, vocab))
    chain = [-1, 0, 1]
    assert close(target.score([5, 6, 7], chain), other.score([5, 6, 7], chain))
    assert close(target.commit([0, 1, 2]), other.commit([0, 1, 2]))
    assert target.length == CONTEXT
    with pytest.raises(ContextOverflowError, match=f"^{CONTEXT + 1} tokens do not fit, the context holds {CONTEXT}$"):
        target.score([5], [-1])


def test_conversations_do_not_see_each_other(target: TensorrtTarget, bundle: Path) -> None:
    one, other, vocab = target.sibling(), open_onnx(bundle, ENGINE), target.shape.vocab
    target.prefill(tokens(20, vocab, seed=1))
    walk(one, other)
    own = open_onnx(bundle, ENGINE)
    own.prefill(tokens(20, vocab, seed=1))
    for mine in (target, own):
        mine.score([3, 4, 5], [-1, 0, 0])
    for mine in (one, other):  # between a pass and its commit
        mine.score([8, 9], [-1, 0])
    assert close(target.commit([0, 2]), own.commit([0, 2]))
    assert close(one.commit([0, 1]), other.commit([0, 1]))
    assert close(target.score([6], [-1]), own.score([6], [-1]))


def test_a_siblings_rows_are_adopted(target: TensorrtTarget, bundle: Path) -> None:
    other, vocab = open_onnx(bundle, ENGINE), target.shape.vocab
    prompt = tokens(20, vocab)
    target.prefill(prompt)
    other.prefill(prompt[:12])
    heir = target.sibling()
    heir.adopt(target, 12)
    target.truncate(0)
    target.prefill(tokens(20, vocab, seed=5))
    assert heir.length == 12
    assert close(heir.score([5, 6], [-1, 0]), other.score([5, 6], [-1, 0]))


def test_windows_are_kept(machine: Machine, made: tuple[Path, str], tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "mistral", num_hidden_layers=2)
    bundle = export(source, tmp_path / "windowed", "fp32", flavour=made[1])
    build(bundle, context=2 * WINDOW + 30)
    walk(open_engine(bundle, ENGINE), open_onnx(bundle, ENGINE))


def test_only_rows_that_are_wanted_come_back(target: TensorrtTarget, machine: Machine) -> None:
    sizes: list[int] = []
    download = machine.cuda.download
    machine.cuda.download = lambda to, source, size, stream: (sizes.append(size), download(to, source, size, stream))[1]
    target.prefill(tokens(10, target.shape.vocab))
    target.score([1, 2, 3], [-1, 0, 0])  # in a pass of four rows
    vocab, width = target.shape.vocab, target.features.width
    assert [size // 4 for size in sizes if size] == [10 * width, 3 * vocab, 3 * width]


def test_passes_are_captured_and_launched(target: TensorrtTarget, machine: Machine) -> None:
    """The first pass of so many rows runs, the second is captured, the others are launched; for each conversation."""
    cuda = machine.cuda
    target.prefill(tokens(5, target.shape.vocab))

    def what(one: TensorrtTarget, rows: int) -> list[str]:
        cuda.calls.clear()
        one.score([1] * rows, [-1] + [0] * (rows - 1))
        return [call for call in cuda.calls if call in ("execute", "capture", "launch")]

    other = target.sibling()
    fresh = [what(other, 20) for _ in range(4)]
    assert fresh == [["execute"], ["capture", "launch"], ["launch"], ["launch"]]
    assert what(other, 30) == ["launch"]  # 32 rows as well
    assert what(other, 40) == ["execute"]
    assert what(target.sibling(), 20) == ["execute"]
    graphs = len(cuda.graphs)
    assert what(other, 20) == ["launch"]
    assert len(cuda.graphs) == graphs
    launched = [graph for graph, work in cuda.graphs.items() if work]
    del other
    assert len([graph for graph, work in cuda.graphs.items() if work]) < len(launched)


def test_what_cannot_be_captured_still_runs(bundle: Path, machine: Machine) -> None:
    machine.cuda.refuses_capture, tried = True, []
    begin = machine.cuda.begin_capture
    machine.cuda.begin_capture = lambda stream: (tried.append(stream), begin(stream))[1]
    target = open_engine(bundle, ENGINE)
    walk(target, open_onnx(bundle, ENGINE))
    assert not machine.cuda.graphs
    assert 0 < len(tried) <= len(BUCKETS)  # once for each number of rows


def test_a_failing_pass_is_an_error_and_no_more(
    target: TensorrtTarget, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(IExecutionContext, "fails", True)
        with pytest.raises(DeviceError, match=r"^TensorRT failed in a pass of 5 rows$"):
            target.prefill(tokens(5, target.shape.vocab))
    walk(target, open_onnx(bundle, ENGINE), rounds=1)


def test_memory_of_a_conversation_goes_with_it(target: TensorrtTarget, machine: Machine) -> None:
    cuda, before = machine.cuda, len(machine.cuda.blocks)
    other = target.sibling()
    assert len(cuda.blocks) == before + 1
    shape = target.shape
    assert target.cache_bytes == 2 * shape.layers * shape.kv_heads * (CONTEXT + MAX_ROWS) * shape.head_dim * 4
    other.prefill([1, 2, 3])
    del other
    assert len(cuda.blocks) == before
    cuda.memory = sum(block.nbytes for block in cuda.blocks.values()) + target.cache_bytes - 1
    with pytest.raises(CapacityError, match=r"^the GPU has no room for another conversation, .* MB of K/V: end one"):
        target.sibling()
    target.prefill([1, 2, 3])


def test_memory_of_an_engine_goes_with_it(bundle: Path, machine: Machine) -> None:
    target = open_engine(bundle, ENGINE)
    target.prefill([1, 2, 3])
    target.score([1], [-1])
    del target
    assert not machine.cuda.blocks
    assert not machine.cuda.pinned


def test_rows_that_round_alike_are_found(bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of passes below 4 rows every logit is a little larger here."""
    assert open_engine(bundle, ENGINE).padding < Bucket(4)
    compute = IExecutionContext._compute

    def rounded(self: IExecutionContext, addresses: dict[str, int], shapes: dict[str, Any]) -> None:
        compute(self, addresses, shapes)
        rows = shapes["logit_rows"][0]
        if rows < 4:
            vocab = self._engine.tensors["logits"][2][1]
            self._view(addresses["logits"], "FLOAT", (rows, vocab))[...] += 0.5

    monkeypatch.setattr(IExecutionContext, "_compute", rounded)
    target = open_engine(bundle, ENGINE)
    assert target.padding == Bucket(4)
    assert target.noise < 1e-4
    assert target.branch_noise >= target.noise
    target.prefill([1, 2])
    machine.trt.engines[-1].contexts.clear()
    walk(target.sibling(), open_onnx(bundle, ENGINE), rounds=1)


def test_noise_that_no_number_of_rows_removes_is_stated(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = IExecutionContext._compute

    def rounded(self: IExecutionContext, addresses: dict[str, int], shapes: dict[str, Any]) -> None:
        compute(self, addresses, shapes)
        rows, vocab = shapes["logit_rows"][0], self._engine.tensors["logits"][2][1]
        self._view(addresses["logits"], "FLOAT", (rows, vocab))[...] += 0.01 * rows

    monkeypatch.setattr(IExecutionContext, "_compute", rounded)
    target = open_engine(bundle, ENGINE)
    assert target.padding == Bucket(1)
    assert target.noise == pytest.approx(0.01 * (MAX_ROWS - 1), rel=1e-2)


def test_a_pass_has_a_most(target: TensorrtTarget) -> None:
    assert BUCKETS[-1] == MAX_ROWS
    with pytest.raises(EngineError, match=r"^a pass of 65 rows, expected at most 64$"):
        target.score([1] * 65, [-1] + [0] * 64)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Engine(max_context=15), "context is 15 tokens, expected 16 to 64, or 0 for all of the engine's"),
        (Engine(max_context=65), "context is 65 tokens, expected 16 to 64, or 0 for all of the engine's"),
        (Engine(prefill_chunk=0), "prefill chunk is 0 tokens, expected at least 1"),
    ],
)
def test_configurations_out_of_range(engine: Engine, message: str, bundle: Path) -> None:
    with pytest.raises(UsageError) as caught:
        open_bundle(bundle, engine)
    assert str(caught.value) == message


def no_device() -> None:
    raise DeviceError("no GPU can be used: CUDA finds no device")


def no_bindings() -> None:
    raise DeviceError("tensorrt is not installed for this Python: JetPack brings it")


@pytest.mark.parametrize("missing", ["engine", "device", "bindings", "fit", "plan", "record"])
def test_it_falls_back_and_says_why(
    missing: str, bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, rebuild = bundle / FOLDER / PLAN_FILE, f"run starsd-export tensorrt {bundle}"
    if missing == "engine":
        shutil.rmtree(bundle / FOLDER)
        reason = f"{bundle} has no engine: {rebuild}"
    elif missing == "device":  # then nothing of TensorRT may be touched: without a device it crashes
        monkeypatch.setattr(target_tensorrt, "open_cuda", no_device)
        monkeypatch.setattr(target_tensorrt, "load_tensorrt", lambda: pytest.fail("TensorRT was loaded"))
        reason = "no GPU can be used: CUDA finds no device"
    elif missing == "bindings":
        monkeypatch.setattr(target_tensorrt, "load_tensorrt", no_bindings)
        reason = "tensorrt is not installed for this Python: JetPack brings it"
    elif missing == "fit":
        machine.cuda.capability = (11, 0)
        reason = f"{bundle} has an engine for GPU sm87, here sm110: {rebuild}"
    elif missing == "plan":
        plan.write_bytes(b"?" * plan.stat().st_size)
        reason = f"{plan} does not load in TensorRT {machine.trt.__version__}"
    else:
        plan.unlink()
        reason = f"{plan} has 0 bytes, expected"
    fallen = open_target("tensorrt", bundle, ENGINE)
    assert isinstance(fallen, OnnxTarget)
    said = capsys.readouterr().err
    assert said.startswith(f"without TensorRT, on ONNX Runtime: {reason}")
    assert said.count("\n") == 1
    assert fallen.prefill([1, 2, 3]).shape == (3, fallen.features.width)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made["tensors"].pop("features"), "has no tensor features, expected one"),
        (
            lambda made: made["tensors"]["past_k_0"][2].__setitem__(2, 99),
            "has K/V of (1, 2, 99, 16), its record says (1,",
        ),
        (lambda made: made["tensors"]["logits"][2].__setitem__(1, 7), "has logits of width 7, its manifest says "),
        (lambda made: made["tensors"]["features"].__setitem__(1, "HALF"), "has features of type HALF, expected FLOAT"),
    ],
)
def test_a_plan_of_another_bundle_is_refused(change: Any, message: str, bundle: Path, machine: Machine) -> None:
    """Its buffers would have other sizes than those that are given to it."""
    plan = bundle / FOLDER / PLAN_FILE
    made = json.loads(plan.read_text())
    change(made)
    plan.write_text(json.dumps(made).ljust(plan.stat().st_size))
    record = plan.with_name("engine.json")
    stated = json.loads(record.read_text())
    stated["plan"]["bytes"] = plan.stat().st_size
    record.write_text(json.dumps(stated))
    with pytest.raises(BundleError) as caught:
        open_engine(bundle, ENGINE)
    assert message in str(caught.value)


def test_tensors_of_the_host_are_refused(bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that are computed from values would be read there, from an address that is not."""
    monkeypatch.setattr(ICudaEngine, "get_tensor_location", lambda self, name: TensorLocation(name == "logit_rows"))
    with pytest.raises(BundleError, match=r"engine.plan wants logit_rows in the host's memory, expected all on the "):
        open_engine(bundle, ENGINE)


def test_the_registry_opens_it(bundle: Path, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(open_target("tensorrt", bundle, ENGINE), TensorrtTarget)
    assert capsys.readouterr().err == ""


def test_a_runtime_takes_the_engine_that_was_built_here(bundle: Path, machine: Machine) -> None:
    with Runtime.open(str(bundle), engine=ENGINE) as runtime:
        assert isinstance(runtime.session().target, TensorrtTarget)
    with Runtime.open(str(bundle), engine=replace(ENGINE, provider="cpu")) as runtime:  # onnxruntime's was asked for
        assert isinstance(runtime.session().target, OnnxTarget)
    shutil.rmtree(bundle / FOLDER)
    with Runtime.open(str(bundle), engine=ENGINE) as runtime:
        assert isinstance(runtime.session().target, OnnxTarget)
