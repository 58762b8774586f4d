"""`starsd-export tensorrt` with a stand-in for TensorRT and the GPU: what is built, kept, refused and left behind."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
from fake_tensorrt_build import ILogger, Severity
from tensorrt_helpers import CHUNK, CONTEXT, Machine, build, stand_in
from tiny_model import export, write_folder

from starsd.export import tensorrt_engine
from starsd.export.cli import main
from starsd.export.tensorrt_engine import Options, export_tensorrt
from starsd.shared.errors import BundleError, DeviceError, UsageError
from starsd.shared.manifest import GRAPH_FILE
from starsd.shared.tensorrt_key import FOLDER, MAX_ROWS, PLAN_FILE, read_record

LAYERS = 2


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("tensorrt")
    source = write_folder(place / "source", num_hidden_layers=LAYERS)
    made = {f"{f}-{p}": (f, p) for f in ("portable", "decomposed") for p in ("fp16", "fp32")} | {"ort": ("ort", "int8")}
    return {name: export(source, place / name, p, flavour=f) for name, (f, p) in made.items()}


@pytest.fixture
def bundle(bundles: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundles["portable-fp16"], tmp_path / "bundle"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, starsd_home: Path) -> Machine:
    return stand_in(monkeypatch)


def plan(bundle: Path) -> dict[str, object]:
    return json.loads((bundle / FOLDER / PLAN_FILE).read_text())  # type: ignore[no-any-return]


def test_an_engine_is_built_for_this_machine(bundle: Path, machine: Machine) -> None:
    report = build(bundle)
    assert (report.built, report.why, report.context) == (True, [], CONTEXT)
    assert (report.tensorrt, report.l4t, report.gpu) == ("10.16.2.10", "39.2.0", "sm87")
    record = read_record(bundle)
    assert record is not None
    assert record.plan.bytes == report.bytes == (bundle / FOLDER / PLAN_FILE).stat().st_size
    made = plan(bundle)
    reading, trees = made["profiles"]  # type: ignore[misc]
    capacity = CONTEXT + MAX_ROWS
    assert reading["mask"] == [[1, 1, 1, capacity], [1, 1, CHUNK, capacity], [1, 1, CHUNK, capacity]]
    assert reading["logit_rows"] == [[1], [1], [1]]
    assert trees["input_ids"] == trees["logit_rows"] == [[1], [8], [MAX_ROWS]]
    assert made["tensors"]["past_v_1"][2] == [1, 2, capacity, 16]  # type: ignore[index]
    assert sorted(path.name for path in (bundle / FOLDER).iterdir()) == ["engine.json", "engine.plan"]


def test_decomposed_for_an_older_one(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, "10.3.0.30")
    bundle = Path(shutil.copytree(bundles["decomposed-fp16"], tmp_path / "bundle"))
    assert build(bundle).built
    _, trees = plan(bundle)["profiles"]  # type: ignore[misc]
    capacity = CONTEXT + MAX_ROWS
    assert trees["mask"] == [[1, 1, rows, capacity + rows] for rows in (1, 8, MAX_ROWS)]


def test_an_engine_that_fits_is_kept(bundle: Path, machine: Machine) -> None:
    build(bundle)
    built = (bundle / FOLDER / PLAN_FILE).stat().st_ino
    assert not build(bundle).built
    assert (bundle / FOLDER / PLAN_FILE).stat().st_ino == built
    report = export_tensorrt(str(bundle), Options(context=CONTEXT, chunk=CHUNK, rebuild=True))
    assert (report.built, report.why) == (True, [])
    assert (bundle / FOLDER / PLAN_FILE).stat().st_ino != built


def test_one_that_does_not_fit_is_built_again(bundle: Path, machine: Machine) -> None:
    said: list[str] = []
    build(bundle)
    machine.cuda.capability, machine.l4t = (11, 0), "39.3.0"
    report = export_tensorrt(str(bundle), Options(context=CONTEXT, chunk=CHUNK), say=said.append)
    assert (report.built, report.why) == (True, ["L4T 39.2.0, here 39.3.0", "GPU sm87, here sm110"])
    assert said[0] == "building again: L4T 39.2.0, here 39.3.0; GPU sm87, here sm110"
    assert report.gpu == "sm110"
    (bundle / FOLDER / PLAN_FILE).write_bytes(b"short")
    export_tensorrt(str(bundle), Options(context=CONTEXT, chunk=CHUNK), say=said.append)
    assert any("engine.plan has 5 bytes, expected" in line for line in said)
    assert not build(bundle).built


def test_memory_is_forecast(bundle: Path, machine: Machine) -> None:
    said: list[str] = []
    weights = sum((bundle / name).stat().st_size for name in (GRAPH_FILE, GRAPH_FILE + ".data"))
    machine.memory = 3 * weights - 1
    with pytest.raises(DeviceError, match=r"^building takes .* to .* of memory, .* are available, .* on the GPU: "):
        export_tensorrt(str(bundle), Options(context=CONTEXT))
    assert not (bundle / FOLDER).exists()
    machine.memory += 1
    report = export_tensorrt(str(bundle), Options(context=CONTEXT), say=said.append)
    assert report.forecast == [3 * weights, 4 * weights]
    assert said[0].startswith("building takes ")
    machine.memory = 0
    assert not export_tensorrt(str(bundle), Options(context=CONTEXT)).built  # nothing is to be built
    assert export_tensorrt(str(bundle), Options(context=CONTEXT, rebuild=True, force=True)).built
    machine.memory, machine.cuda.memory = 1 << 34, weights - 1  # a graphics card's own
    with pytest.raises(DeviceError, match=r"kB on the GPU: end other programs, add swap space, or try it"):
        export_tensorrt(str(bundle), Options(context=CONTEXT, rebuild=True))


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("ort", "10.16.2.10", "is of flavour ort, TensorRT 10.16.2.10 takes portable: run starsd-export onnx "),
        ("ort", "10.3.0.30", "is of flavour ort, TensorRT 10.3.0.30 takes decomposed: run starsd-export onnx "),
        ("portable-fp16", "10.14.1", "is of flavour portable, TensorRT 10.14.1 takes decomposed: run "),
        ("decomposed-fp16", "11.4.0", "is of flavour decomposed, TensorRT 11.4.0 takes portable: run "),
        ("portable-fp32", "10.15.0", "is in fp32, which TensorRT's attention does not compute: run "),
    ],
)
def test_other_flavours_are_refused(
    name: str, version: str, words: str, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, version)
    with pytest.raises(UsageError) as caught:
        build(bundles[name])
    assert words in str(caught.value)
    assert "--flavour" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(context=15), "context is 15, expected 16 to 512 tokens, or 0 to choose"),
        (Options(context=513), "context is 513, expected 16 to 512 tokens, or 0 to choose"),
        (Options(chunk=63), "chunk is 63 tokens, expected 64 to 4096"),
    ],
)
def test_options_out_of_range(options: Options, message: str, bundle: Path, machine: Machine) -> None:
    with pytest.raises(UsageError) as caught:
        export_tensorrt(str(bundle), options)
    assert str(caught.value) == message


def test_a_bundle_goes_by_its_name_too(bundle: Path, machine: Machine, starsd_home: Path) -> None:
    place = starsd_home / "bundles" / "tiny" / "portable-fp16"
    place.parent.mkdir(parents=True)
    shutil.move(bundle, place)
    assert export_tensorrt("tiny/portable-fp16", Options()).context == 512  # the model's own
    with pytest.raises(UsageError, match=r"^bundle 'tiny/ort-fp16' is unknown, expected a bundle's folder or a name"):
        export_tensorrt("tiny/ort-fp16", Options())


def test_weights_that_changed_are_not_vouched_for(bundle: Path, machine: Machine) -> None:
    weights = bundle / (GRAPH_FILE + ".data")
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BundleError, match="its SHA-256 differs from the manifest's"):
        build(bundle)


def test_what_tensorrt_says_is_passed_on(bundle: Path, machine: Machine) -> None:
    machine.trt.OnnxParser.fails = True
    with pytest.raises(BundleError) as caught:
        build(bundle)
    assert str(caught.value).endswith(
        "does not parse in TensorRT 10.16.2.10: No importer registered for op: Strange (at Strange strange_0)"
    )
    machine.trt.OnnxParser.fails = False

    def fail(logger: ILogger) -> None:
        logger.log(Severity.ERROR, "no\nkernel")
        logger.log(Severity.WARNING, "and a warning")

    machine.trt.Builder.fails = staticmethod(fail)
    with pytest.raises(BundleError, match=r"does not build in TensorRT 10.16.2.10: no kernel$"):
        build(bundle)
    assert not (bundle / FOLDER).exists()


def test_progress_is_that_of_the_outermost_phase(bundle: Path, machine: Machine) -> None:
    seen: list[tuple[str, int, int]] = []
    export_tensorrt(str(bundle), Options(), lambda *step: seen.append(step))
    assert seen == [("building: building engine", done, 3) for done in range(4)]
    del machine.trt.IProgressMonitor  # as in older versions
    assert export_tensorrt(str(bundle), Options(rebuild=True)).built


def test_an_interrupt_ends_the_build(bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives while TensorRT builds; what was there stays, and nothing is left behind."""
    build(bundle)
    before = (bundle / FOLDER / PLAN_FILE).read_bytes()
    reached, go_on, steps = threading.Event(), threading.Event(), []

    def wait_in_the_middle() -> None:
        reached.set()
        assert go_on.wait(5)

    class Interrupted:
        """A thread whose result is waited for in vain."""

        def __init__(self, *_: object) -> None:
            self._done = threading.Event()

        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, call: object, *args: object) -> Interrupted:
            self._thread = threading.Thread(target=lambda: steps.append(call(*args)))  # type: ignore[operator]
            self._thread.start()
            return self

        def result(self) -> object:
            assert reached.wait(5)
            raise KeyboardInterrupt

    def wait(running: list[Interrupted]) -> None:
        go_on.set()
        running[0]._thread.join(5)

    from starsd.export import tensorrt_builder

    machine.trt.Builder.during = staticmethod(wait_in_the_middle)
    monkeypatch.setattr(tensorrt_builder, "ThreadPoolExecutor", Interrupted)
    monkeypatch.setattr(tensorrt_builder, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        export_tensorrt(str(bundle), Options(context=CONTEXT, chunk=CHUNK, rebuild=True))
    assert steps == [None]  # it ended before its end, without a plan
    assert (bundle / FOLDER / PLAN_FILE).read_bytes() == before
    assert not list(bundle.glob(".staged-*"))


def test_the_timing_cache_is_kept(bundle: Path, machine: Machine, starsd_home: Path) -> None:
    kept = starsd_home / "tensorrt" / "timing-10.16.2.10-sm87.cache"
    build(bundle)
    assert kept.read_bytes() == b"+tactics"
    export_tensorrt(str(bundle), Options(rebuild=True))
    assert kept.read_bytes() == b"+tactics+tactics"
    kept.write_bytes(b"of another version")
    export_tensorrt(str(bundle), Options(rebuild=True))
    assert kept.read_bytes() == b"+tactics"


def test_without_a_gpu_nothing_of_tensorrt_is_touched(
    bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise DeviceError("no GPU can be used: the CUDA runtime, libcudart.so, is not installed")

    machine.trt.Builder = None
    monkeypatch.setattr(tensorrt_engine, "load_cudart", none)
    with pytest.raises(DeviceError, match=r"^no GPU can be used: the CUDA runtime, libcudart.so, is not installed$"):
        build(bundle)


def test_the_command(bundle: Path, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tensorrt", str(bundle), "--context", "64"]
    assert main([*argv, "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert (report["built"], report["context"]) == (True, 64)
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(bundle / FOLDER)
    assert err.endswith("for sm87 and TensorRT 10.16.2.10, fits as it is\n")
    assert main([*argv, "--rebuild"]) == 0
    assert "building takes" in (told := capsys.readouterr().err)
    assert "building: building engine done" in told
    assert "built in" in told
    assert main(["tensorrt", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("starsd-export: bundle 'nothing' is unknown, expected a bundle's folder")
