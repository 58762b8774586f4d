"""What an engine's record says, and when it does not fit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from starsd.shared.errors import BundleError
from starsd.shared.manifest import GRAPH_FILE, WEIGHTS_FILE, FeatureSpec, FileEntry, Manifest, ModelShape
from starsd.shared.tensorrt_key import (
    FOLDER,
    MAX_ROWS,
    PLAN_FILE,
    RECORD_FILE,
    EngineKey,
    EngineRecord,
    Machine,
    differences,
    key_for,
    l4t_release,
    read_record,
)

MACHINE = Machine(tensorrt="10.3.0.30", l4t="36.5.0", gpu="sm87")
ABOUT = Manifest(
    name="tiny",
    source="tiny",
    fingerprint="f",
    architecture="llama",
    flavour="decomposed",
    precision="fp16",
    shape=ModelShape(2, 32, 4, 2, 8, 64, 512),
    features=FeatureSpec((), True, 32),
    eos=(1,),
    files={GRAPH_FILE: FileEntry(10, "a" * 64), WEIGHTS_FILE: FileEntry(20, "b" * 64)},
)
KEY = key_for(ABOUT, MACHINE, 256, 128)


def write(folder: Path, key: EngineKey = KEY, **changes: object) -> Path:
    """A record beside a plan of three bytes."""
    place = folder / FOLDER
    place.mkdir()
    (place / PLAN_FILE).write_bytes(b"abc")
    record = EngineRecord(key=key, plan=FileEntry(3, "c" * 64), seconds=1.5)
    (place / RECORD_FILE).write_bytes(msgspec.json.encode({**msgspec.to_builtins(record), **changes}))
    return folder


def test_a_key_says_what_was_asked_for() -> None:
    assert (KEY.context, KEY.chunk, KEY.capacity) == (256, 128, 256 + MAX_ROWS)
    assert KEY.profiles[1].rows == (1, 8, MAX_ROWS)
    assert (KEY.graph, KEY.weights) == ("a" * 64, "b" * 64)
    assert differences(KEY, KEY) == []


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (key_for(ABOUT, msgspec.structs.replace(MACHINE, tensorrt="11"), 256, 128), "TensorRT 10.3.0.30, here 11"),
        (key_for(ABOUT, msgspec.structs.replace(MACHINE, l4t=""), 256, 128), "L4T 36.5.0, here none"),
        (key_for(ABOUT, msgspec.structs.replace(MACHINE, gpu="sm110"), 256, 128), "GPU sm87, here sm110"),
        (key_for(ABOUT, MACHINE, 300, 128), "context 256, here 300"),
        (key_for(ABOUT, MACHINE, 256, 64), "chunk 128, here 64"),
        (msgspec.structs.replace(KEY, graph="d" * 64), "graph aaaaaaaaaaaa, here dddddddddddd"),
        (msgspec.structs.replace(KEY, weights="e" * 64), "weights bbbbbbbbbbbb, here eeeeeeeeeeee"),
        (msgspec.structs.replace(KEY, flags=()), "flags ('strongly_typed',), here none"),
        (msgspec.structs.replace(KEY, profiles=(KEY.profiles[0], KEY.profiles[0])), "profiles (Point("),
    ],
)
def test_every_part_of_a_key_counts(key: EngineKey, words: str) -> None:
    assert differences(KEY, key)[0].startswith(words)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    record = read_record(write(tmp_path))
    assert record is not None
    assert (record.key, record.plan.bytes, record.seconds) == (KEY, 3, 1.5)


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    record = write(tmp_path) / FOLDER / RECORD_FILE
    whole = record.read_bytes()
    (tmp_path / FOLDER / PLAN_FILE).write_bytes(b"ab")
    with pytest.raises(BundleError, match=r"engine.plan has 2 bytes, expected 3"):
        read_record(tmp_path)
    (tmp_path / FOLDER / PLAN_FILE).unlink()
    with pytest.raises(BundleError, match=r"engine.plan has 0 bytes, expected 3"):
        read_record(tmp_path)
    record.write_bytes(whole.replace(b'"format":1', b'"format":7'))
    with pytest.raises(BundleError, match=r"engine.json has format 7, expected 1"):
        read_record(tmp_path)
    record.write_bytes(whole.replace(b'"flags"', b'"falgs"'))
    with pytest.raises(BundleError, match=r"engine.json cannot be read: Object"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("# R36 (release), REVISION: 5.0, GCID: 1, BOARD: generic, EABI: aarch64\n# KERNEL_VARIANT: oot", "36.5.0"),
        ("# R39 (release), REVISION: 2.0.1, GCID: 1", "39.2.0"),
        ("# R38 (release), REVISION: 2, GCID: 1", "38.2.0"),
        ("something else", ""),
    ],
)
def test_the_release_of_jetson_linux(text: str, release: str, tmp_path: Path) -> None:
    file = tmp_path / "release"
    file.write_text(text)
    assert l4t_release(file) == release
    assert l4t_release(tmp_path / "none") == ""
