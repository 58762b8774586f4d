"""Rules are tried in a process of its own, which may die of them; nobody else does."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_session import write_text_files

from starsd.edge import grammar_trial
from starsd.edge.grammar_rules import json_rules
from starsd.edge.grammar_trial import Trial
from starsd.edge.text import Text
from starsd.shared.errors import CapacityError, EngineError, UsageError

HOSTILE: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.*"} for n in range(24)]}  # minutes
LARGE = {"type": "integer", "multipleOf": 30011}
FAIR = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text.open(write_text_files(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def trial(text: Text) -> Trial:
    return Trial(text)


def refusal(trial: Trial, schema: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as refused:
        trial.check(json_rules(schema), "JSON schema")
    return str(refused.value)


def child(trial: Trial) -> int:
    assert trial._child is not None
    return trial._child.pid


def test_what_is_good_passes_and_what_is_not_is_told(trial: Trial) -> None:
    for _ in range(2):
        trial.check(json_rules(FAIR), "JSON schema")
        assert refusal(trial, {"type": "foo"}) == "JSON schema cannot be used: Invalid type: foo"
        assert refusal(trial, {"$ref": "#"}).startswith("JSON schema cannot be used: NoExtension")


def test_what_the_device_is_too_busy_for_is_given_up(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.check(json_rules(FAIR), "JSON schema")
    old = child(trial)
    monkeypatch.setattr(grammar_trial, "PATIENCE", 0.3)
    with pytest.raises(CapacityError, match=r"^JSON schema was not compiled in 0\.3 seconds: try again later$"):
        trial.check(json_rules(HOSTILE), "JSON schema")
    monkeypatch.undo()
    trial.check(json_rules(FAIR), "JSON schema")
    assert child(trial) != old
    assert not Path(f"/proc/{old}").exists()


def test_what_takes_too_long_is_given_up(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the child itself: its parent may be gone."""
    monkeypatch.setattr(grammar_trial, "PATIENCE", 60.0)
    trial = Trial(text, cpu_seconds=0)
    assert refusal(trial, HOSTILE) == (
        "JSON schema cannot be used: it takes more than 0 seconds or 256 MB to compile, expected a simpler one"
    )
    trial.check(json_rules(FAIR), "JSON schema")


def test_what_takes_too_much_memory_is_given_up(text: Text) -> None:
    trial = Trial(text, cpu_seconds=30, memory=2 << 20)
    assert "it takes more than 30 seconds or 2 MB to compile" in refusal(trial, LARGE)
    trial.check(json_rules(FAIR), "JSON schema")


def test_a_child_that_was_idle_is_replaced(trial: Trial) -> None:
    trial.check(json_rules(FAIR), "JSON schema")
    old = trial._child
    assert old is not None
    old.send_signal(signal.SIGALRM)  # as its own clock does
    old.wait(10)
    trial.check(json_rules(FAIR), "JSON schema")
    assert child(trial) != old.pid


def test_a_child_ends_with_its_trial(text: Text) -> None:
    trial = Trial(text)
    trial.check(json_rules(FAIR), "JSON schema")
    process = trial._child
    assert process is not None
    del trial
    assert process.returncode == -signal.SIGKILL


def test_a_child_that_does_not_start_is_an_error_of_ours(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"^grammars cannot be compiled: the process for it did not start$"):
        Trial(text).check(json_rules(FAIR), "JSON schema")


def test_a_check_may_be_stopped_by_another_thread(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "PATIENCE", 60.0)
    trial = Trial(text, cpu_seconds=60)
    trial.check(json_rules(FAIR), "JSON schema")
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(refusal(trial, HOSTILE)))
    began = time.monotonic()
    thread.start()
    time.sleep(0.1)
    trial.stop()
    thread.join()
    assert time.monotonic() - began < 20
    assert len(said) == 1
    for _ in range(2):
        trial.check(json_rules(FAIR), "JSON schema")
        trial.stop()  # nothing is going on
