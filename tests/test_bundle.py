"""From a reference to a bundle: what is there is used, a child exports what is missing, failures are one line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from starsd.edge import bundle
from starsd.edge.bundle import ensure_bundle
from starsd.shared import manifest
from starsd.shared.config import DEFAULT_PRECISION
from starsd.shared.errors import BundleError, MissingExtraError, ModelError, OutdatedBundleError, UsageError
from starsd.shared.home import parse_ref
from starsd.shared.manifest import FeatureSpec, Manifest, ModelShape

TICK = 0.02  # seconds: further apart than the times that a file system keeps

WRITE = """
import sys; from pathlib import Path; sys.path.insert(0, {tests!r})
from test_bundle import write_bundle
from starsd.shared.home import parse_ref
write_bundle(parse_ref({model!r}).bundle("ort", {precision!r}), {precision!r})
"""


def write_bundle(folder: Path, precision: str = "int4") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    for name in manifest.NEEDED_FILES[1:]:
        (folder / name).write_bytes(b"")
    manifest.write(
        Manifest(
            name="tiny",
            source="tiny",
            fingerprint="0",
            architecture="llama",
            flavour="ort",
            precision=precision,
            shape=ModelShape(1, 1, 1, 1, 1, 1, 64),
            features=FeatureSpec((), True, 1),
            eos=(1,),
            quality=manifest.Quality(0.01, 0.95, 1000) if precision == "int4" else None,
            files={name: manifest.entry(folder / name) for name in manifest.NEEDED_FILES},
        ),
        folder,
    )
    return folder


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[str]]]:
    """Puts a script in the exporter's place; gives the argument lists it was called with."""
    calls: list[list[str]] = []

    def use(script: str) -> list[list[str]]:
        original = subprocess.Popen

        def popen(argv: list[str], **options: object) -> object:
            calls.append(argv)
            return original([sys.executable, "-c", script], **options)  # type: ignore[call-overload]

        monkeypatch.setattr(bundle.subprocess, "Popen", popen)
        return calls

    return use


def test_a_bundle_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b", "int8")
    assert ensure_bundle(str(folder)) == ensure_bundle(str(folder), "int8") == folder
    with pytest.raises(BundleError, match=r"b is a bundle in int8, expected int4$"):
        ensure_bundle(str(folder), "int4")
    (folder / "model.onnx").write_bytes(b"gra")
    with pytest.raises(BundleError, match=r"model.onnx has 3 bytes, expected 5$"):
        ensure_bundle(str(folder))


def test_a_bundle_at_home_is_found_and_checked(starsd_home: Path, exporter: Callable[[str], list[list[str]]]) -> None:
    calls = exporter("raise SystemExit(9)")
    default = write_bundle(starsd_home / "bundles" / "smollm2-135m" / f"ort-{DEFAULT_PRECISION}", DEFAULT_PRECISION)
    other = write_bundle(starsd_home / "bundles" / "smollm2-135m" / "ort-fp32", "fp32")
    assert (ensure_bundle("smollm2-135m"), ensure_bundle("smollm2-135m", "fp32")) == (default, other)
    (default / "model.onnx").unlink()
    with pytest.raises(BundleError, match=r"model.onnx is missing, expected 5 bytes$"):
        ensure_bundle("smollm2-135m")
    assert calls == []


def test_a_bundle_at_home_goes_by_its_name(starsd_home: Path, exporter: Callable[[str], list[list[str]]]) -> None:
    calls = exporter("raise SystemExit(9)")
    folder = write_bundle(starsd_home / "bundles" / "smollm2-135m" / "portable-fp32", "fp32")
    assert ensure_bundle("smollm2-135m/portable-fp32") == folder
    with pytest.raises(BundleError, match=r"portable-fp32 is a bundle in fp32, expected int8$"):
        ensure_bundle("smollm2-135m/portable-fp32", "int8")
    with pytest.raises(UsageError, match=r"^bundle smollm2.* is not here, .* --flavour portable --precision int4"):
        ensure_bundle("smollm2-135m/portable-int4")
    assert calls == []


def test_a_missing_bundle_is_exported_first(
    starsd_home: Path, exporter: Callable[[str], list[list[str]]], capfd: pytest.CaptureFixture[str]
) -> None:
    script = WRITE.format(tests=str(Path(__file__).parent), model="hf:some/model", precision="int8")
    calls = exporter(script + "print('to stdout', flush=True); print('to stderr', file=sys.stderr)")
    folder = ensure_bundle("hf:some/model", "int8")
    assert folder == starsd_home / "bundles" / "some--model" / "ort-int8"
    assert calls == [[sys.executable, "-m", "starsd.export.cli", "onnx", "hf:some/model", "--precision", "int8"]]
    out, err = capfd.readouterr()
    assert out == ""  # that is where the answers go
    assert sorted(err.splitlines()) == ["to stderr", "to stdout"]
    assert ensure_bundle("hf:some/model", "int8") == folder
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('x\\nstarsd-export: no such model\\n', file=sys.stderr)", "no such model"),
        ("pass", "exit status 3"),
    ],
)
def test_a_failed_export_is_one_line(
    starsd_home: Path, exporter: Callable[[str], list[list[str]]], script: str, reason: str
) -> None:
    exporter(f"import sys; {script}; raise SystemExit(3)")
    with pytest.raises(ModelError, match=f"^hf:a/b could not be exported as {DEFAULT_PRECISION}: {reason}$"):
        ensure_bundle("hf:a/b")


def test_an_exporter_that_leaves_nothing_is_found_out(
    starsd_home: Path, exporter: Callable[[str], list[list[str]]]
) -> None:
    exporter("pass")
    with pytest.raises(BundleError, match=r"is no bundle: manifest.json is missing"):
        ensure_bundle("hf:a/b")


