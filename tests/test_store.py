from __future__ import annotations

from pathlib import Path

import pytest

from starsd.export import store
from starsd.shared.errors import StorageError, UsageError


def fill(home: Path, name: str, size: int) -> None:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


@pytest.fixture
def filled(starsd_home: Path) -> Path:
    fill(starsd_home, "models/one/model.safetensors", 1000)
    fill(starsd_home, "models/one/deep/config.json", 10)
    fill(starsd_home, "bundles/one/ort-int4/model.onnx", 300)
    fill(starsd_home, "bundles/one/ort-fp32/model.onnx", 700)
    fill(starsd_home, "bundles/local-12345678/ort-int4/model.onnx", 5)
    fill(starsd_home, "models/org--name/model.safetensors", 20)
    fill(starsd_home, "partial/one.whl", 40)
    fill(starsd_home, "partial/.one.lock", 0)
    fill(starsd_home, "models/.staged-one-1.tmp/half", 5000)
    return starsd_home


def test_lists_models_with_bundles_and_partial_downloads(filled: Path) -> None:
    rows = {row.name: row for row in store.stored()}
    assert list(rows) == ["local-12345678", "one", "org--name"]
    assert rows["one"].bytes == 2050
    assert (rows["one"].model_bytes, rows["one"].partial_bytes) == (1010, 40)
    assert [(own.name, own.bytes) for own in rows["one"].bundles] == [("ort-fp32", 700), ("ort-int4", 300)]
    assert (rows["local-12345678"].bytes, rows["local-12345678"].model_bytes) == (5, 0)


def test_an_empty_home_lists_nothing(starsd_home: Path) -> None:
    assert store.stored() == []
    with pytest.raises(UsageError, match=r"nothing is stored as 'one', expected one of: nothing, it is empty"):
        store.remove("one")


def test_removes_a_model_with_all_that_belongs_to_it(filled: Path) -> None:
    assert store.find("one") == store.remove("one") == 2050
    assert [row.name for row in store.stored()] == ["local-12345678", "org--name"]
    assert not (filled / "models" / "one").exists()
    assert store.remove("hf:org/name") == 20


def test_removes_one_bundle_and_nothing_else(filled: Path) -> None:
    assert store.remove("one/ort-int4") == 300
    assert store.find("one") == 1750
    store.remove("local-12345678/ort-int4")
    assert "local-12345678" not in {row.name for row in store.stored()}


@pytest.mark.parametrize(
    "name", ["two", "../home", "..", ".", "", "one/", "one/..", "one/../../models", "/", "one/ort-int8"]
)
def test_refuses_every_name_that_is_not_listed(filled: Path, name: str) -> None:
    before = sorted(filled.rglob("*"))
    with pytest.raises(UsageError, match="expected one of: local-12345678, one, org--name"):
        store.remove(name)
    assert sorted(filled.rglob("*")) == before


def test_a_linked_model_loses_its_link_only(filled: Path, tmp_path: Path) -> None:
    fill(tmp_path, "elsewhere/config.json", 8)
    (filled / "models" / "linked").symlink_to(tmp_path / "elsewhere")
    store.remove("linked")
    assert not (filled / "models" / "linked").exists()
    assert (tmp_path / "elsewhere" / "config.json").exists()


def test_a_link_inside_a_model_is_neither_followed_nor_emptied(filled: Path, tmp_path: Path) -> None:
    fill(tmp_path, "elsewhere/config.json", 8)
    (filled / "models" / "one" / "link").symlink_to(tmp_path / "elsewhere")
    assert store.find("one") == 2050
    store.remove("one")
    assert (tmp_path / "elsewhere" / "config.json").exists()


def test_quota_says_got_limit_and_what_could_go(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARSD_QUOTA_GB", "0.000003")
    store.require_quota(900)
    store.require_quota(1900, replacing=filled / "models" / "one")
    with pytest.raises(
        StorageError,
        match=r"home would hold 3\.1 kB, the quota is 3\.0 kB: starsd models rm could remove one \(2\.0 kB\), "
        r"org--name \(20 bytes\), local-12345678 \(5 bytes\), or raise STARSD_QUOTA_GB$",
    ):
        store.require_quota(1000)


def test_no_quota_allows_all(filled: Path) -> None:
    store.require_quota(10**15)


@pytest.mark.parametrize("text", ["much", "-1", "0", "nan", "inf"])
def test_a_quota_that_is_no_size_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("STARSD_QUOTA_GB", text)
    with pytest.raises(UsageError, match=f"STARSD_QUOTA_GB is '{text}', expected a positive number of gigabytes"):
        store.require_quota(1)
