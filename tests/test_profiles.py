from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from starsd.shared.errors import UsageError
from starsd.shared.features import codec
from starsd.shared.profiles import Profile, read_profile, shipped

NX = "orin-nx-16gb-8b"
GOOD: dict[str, Any] = {
    "name": "toy",
    "hidden": 8,
    "pass_ms": [[1, 10.0], [5, 18.0], [9, 34]],
    "interpolation": "linear",
    "prefill_tok_s": 500,
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "toy.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return path


def toy(folder: Path, **changes: Any) -> Profile:
    return read_profile(write(folder, **changes))


def test_every_shipped_profile_reads_and_is_named_as_its_file() -> None:
    assert shipped() == ("agx-orin-64gb-8b", "agx-thor-8b", "orin-nano-8gb-1.7b", NX)
    for name in shipped():
        assert read_profile(name).name == name


def test_the_figures_of_an_orin_nx() -> None:
    profile = read_profile(NX)
    assert profile.hidden == 4096
    assert profile.pass_seconds(1) == pytest.approx(0.0571)
    assert profile.pass_seconds(61) == pytest.approx(0.1345)
    assert profile.plain_tok_s == pytest.approx(17.5, abs=0.05)
    assert profile.prefill_seconds(696) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "ms"), [(1, 10), (2, 12), (3, 14), (5, 18), (6, 22), (9, 34), (10, 38), (109, 34 + 4 * 100)]
)
def test_linear_between_the_points_and_by_the_last_slope_beyond(tmp_path: Path, rows: int, ms: float) -> None:
    assert toy(tmp_path).pass_seconds(rows) == pytest.approx(ms / 1e3)


def test_a_single_point_is_a_constant(tmp_path: Path) -> None:
    assert toy(tmp_path, pass_ms=[[1, 7]]).pass_seconds(50) == pytest.approx(0.007)


def test_prefill_at_its_rate_or_as_one_pass(tmp_path: Path) -> None:
    assert toy(tmp_path).prefill_seconds(100) == pytest.approx(0.2)
    assert toy(tmp_path, prefill_tok_s=None).prefill_seconds(10) == pytest.approx(0.038)
    assert toy(tmp_path, prefill_tok_s=None).prefill_seconds(0) == 0.0


def test_a_pass_has_rows() -> None:
    with pytest.raises(UsageError, match=r"^a pass of 0 rows has no time, expected 1 or more$"):
        read_profile(NX).pass_seconds(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "has an empty name, expected one"),
        ({"hidden": 0}, "has hidden 0, expected 1 or more"),
        ({"pass_ms": []}, "has pass_ms without points, expected the first point at 1 row"),
        ({"pass_ms": [[2, 10]]}, "has pass_ms from 2 rows on, expected the first point at 1 row"),
        ({"pass_ms": [[1, 10], [1, 12]]}, "has 1 rows after 1 in pass_ms, expected them ascending"),
        ({"pass_ms": [[1, 10], [4, 9]]}, "has 9.0 ms for 4 rows after 10.0 for 1, expected as much or more"),
        ({"pass_ms": [[1, 0]]}, "has 0.0 ms for 1 rows, expected more than 0"),
        ({"prefill_tok_s": 0}, "has prefill_tok_s 0.0, expected more than 0, or null"),
        ({"interpolation": "cubic"}, "cannot be read: Invalid enum value 'cubic' - at `$.interpolation`"),
        ({"pases": 1}, "cannot be read: Object contains unknown field `pases`"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(UsageError) as error:
        read_profile(path)
    assert str(error.value) == f"profile {path} {message}"


def test_a_field_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text(json.dumps({name: value for name, value in GOOD.items() if name != "prefill_tok_s"}))
    with pytest.raises(UsageError, match=r"Object missing required field `prefill_tok_s`$"):
        read_profile(path)


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        read_profile("orin-nx")
    assert str(error.value) == f"profile 'orin-nx' is unknown, expected one of {', '.join(shipped())}, or a .json file"
    with pytest.raises(UsageError, match=r"none.json cannot be read: no such file or directory$"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match=r"broken.json cannot be read: Input data was truncated$"):
        read_profile(tmp_path / "broken.json")


def test_padding_makes_a_row_as_heavy_as_the_devices() -> None:
    profile = read_profile("orin-nx-16gb-8b")
    size = codec("int8").row_bytes
    assert size(576) + profile.padding("int8", 576) == size(4096) == 4112
    assert profile.padding("int4", 8192) == 0
