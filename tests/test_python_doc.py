"""The app in docs/python.md runs as it is written there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_session import ToyTarget, write_text_files

from starsd.edge import Runtime, __all__
from starsd.edge.text import Text

DOCUMENT = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
APP = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[0]


def test_the_app_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def open_toy(model: str, **options: Any) -> Runtime:
        assert model == "smollm2-135m"
        return Runtime.around(ToyTarget(), text=Text.open(write_text_files(tmp_path)), **options)

    monkeypatch.setattr(Runtime, "open", open_toy)
    exec(compile(APP, "docs/python.md", "exec"), {"__name__": "app"})
    said = capsys.readouterr().out.splitlines()
    assert sum(" tokens/s, " in line for line in said) == 2
    assert said[-1] in ("red", "green", "blue")


@pytest.mark.model
def test_the_app_runs_on_the_default_model(smollm2_bundle: Any) -> None:
    smollm2_bundle("int8")
    done = subprocess.run([sys.executable, "-c", APP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-1] in ("red", "green", "blue")
    assert "leaves" in done.stdout


def test_it_is_an_app_of_twenty_lines() -> None:
    lines = [line for line in APP.splitlines() if line.strip()]
    assert 15 <= len(lines) <= 25


def test_the_document_names_all_there_is() -> None:
    for name in __all__:
        assert f"`{name}`" in DOCUMENT