def test_a_bundle_of_another_version_is_exported_again(
    starsd_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    exporter: Callable[[str], list[list[str]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = outdated(starsd_home / "bundles" / "some--model" / "ort-int8")
    calls = exporter(
        f"import shutil; shutil.rmtree({str(folder)!r})\n"
        + WRITE.format(tests=str(Path(__file__).parent), model="hf:some/model", precision="int8")
    )
    with pytest.raises(OutdatedBundleError, match=r"has format 1, expected 2: export the model again$"):
        ensure_bundle(str(folder))  # named as a folder it is somebody's own
    with monkeypatch.context() as without:
        without.setattr(bundle, "find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=r"^hf:some/model has only a bundle of another version of starsd"):
            ensure_bundle("hf:some/model", "int8")
    assert calls == []
    assert ensure_bundle("hf:some/model", "int8") == folder
    assert manifest.read(folder).format == manifest.FORMAT
    assert len(calls) == 1
    assert "has format 1, expected 2: export the model again, which begins now" in capfd.readouterr().err


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    time.sleep(TICK)
    return folder


def remake(model: Path) -> tuple[str, Path]:
    """A script that exports as the exporter would, and where to."""
    folder = parse_ref(str(model)).bundle("ort", "int8")
    write = WRITE.format(tests=str(Path(__file__).parent), model=str(model), precision="int8")
    return f"import shutil; shutil.rmtree({str(folder)!r})\n{write}", folder


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "b.safetensors"]
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_folder_that_changed_is_exported_again(
    name: str,
    kept: bool,
    model_folder: Path,
    starsd_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    exporter: Callable[[str], list[list[str]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also when the new file keeps an old date, as `cp -p` and `mv` leave it."""
    script, folder = remake(model_folder)
    calls = exporter(script)
    write_bundle(folder, "int8")
    (model_folder / "notes.txt").write_text("of no interest")
    assert ensure_bundle(str(model_folder), "int8") == folder
    time.sleep(TICK)
    (model_folder / name).write_text("[]")
    if kept:
        os.utime(model_folder / name, (10**9, 10**9))
    with monkeypatch.context() as without:
        without.setattr(bundle, "find_spec", lambda name: None)
        with pytest.raises(
            MissingExtraError, match=rf"m has only a bundle here that is older than its {name} and onnx "
        ):
            ensure_bundle(str(model_folder), "int8")
    assert calls == []
    capfd.readouterr()
    for _ in range(2):
        time.sleep(TICK)
        assert ensure_bundle(str(model_folder), "int8") == folder
    assert len(calls) == 1
    told = f"{model_folder / name} is newer than its bundle: export the model again, which begins now\n"
    assert capfd.readouterr().err == told


def test_a_date_to_come_is_no_reason_to_export(
    model_folder: Path, starsd_home: Path, exporter: Callable[[str], list[list[str]]]
) -> None:
    """Else every start would: no bundle is newer than a file of a clock that was wrong."""
    script, folder = remake(model_folder)
    calls = exporter(script)
    later = time.time() + 1e6
    os.utime(model_folder / "config.json", (later, later))
    time.sleep(TICK)
    write_bundle(folder, "int8")
    assert ensure_bundle(str(model_folder), "int8") == folder
    assert calls == []


def test_a_link_to_another_file_counts_as_a_change(
    model_folder: Path, starsd_home: Path, exporter: Callable[[str], list[list[str]]]
) -> None:
    script, folder = remake(model_folder)
    calls = exporter(script)
    (model_folder.parent / "blob").write_text("[]")  # as old as the model
    time.sleep(TICK)
    write_bundle(folder, "int8")
    assert ensure_bundle(str(model_folder), "int8") == folder
    assert calls == []
    time.sleep(TICK)
    (model_folder / "model.safetensors").unlink()
    (model_folder / "model.safetensors").symlink_to(model_folder.parent / "blob")
    ensure_bundle(str(model_folder), "int8")
    assert len(calls) == 1


def outdated(folder: Path) -> Path:
    path = write_bundle(folder, "int8") / manifest.FILE_NAME
    path.write_text(path.read_text().replace(f'"format": {manifest.FORMAT}', '"format": 1'))
    return folder


def test_without_the_export_extra_it_says_where_to_export(
    starsd_home: Path, monkeypatch: pytest.MonkeyPatch, exporter: Callable[[str], list[list[str]]]
) -> None:
    calls = exporter("raise SystemExit(9)")
    monkeypatch.setattr(bundle, "find_spec", lambda name: None if name == "onnx" else object())
    with pytest.raises(MissingExtraError) as caught:
        ensure_bundle("smollm2-135m", "int8")
    assert str(caught.value) == (
        "smollm2-135m has no bundle here and onnx is not installed: run pip install 'starsd[export]', or run "
        "starsd-export onnx smollm2-135m --precision int8 on another machine and give its folder as --model"
    )
    assert (caught.value.module, caught.value.extra, calls) == ("onnx", "export", [])


def test_unknown_names_are_refused(starsd_home: Path) -> None:
    with pytest.raises(UsageError, match="precision is 'int3', expected one of fp32, fp16, int8, int4"):
        ensure_bundle("smollm2-135m", "int3")
    with pytest.raises(UsageError, match="model 'nothing' is unknown"):
        ensure_bundle("nothing")


def test_folders_that_are_neither_bundle_nor_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has neither manifest.json nor config.json, expected a bundle or a model$"):
        ensure_bundle(str(tmp_path))
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"has model.onnx and no manifest.json, expected the whole folder"):
        ensure_bundle(str(tmp_path))
