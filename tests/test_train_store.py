"""What survives on disk: committed chats, bounded taps, and nothing of another run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from starsd.export.train_store import Store
from starsd.shared.errors import UsageError

WIDTH, TOP = 6, 4


def opened(folder: Path, budget: int = 1 << 20, fingerprint: str = "one") -> Store:
    return Store(folder, fingerprint, WIDTH, TOP, budget)


def add(store: Store, count: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 99, (count,), generator=draw)
    taps = 1e5 * torch.randn(count, WIDTH, generator=draw)  # float16 would overflow
    ids, probs = torch.randint(0, 99, (count, TOP), generator=draw), torch.rand(count, TOP, generator=draw)
    store.append(tokens, tokens % 3, taps, (ids, probs))
    return {"tokens": tokens, "taps": taps.bfloat16(), "ids": ids.int(), "probs": probs.half()}


def test_what_was_added_is_there_when_opened_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    a, b = add(store, 5, 1), add(store, 3, 2)
    store.commit(complete=True)
    again = opened(tmp_path)
    assert (again.chats, again.tokens, again.complete) == (2, 8, True)
    rows = again.load()
    assert rows.chats.offsets.tolist() == [0, 5, 8]
    assert rows.chats.tokens.tolist() == [*a["tokens"].tolist(), *b["tokens"].tolist()]
    assert rows.chats.roles.tolist() == [t % 3 for t in rows.chats.tokens.tolist()]
    assert torch.equal(rows.taps, torch.cat([a["taps"], b["taps"]]))
    assert torch.equal(rows.top_ids, torch.cat([a["ids"], b["ids"]]))
    assert torch.equal(rows.top_probs, torch.cat([a["probs"], b["probs"]]))


def test_what_was_not_committed_is_forgotten(tmp_path: Path) -> None:
    store = opened(tmp_path)
    a = add(store, 5, 1)
    store.commit()
    add(store, 4, 2)
    again = opened(tmp_path)
    assert again.chats == 1
    c = add(again, 2, 3)
    again.commit()
    rows = opened(tmp_path).load()
    assert torch.equal(rows.taps, torch.cat([a["taps"], c["taps"]]))
    assert rows.chats.tokens.tolist() == [*a["tokens"].tolist(), *c["tokens"].tolist()]


def test_taps_stay_within_the_budget_and_are_those_of_the_first_chats(tmp_path: Path) -> None:
    store = opened(tmp_path, budget=2 * WIDTH * 9)
    kept = [add(store, 4, 1), add(store, 4, 2)]
    add(store, 2, 3)
    add(store, 1, 4)  # would fit, but is not among the first
    store.commit()
    assert (tmp_path / "taps.bin").stat().st_size == 2 * WIDTH * 8
    rows = opened(tmp_path, budget=2 * WIDTH * 9).load()
    assert rows.kept == 2
    assert torch.equal(rows.taps, torch.cat([part["taps"] for part in kept]))
    assert len(rows.top_ids) == 11


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    add(store, 5, 1)
    store.commit()
    with pytest.raises(UsageError, match=r"was made from another target, data or options \(one, expected two\)"):
        opened(tmp_path, fingerprint="two")
    with pytest.raises(UsageError, match="was made from another target"):
        Store(tmp_path, "one", WIDTH + 1, TOP, 1 << 20)


def test_a_short_file_is_noticed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    add(store, 5, 1)
    store.commit()
    (tmp_path / "taps.bin").write_bytes(b"12")
    with pytest.raises(UsageError, match=r"taps\.bin has 2 bytes, expected 60: delete the folder"):
        opened(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(UsageError, match=r"index\.json cannot be read"):
        opened(tmp_path)


def test_rows_of_another_size_are_our_mistake(tmp_path: Path) -> None:
    wrong = torch.zeros(3, WIDTH + 1)
    with pytest.raises(ValueError, match=r"^taps \[3, 7\], top \[\[3, 4\], \[3, 4\]\] of 3 tokens$"):
        opened(tmp_path).append(torch.zeros(3), torch.zeros(3), wrong, (torch.zeros(3, TOP), torch.zeros(3, TOP)))
