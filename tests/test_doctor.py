"""The doctor sees what is there, names a remedy for each problem, and fails only when something is broken."""

from __future__ import annotations

import json
import re
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from test_bundle import outdated, write_bundle
from tiny_session import ToyTarget

from starsd.edge.telemetry_look import LACKING, Look
from starsd.edge.telemetry_reading import Reading
from starsd.scripts import doctor as module
from starsd.scripts.cli import main
from starsd.scripts.doctor import EXTRAS, WHY, cpu_features, examine, has
from starsd.shared.config import DEFAULT_PRECISION, PRECISIONS, Engine

SENSORS = Look(
    reading=Reading(
        source="sysfs+proc",
        power_w=7.42,
        power_of="board",
        temperature_c=53.5,
        throttled=False,
        memory_used=2_600_000_000,
        memory_total=7_800_000_000,
        cpu_load=0.25,
    ),
    missing={"gpu_load": "no GPU in /sys/class/devfreq; jtop: jetson-stats is not installed"},
)


def problems(model: str | None = None) -> list[tuple[str, str, bool]]:
    return [(problem.problem, problem.remedy, problem.broken) for problem in examine(model).problems]


@pytest.fixture(autouse=True)
def _ample(monkeypatch: pytest.MonkeyPatch, starsd_home: Path) -> None:
    """A machine with room, whatever this one has."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(50_000_000_000))
    monkeypatch.setattr(module, "meminfo", lambda: {"MemTotal": 8_000_000_000, "MemAvailable": 6_000_000_000})
    monkeypatch.setattr(module, "cpu_features", lambda: ["avx2", "avx_vnni"])
    monkeypatch.setattr(module, "take_a_look", lambda: SENSORS)


def test_json_is_one_object_and_changes_nothing(starsd_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["home"] == str(starsd_home)
    assert not starsd_home.exists()
    assert found["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert found["default_precision"] == DEFAULT_PRECISION
    assert found["default_precision_why"] == WHY[DEFAULT_PRECISION]
    assert found["cores"] >= 1
    assert found["problems"] == []
    assert found["versions"]["numpy"]
    assert found["disk_free"] == 50_000_000_000


def test_sensors_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sensors"]
    assert (found["reading"]["power_w"], found["reading"]["gpu_load"]) == (7.42, None)
    assert found["missing"] == SENSORS.missing
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("sensors      sysfs+proc")
    assert lines[first + 1 : first + 6] == [
        "power        7.4 W of the board",
        "temperature  53.5 °C at the hottest sensor",
        "throttled    no",
        "memory used  2.6 of 7.8 GB",
        "gpu load     none: no GPU in /sys/class/devfreq; jtop: jetson-stats is not installed",
    ]
    monkeypatch.setattr(module, "take_a_look", lambda: Look(missing=dict.fromkeys(LACKING, "out of luck")))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("sensors      none")
    assert [line[13:] for line in lines[first + 1 : first + 6]] == ["none: out of luck"] * 5


def test_every_precision_has_a_reason() -> None:
    assert set(WHY) == set(PRECISIONS)


def test_the_extras_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for extra, modules in EXTRAS.items():
        wanted = {re.split(r"[\[><=;]", entry)[0].strip() for entry in project["optional-dependencies"][extra]}
        distributions = {"google.protobuf": "protobuf", "zmq": "pyzmq"}
        named = {distributions.get(name, name).replace("_", "-") for name in modules}
        assert named == wanted - {"starsd"}


def test_bundles_are_shown_with_their_quality(starsd_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(starsd_home / "bundles" / "tiny" / "ort-int4")
    write_bundle(starsd_home / "bundles" / "tiny" / "ort-fp32", "fp32")
    assert main(["doctor"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bundle")]
    assert lines == [
        "bundle       tiny/ort-fp32, 0 MB",
        "bundle       tiny/ort-int4, 0 MB, top-1 95.0 % and KL 0.0100 against fp32",
    ]


def test_a_damaged_bundle_is_broken(starsd_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_bundle(starsd_home / "bundles" / "tiny" / "ort-int4")
    (folder / "model.onnx").unlink()
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("BROKEN       ")
    assert last.endswith(
        "model.onnx is missing, expected 5 bytes: starsd models rm tiny/ort-int4, then export it again"
    )


def test_a_bundle_of_another_version_is_not_broken(starsd_home: Path) -> None:
    outdated(starsd_home / "bundles" / "tiny" / "ort-int8")
    [(problem, remedy, broken)] = [found for found in problems(None) if "format" in found[0]]
    assert problem.endswith("has format 1, expected 2: export the model again")
    assert (remedy, broken) == ("its next use does, or starsd models rm tiny/ort-int8", False)


def test_a_model_may_be_asked_for(starsd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def open_toy(kind: str, folder: Path, config: Engine) -> ToyTarget:
        opened.append(folder)
        return ToyTarget(noise=0.25)

    monkeypatch.setattr(module, "open_target", open_toy)
    assert problems("smollm2-135m") == [
        ("smollm2-135m is not on this machine", "starsd pull smollm2-135m", False),
        (
            f"smollm2-135m has no bundle in {DEFAULT_PRECISION}",
            f"starsd-export onnx smollm2-135m --precision {DEFAULT_PRECISION}",
            False,
        ),
    ]
    bundle = write_bundle(starsd_home / "bundles" / "smollm2-135m" / f"ort-{DEFAULT_PRECISION}", DEFAULT_PRECISION)
    assert problems("smollm2-135m") == problems(str(bundle)) == []
    assert examine("smollm2-135m").noise == 0.25
    assert examine().noise is None
    assert opened == [bundle] * 3
    (bundle / "model.onnx").write_bytes(b"other")  # the same size
    [(problem, _, broken)] = problems("smollm2-135m")
    assert (broken, "is not what was exported: its SHA-256 differs" in problem) == (True, True)
    [(problem, _, broken)] = problems("nonsense")
    assert (broken, problem.startswith("model 'nonsense' is unknown, expected one of")) == (True, True)
    gguf = starsd_home / "a model.gguf"
    gguf.write_bytes(b"GGUF")
    assert problems(str(gguf))[0] == (f"{gguf} is not on this machine", f"starsd pull '{gguf}'", False)
    [(problem, _, broken)] = problems("")
    assert (broken, problem.startswith("model '' is unknown, expected one of")) == (True, True)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has", lambda name: name not in ("onnxruntime", "torch"))
    report = examine()
    assert (report.extras["edge"], report.extras["server"], report.extras["export"]) == (["onnxruntime"], ["torch"], [])
    assert report.onnxruntime_providers is None
    assert problems() == [("the edge cannot run here, it lacks onnxruntime", "pip install 'starsd[edge]'", False)]
    monkeypatch.setattr(module, "has", lambda name: False)
    assert problems() == [("no extra is complete, so that no command can run", "pip install 'starsd[edge]'", True)]


def test_has_imports_nothing() -> None:
    assert has("json")
    assert not has("starsd_nothing")
    assert not has("starsd_nothing.below")
    assert has("turtledemo")
    assert "turtledemo" not in sys.modules


def test_a_broken_onnxruntime_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("libfoo.so: cannot open")

    monkeypatch.setattr(module, "import_module", fail)
    assert ("onnxruntime cannot be imported: libfoo.so: cannot open", "install it again", True) in problems()


def test_a_poor_machine_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(300_000_000))
    monkeypatch.setattr(module, "meminfo", lambda: {"MemTotal": 2_000_000_000, "MemAvailable": 200_000_000})
    monkeypatch.setattr(module, "cpu_features", lambda: ["avx2"])
    monkeypatch.setattr(module, "PYTHONS", ((4, 0), (4, 1)))
    found = problems()
    assert [broken for _, _, broken in found] == [True, False, False, False]
    assert found[0][0].startswith("python is 3.")
    assert found[0][1] == "use 4.0 to 4.1"
    assert found[1][0].startswith("0.3 GB are free below ")
    assert found[2][0] == "0.2 GB of memory are available, smollm2-135m may need 1.0"
    assert found[3] == ("this CPU has no integer dot products: int8 and int4 are slow", "try --precision fp32", False)


def test_a_home_that_is_no_folder_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STARSD_HOME", str(tmp_path / "file"))
    assert problems() == [(f"{tmp_path / 'file'} is not a folder we may write", "set STARSD_HOME to one", True)]


def test_a_graph_that_does_not_load_is_broken(starsd_home: Path) -> None:
    bundle = write_bundle(starsd_home / "bundles" / "tiny" / "ort-int4")
    [(problem, _, broken)] = problems(str(bundle))
    assert (broken, "does not load in onnxruntime" in problem) == (True, True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_vnni amx_int8\n", ["avx2", "avx512_vnni", "amx_int8"]),
        ("Features\t: fp asimd asimddp i8mm\n", ["asimddp", "i8mm"]),
        ("model name : flags\n", []),
    ],
)
def test_cpu_features_of_both_families(tmp_path: Path, content: str, expected: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(content)
    assert cpu_features(tmp_path / "cpuinfo") == expected
    assert cpu_features(tmp_path / "none") == []
