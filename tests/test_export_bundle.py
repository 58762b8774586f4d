"""Bundles appear whole or not at all, twice the same, and say what they are."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_gguf import tiny_gguf
from tiny_model import ENGINE, VOCAB, export, rewrite, write_folder

from starsd.edge.target_onnx import open_bundle
from starsd.export import gguf, staging
from starsd.export.bundle import Options, export_onnx
from starsd.export.graph import GraphWriter
from starsd.export.safetensors_writer import TensorSpec, write_safetensors
from starsd.shared import manifest
from starsd.shared.errors import BundleError, ModelError, StorageError, UnsupportedModelError, UsageError
from starsd.shared.families import read_architecture
from starsd.shared.manifest import GRAPH_FILE, WEIGHTS_FILE, FeatureSpec

FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "manifest.json",
    GRAPH_FILE,
    WEIGHTS_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("export") / "m", eos_token_id=[1, 7])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_twice_is_the_same(source: Path, precision: str, tmp_path: Path) -> None:
    """Also for another process, whose hashes are seeded otherwise."""
    one = export(source, tmp_path / "one", precision, last_hidden=True)
    script = f"""
        from pathlib import Path
        from starsd.export.bundle import Options, export_onnx
        options = Options(precision={precision!r}, last_hidden=True, check=False)
        export_onnx({str(source)!r}, options, Path({str(tmp_path / "two")!r}))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    for name in (GRAPH_FILE, WEIGHTS_FILE, "tokenizer.json", "manifest.json"):
        assert (one / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_what_a_bundle_says_of_itself(source: Path, tmp_path: Path) -> None:
    report = export_onnx(str(source), Options(precision="int8", context=100), tmp_path / "b")
    made = manifest.read(tmp_path / "b", verify=True)
    assert names(tmp_path / "b") == sorted(FILES)
    assert sorted(made.files) == sorted(set(FILES) - {"manifest.json"})
    assert (made.source, made.architecture, made.flavour, made.precision) == (str(source), "llama", "ort", "int8")
    assert (made.shape.context, made.shape.vocab, made.shape.layers) == (100, VOCAB, 7)
    assert made.features == FeatureSpec((2, 3, 4), False, 32)
    assert made.eos == (1, 7)
    assert made.quality == report.quality
    assert made.quality is not None
    assert made.quality.tokens > 100
    assert 0.5 < made.quality.top1 <= 1
    assert made.quality.kl < 0.05
    assert report.bytes == sum((tmp_path / "b" / name).stat().st_size for name in made.files)
    assert report.bundle == str(tmp_path / "b")
    assert report.peak_memory_mb > 10
    assert made.made_by.keys() == {"starsd", "onnx", "numpy"}


def test_fp32_needs_no_comparison_and_it_can_be_left_out(source: Path, tmp_path: Path) -> None:
    assert export_onnx(str(source), Options(precision="fp32"), tmp_path / "a").quality is None
    assert export_onnx(str(source), Options(precision="int4", check=False), tmp_path / "b").quality is None


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_agreement_is_measured_with_the_bundles_own_rope(rope: str, tmp_path: Path) -> None:
    """Where positions turn depends on the context; a reference for a shorter one is another model."""
    source = write_folder(tmp_path / "m", rope, max_position_embeddings=1024)
    quality = export_onnx(str(source), Options(precision="fp16"), tmp_path / "b").quality
    assert quality is not None
    assert quality.top1 > 0.95


def test_agreement_in_a_context_shorter_than_the_prompts(source: Path, tmp_path: Path) -> None:
    quality = export_onnx(str(source), Options(precision="int8", context=16), tmp_path / "b").quality
    assert quality is not None
    assert 8 <= quality.tokens <= 64
    assert open_bundle(tmp_path / "b", ENGINE).context == 16


def test_a_gguf_is_transcoded(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    gguf.convert(tiny_gguf(tmp_path / "m" / "source.gguf"), tmp_path / "m")
    for precision in ("fp32", "int8", "int4"):
        target = open_bundle(export(tmp_path / "m", tmp_path / precision, precision, taps=(0,)), ENGINE)
        assert np.isfinite(target.score([3, 4, 5], [-1, 0, 1])).all()


def test_the_fingerprint_names_the_function_not_the_precision(source: Path, tmp_path: Path) -> None:
    def fingerprint(folder: Path, **options: Any) -> str:
        return manifest.read(export(folder, tmp_path / "b", **options)).fingerprint

    base = fingerprint(source)
    assert base == fingerprint(source, precision="int4") == fingerprint(source, context=64)
    other = write_folder(tmp_path / "other", tie_word_embeddings=True)
    assert len({base, fingerprint(source, taps=(1,)), fingerprint(source, last_hidden=True), fingerprint(other)}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, r"^precision is 'int3', expected one of fp32, fp16, int8, int4$"),
        ({"flavour": "tensorrt"}, r"^flavour is 'tensorrt', expected one of ort, portable, decomposed$"),
        ({"taps": (3, 2)}, r"^taps are \[3, 2\], expected ascending layers from 0 to 6$"),
        ({"taps": (7,)}, r"^taps are \[7\], expected ascending layers from 0 to 6$"),
        ({"context": 513}, r"^context is 513, expected 16 to 512 tokens, or 0 for all$"),
        ({"context": 15}, r"^context is 15, expected 16 to 512 tokens, or 0 for all$"),
    ],
)
def test_options_out_of_range(source: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export(source, tmp_path / "b", **options)
    assert names(tmp_path) == []


def test_models_that_are_refused_leave_nothing(source: Path, tmp_path: Path) -> None:
    gemma = rewrite(source, tmp_path / "gemma", {"model_type": "gemma"})
    message = r"^model type 'gemma' is not supported, expected one of llama, mistral, qwen2,"
    with pytest.raises(UnsupportedModelError, match=message):
        export(gemma, tmp_path / "out" / "b")
    narrow = write_folder(tmp_path / "narrow", intermediate_size=40)
    with pytest.raises(
        UnsupportedModelError, match=r"^a weight has rows of 40 values, expected a multiple of 32 for int4$"
    ):
        export(narrow, tmp_path / "out" / "b", "int4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no config.json, expected a model in Hugging Face layout$"):
        export(tmp_path / "empty", tmp_path / "out" / "b")
    assert not (tmp_path / "out").exists() or names(tmp_path / "out") == []


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("broken")])
@pytest.mark.parametrize("late", [False, True])
def test_a_failure_leaves_what_was_there(
    source: Path, tmp_path: Path, failure: BaseException, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up amid the weights or while the reference is written, an interrupt, a bug."""
    before = export(source, tmp_path / "b", "int4")
    content = {name: (before / name).read_bytes() for name in names(before)}
    constant = GraphWriter.constant

    def fail(self: GraphWriter, name: str, value: Any) -> str:
        if "layers.5" in name and (not late or self._folder.name.startswith("tmp")):
            raise failure
        return constant(self, name, value)

    monkeypatch.setattr(GraphWriter, "constant", fail)
    expected = StorageError if isinstance(failure, OSError) else type(failure)
    message = "no space left on device.*free some space" if expected is StorageError else None
    with pytest.raises(expected, match=message):
        export_onnx(str(source), Options(precision="int4"), tmp_path / "b")
    assert names(tmp_path) == sorted(["b", *content])
    assert content == {name: (before / name).read_bytes() for name in names(before)}


def test_too_little_space_is_seen_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil._ntuple_diskusage(10**6, 0, 10**5)  # type: ignore[attr-defined]
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: free)
    with pytest.raises(StorageError, match=r"has 100.0 kB free, expected \d+.\d kB: free some space"):
        export(source, tmp_path / "b")
    # the fp32 reference beside an int4 bundle counts
    small = shutil._ntuple_diskusage(10**6, 0, 10**5 * 2)  # type: ignore[attr-defined]
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: small)
    export(source, tmp_path / "b", "int4")
    with pytest.raises(StorageError, match="free some space"):
        export_onnx(str(source), Options(precision="int4"), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


def test_what_a_killed_export_left_is_gone_after_the_next(source: Path, tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from starsd.export import check
        from starsd.export.bundle import Options, export_onnx
        check.write_answers = lambda *rest: os.kill(os.getpid(), signal.SIGKILL)
        export_onnx({str(source)!r}, Options(precision="int4"), Path({str(tmp_path / "b")!r}))
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.onnx"))) == 2  # the bundle's and the reference's
    export(source, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_the_store_and_its_quota(source: Path, starsd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = export_onnx(str(source), Options(precision="fp32"))
    place = Path(report.bundle)
    assert place.parent.parent == starsd_home / "bundles"
    assert place.name == "ort-fp32"
    monkeypatch.setenv("STARSD_QUOTA_GB", "0.0006")
    with pytest.raises(StorageError, match=r"would hold .* the quota is 600.0 kB: starsd models rm could remove m-"):
        export_onnx(str(source), Options(precision="fp16", check=False))
    export_onnx(str(source), Options(precision="fp32"))  # what it replaces does not count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: {**raw, "format": 3}, r"manifest.json has format 3, expected 2: export the model again$"),
        (lambda raw: {**raw, "extra": 1}, r"manifest.json cannot be read: .*extra"),
        (lambda raw: {k: v for k, v in raw.items() if k != "shape"}, r"manifest.json cannot be read: .*`shape`"),
        (lambda raw: [], r"manifest.json cannot be read: "),
    ],
)
def test_broken_manifests(source: Path, tmp_path: Path, change: Any, message: str) -> None:
    bundle = export(source, tmp_path / "b")
    raw = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(change(raw)))
    with pytest.raises(BundleError, match=message):
        open_bundle(bundle, ENGINE)


def test_broken_files(source: Path, tmp_path: Path) -> None:
    bundle = export(source, tmp_path / "b")
    data = (bundle / WEIGHTS_FILE).read_bytes()
    (bundle / WEIGHTS_FILE).write_bytes(data[:-1])
    with pytest.raises(BundleError, match=rf"{WEIGHTS_FILE} has {len(data) - 1} bytes, expected {len(data)}$"):
        open_bundle(bundle, ENGINE)
    (bundle / WEIGHTS_FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    manifest.read(bundle)  # sizes are right
    with pytest.raises(BundleError, match=rf"{WEIGHTS_FILE} is not what was exported: its SHA-256 differs"):
        manifest.read(bundle, verify=True)
    (bundle / WEIGHTS_FILE).unlink()
    with pytest.raises(BundleError, match=rf"{WEIGHTS_FILE} is missing, expected {len(data)} bytes$"):
        open_bundle(bundle, ENGINE)
    (bundle / "manifest.json").unlink()
    with pytest.raises(
        BundleError, match=r"b is no bundle: manifest.json is missing, make one with starsd-export onnx$"
    ):
        open_bundle(bundle, ENGINE)


def test_a_graph_that_does_not_load(source: Path, tmp_path: Path) -> None:
    bundle = export(source, tmp_path / "b")
    (bundle / GRAPH_FILE).write_bytes(b"no graph")
    raw = json.loads((bundle / "manifest.json").read_text())
    raw["files"][GRAPH_FILE]["bytes"] = 8
    (bundle / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BundleError, match=rf"{GRAPH_FILE} does not load in onnxruntime \d"):
        open_bundle(bundle, ENGINE)


MEASURE = """
import re, sys
from pathlib import Path
from starsd.export.bundle import Options, export_onnx
def peak():  # what getrusage says would begin with the peak of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
export_onnx(sys.argv[1], Options(precision=sys.argv[2], check=False), Path(sys.argv[3]))
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 MB of bf16 weights in four shards."""
    folder = write_folder(tmp_path_factory.mktemp("large") / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 9, "head_dim": 64}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    tensors = sorted(read_architecture(config).tensors().items())
    weight_map, noise = {}, np.random.default_rng(0).integers(0x3C00, 0x3D00, 1 << 20, np.uint16)
    for shard in range(4):
        file, part = f"model-{shard}.safetensors", tensors[shard::4]
        specs = [TensorSpec(name, "BF16", shape) for name, shape in part]
        write_safetensors(folder / file, specs, (np.resize(noise, shape) for _, shape in part))
        weight_map |= {name: file for name, _ in part}
    (folder / "model.safetensors.index.json").write_bytes(msgspec.json.encode({"weight_map": weight_map}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
def test_weights_are_streamed(large: Path, precision: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", MEASURE, str(large), precision, str(tmp_path / "b")]
    grown = int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    shard = max(path.stat().st_size for path in large.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in large.glob("*.safetensors")) > 280e6
    output = sum(path.stat().st_size for path in (tmp_path / "b").iterdir())
    print(f"{precision}: grew {grown / 1e6:.0f} MB, largest shard {shard / 1e6:.0f} MB, output {output / 1e6:.0f} MB")
    assert grown < 1.3 * shard + output


def test_reports_are_json(source: Path, tmp_path: Path) -> None:
    report = export_onnx(str(source), Options(precision="fp32"), tmp_path / "b")
    assert msgspec.json.decode(msgspec.json.encode(report))["precision"] == "fp32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "expected 1 to"),
        ({"num_attention_heads": 0}, "no number|out of range"),
        ({"intermediate_size": "x"}, "intermediate_size 'x', expected"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps 'x', expected a small number"),
        ({"max_position_embeddings": 10**15}, "expected"),
        ({"rope_theta": -1.0, "rope_parameters": None}, "expected theta and factor above 0"),
        ({"rope_scaling": "yarn"}, "rope parameters cannot be read"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = write_folder(tmp_path / "m")
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        export_onnx(str(source), Options(precision="fp32"), tmp_path / "b")


def test_a_graph_of_another_shape_is_refused(tmp_path: Path) -> None:
    bundle = export(write_folder(tmp_path / "m"), tmp_path / "b", "fp32")
    made = manifest.read(bundle)
    for change in ({"layers": 9}, {"head_dim": 8}, {"vocab": 10}, {"kv_heads": 4}):
        manifest.write(msgspec.structs.replace(made, shape=msgspec.structs.replace(made.shape, **change)), bundle)
        with pytest.raises(BundleError, match="its manifest says"):
            open_bundle(bundle, ENGINE)
