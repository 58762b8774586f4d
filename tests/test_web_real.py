"""The chat page and the API's real server together, in front of the toy target: they speak of the same things."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from api_helpers import SlowTarget, open_runtime, served
from web_fake import WEB

from starsd.edge.api_settings import Settings

if TYPE_CHECKING:
    from web_browser import Chat, Opened

pytest_plugins = ("web_browser",)
pytestmark = pytest.mark.browser


def choose(chat: Chat, **settings: str) -> None:
    chat.button("Settings").click()
    for name, value in settings.items():
        chat.page.fill(f"#settings [name={name}]", value)
    chat.button("Save").click()


def test_the_page_shows_what_the_api_answers(opened: Opened, tmp_path: Path) -> None:
    with served(open_runtime(tmp_path), web=WEB) as device, opened(device) as chat:
        assert chat.page.inner_text("#model") == "toy"
        assert chat.page.inner_text("#link") == "device only"
        choose(chat, seed="5", temperature="0.7", max_tokens="40", system="Be a toy.")
        chat.send("ab ab ab")
        chat.ended()
        messages = [{"role": "system", "content": "Be a toy."}, {"role": "user", "content": "ab ab ab"}]
        said = device.chat(messages=messages, seed=5, temperature=0.7, max_tokens=40)
        assert len(said["choices"][0]["message"]["content"]) > 10
        stored = chat.stored()[0]["messages"][1]
        assert stored["content"] == said["choices"][0]["message"]["content"]
        assert sum(stored["runs"][::2]) == len(stored["content"].encode("utf-16-le")) // 2
        assert stored["usage"]["written"] == said["usage"]["completion_tokens"]
        assert chat.page.inner_text(".figures").startswith(f"{stored['usage']['written']} tokens · ")


def test_stopping_ends_the_generation(opened: Opened, tmp_path: Path) -> None:
    passes: list[float] = []
    runtime = open_runtime(tmp_path, lambda context: SlowTarget(context, passes))
    with served(runtime, web=WEB) as device, opened(device) as chat:
        chat.send("go on")
        chat.page.locator("article.model .answer > *").first.wait_for()
        chat.page.keyboard.press("Escape")
        chat.ended()
        chat.until(lambda: runtime.status().busy == 0)
        done = len(passes)
        assert done > 0
        time.sleep(0.2)
        assert len(passes) == done
        assert chat.page.inner_text(".figures") == "stopped"


def test_a_conversation_beyond_the_context(opened: Opened, tmp_path: Path) -> None:
    with served(open_runtime(tmp_path, context=64), web=WEB) as device, opened(device, may_fail=True) as chat:
        chat.send("word " * 60)
        chat.ended()
        assert chat.problem.inner_text().splitlines()[0] == (
            "This conversation has become longer than the model can hold."
        )


def test_a_key_of_the_real_server(opened: Opened, tmp_path: Path) -> None:
    settings = Settings(keys=("a key of some length",))
    with served(open_runtime(tmp_path), settings, web=WEB) as device, opened(device, may_fail=True) as chat:
        chat.page.locator("#key[open]").wait_for()
        chat.page.fill("#key input[name=key]", "a key of some length")
        chat.button("Go on").click()
        chat.page.locator("#link[data-state=alone]").wait_for()
        choose(chat, max_tokens="8")
        chat.send("hello")
        chat.ended()
        assert chat.problem.count() == 0
        assert chat.page.locator(".figures").count() == 1
