"""How much context fits into what memory a machine has left, on fake ones and on the way to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from telemetry_trees import MEMINFO, linux, write
from tiny_session import EOS, ToyTarget, write_text_files

from starsd.edge import runtime as runtimes
from starsd.edge import telemetry_memory
from starsd.edge.runtime import Runtime
from starsd.edge.telemetry_files import Files
from starsd.edge.telemetry_memory import LEAST_CONTEXT, RESERVE, WEIGHTS, fitting, row_bytes
from starsd.shared.config import Engine
from starsd.shared.manifest import FeatureSpec, FileEntry, Manifest, ModelShape

CONTEXT = 8192
BUNDLE = Manifest(
    name="toy",
    source="toy",
    fingerprint="f" * 64,
    architecture="toy",
    flavour="ort",
    precision="int8",
    shape=ModelShape(layers=30, hidden=8, heads=9, kv_heads=3, head_dim=64, vocab=300, context=CONTEXT),
    features=FeatureSpec((), True, 8),
    eos=(EOS,),
    files={"model.onnx": FileEntry(1_000_000, "0" * 64), "model.onnx.data": FileEntry(99_000_000, "1" * 64)},
)
ROW = 2 * 30 * 3 * 64 * 4
FIXED = int(WEIGHTS * 100_000_000) + RESERVE


def machine(root: Path, available: float) -> Files:
    """With so many bytes available."""
    linux(root, 8_000_000, 0, 6)
    write(root, {"proc/meminfo": MEMINFO.format(total=8_000_000, available=int(available / 1024))})
    return Files(root)


def test_keys_and_values_of_a_token() -> None:
    assert row_bytes(BUNDLE) == ROW


@pytest.mark.parametrize("engine", [Engine(), Engine(max_context=1024), Engine(max_context=CONTEXT)])
def test_what_fits_stays_as_asked(tmp_path: Path, engine: Engine) -> None:
    need = FIXED + ROW * (2 * (engine.max_context or CONTEXT) + 7 * 512)
    assert fitting(BUNDLE, engine, 8, machine(tmp_path, need + 2048)) == (engine, "")
    assert fitting(BUNDLE, engine, 8, machine(tmp_path, need - 2048))[0] != engine


def test_less_memory_makes_less_context(tmp_path: Path) -> None:
    engine, reason = fitting(BUNDLE, Engine(threads=3), 8, machine(tmp_path, FIXED + ROW * (2 * 2100 + 7 * 512)))
    assert engine == Engine(threads=3, max_context=2048)
    assert reason == (
        "context is 2048 tokens instead of 8192: 0.72 GB of memory are available, expected 1.28: "
        "end other programs, or take a smaller model"
    )


def test_no_context_is_too_small_to_try(tmp_path: Path) -> None:
    engine, reason = fitting(BUNDLE, Engine(), 1, machine(tmp_path, 1_000_000))
    assert engine.max_context == LEAST_CONTEXT
    assert reason.startswith("context is 256 tokens instead of 8192: 0.00 GB")
    tiny = Engine(max_context=100)
    assert fitting(BUNDLE, tiny, 1, machine(tmp_path, 1_000_000)) == (tiny, "")


def test_contexts_only_shrink_with_memory(tmp_path: Path) -> None:
    sizes = [FIXED + ROW * 100 * step for step in range(0, 220, 20)]
    contexts = [fitting(BUNDLE, Engine(), 4, machine(tmp_path, size))[0].max_context or CONTEXT for size in sizes]
    assert contexts == sorted(contexts)
    assert len(set(contexts)) > 5


def test_a_system_that_does_not_tell_changes_nothing(tmp_path: Path) -> None:
    assert fitting(BUNDLE, Engine(), 8, Files(tmp_path)) == (Engine(), "")


def test_an_engine_is_left_to_refuse_too_much(tmp_path: Path) -> None:
    asked = Engine(max_context=CONTEXT + 1)
    assert fitting(BUNDLE, asked, 8, machine(tmp_path, 1000)) == (asked, "")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines that a runtime asked for, on a machine with 1 MB available and a toy in the place of every bundle."""
    folder = write_text_files(tmp_path / "bundle")
    asked: list[Engine] = []
    files = machine(tmp_path / "root", 1_000_000)

    def open_toy(kind: str, folder: Path, engine: Engine) -> Any:
        asked.append(engine)
        return ToyTarget(engine.max_context or CONTEXT)

    monkeypatch.setattr(runtimes, "ensure_bundle", lambda model, precision: folder)
    monkeypatch.setattr(runtimes.manifest, "read", lambda folder: BUNDLE)
    monkeypatch.setattr(runtimes, "open_target", open_toy)
    monkeypatch.setattr(telemetry_memory, "memory", lambda _, known=telemetry_memory.memory: known(files))
    return asked


def test_a_runtime_opens_with_less_and_says_so(asked: list[Engine], capsys: pytest.CaptureFixture[str]) -> None:
    with Runtime.open("toy") as runtime:
        assert runtime.context == LEAST_CONTEXT
        assert runtime.status().context == LEAST_CONTEXT
    assert [engine.max_context for engine in asked] == [LEAST_CONTEXT]
    assert capsys.readouterr().err.startswith("starsd-edge: context is 256 tokens instead of 8192: 0.00 GB of memory")
