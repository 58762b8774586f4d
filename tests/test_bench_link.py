"""`starsd bench link` and long prompts for it, on the real engine and the packaged head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_session import write_text_files

from starsd.edge.recordings import read_recordings
from starsd.edge.text import Text
from starsd.export.train_data import Role, joined, write_chats
from starsd.scripts.cli import main
from starsd.scripts.long_prompts import Conversations, turns_of
from starsd.shared.errors import UsageError


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return Text.open(write_text_files(tmp_path / "text"))


def chats_of(text: Text, path: Path, *pairs: tuple[str, str]) -> Path:
    """One-turn chats: a token of the template, what the user says, the answer."""
    made = []
    for asked, answered in pairs:
        parts = [([0], Role.TEMPLATE), (text.encode(asked), Role.USER), (text.encode(answered), Role.ANSWER)]
        made.append(([t for ids, _ in parts for t in ids], [int(role) for ids, role in parts for _ in ids]))
    write_chats(path, joined(made))
    return path


def test_earlier_turns_fill_a_conversation_up_to_its_length(text: Text, tmp_path: Path) -> None:
    chats = chats_of(text, tmp_path / "chats.npz", *((f"why {i}", f"since {i}") for i in range(40)))
    earlier = Conversations(text, chats, 1000)
    last = text.encode_chat([{"role": "user", "content": "and now"}])
    ids = earlier.ending_with("and now", 200, seed=1)
    assert len(last) < len(ids) <= 200
    assert text.decode(ids).endswith(text.decode(last)[-10:])
    assert earlier.ending_with("and now", 200, seed=1) == ids
    assert earlier.ending_with("and now", 200, seed=2) != ids


def test_turns_are_those_of_the_chat(text: Text, tmp_path: Path) -> None:
    file = chats_of(text, tmp_path / "chats.npz", ("how", "thus"))
    turns = turns_of(Conversations(text, file, 1000)._chats, 0, text)
    assert turns == [{"role": "user", "content": "how"}, {"role": "assistant", "content": "thus"}]


def test_chats_that_do_not_suffice_are_refused(text: Text, tmp_path: Path) -> None:
    file = chats_of(text, tmp_path / "chats.npz", ("how", "thus"))
    with pytest.raises(UsageError, match=r"chats.npz has \d+ tokens of other turns, expected 5000: give more chats"):
        Conversations(text, file, 1000).ending_with("and now", 5000, seed=0)


def test_chats_without_a_context_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", "x", "--out", "y", "--chats", "z.npz"]
    assert main(["bench", "record", *options]) == 1
    assert "chats are z.npz and context is 0, expected both or neither" in capsys.readouterr().err


@pytest.mark.model
def test_a_link_is_measured_from_recorded_long_prompts(
    smollm2_bundle: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, out = smollm2_bundle("int8"), tmp_path / "long.npz"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1, "prompt": "Count from one to twelve."}\n')
    text = Text.open(bundle)
    chats = chats_of(text, tmp_path / "chats.npz", *((f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(60)))
    argv = ["bench", "record", "--model", str(bundle), "--prompts", str(prompts), "--max-new-tokens", "24"]
    assert main([*argv, "--chats", str(chats), "--context", "400", "--out", str(out)]) == 0
    (run,) = read_recordings(out).runs
    assert 350 <= run.prompt <= 400

    capsys.readouterr()
    argv = ["bench", "link", "--recording", str(out), "--rtt", "10,down", "--policy", "never-wait,plain", "--json"]
    assert main([*argv, "--no-ngrams", "--no-phrases"]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    near, _, down, plain = rows
    assert [(row["rtt_ms"], row["policy"]) for row in (near, down)] == [(10.0, "never-wait"), ("down", "never-wait")]
    assert near["remote"] > 0
    assert near["prefill_s"] < near["first_draft_s"] < near["prefill_s"] + 2
    assert near["vs_plain"] > 1
    for row in (down, plain):
        assert (row["remote"], row["first_draft_s"], row["never_drafted"]) == (0, None, 1)
        np.testing.assert_allclose(row["vs_plain"], 1, atol=0.02)
