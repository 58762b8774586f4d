"""A headless Chromium for tests of the chat page, and what all of them watch: errors, and where requests go.

Test modules name it in `pytest_plugins`. The browser ends with each: Playwright holds an event loop while it runs.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from web_fake import Fake, Reply

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

Opened = Callable[..., AbstractContextManager["Chat"]]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FAILED = "Failed to load resource"


class Chat:
    """The page in a tab of its own browser profile, and the device that it talks to."""

    def __init__(self, page: Page, fake: Fake) -> None:
        self.page, self.fake = page, fake
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.may_fail = False  # the test has requests fail, which the browser's console tells
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self._listen(said.type, said.text))
        page.on("request", lambda request: self._follow(request.url))

    def _listen(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not (self.may_fail and text.startswith(FAILED)):
            self.errors.append(text)

    def _follow(self, url: str) -> None:
        if not url.startswith((self.fake.url, "blob:", "data:")):
            self.elsewhere.append(url)

    def open(self) -> Chat:
        self.page.goto(self.fake.url)
        self.page.locator("#link[data-state=unknown]").wait_for(state="detached")
        return self

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def ask(self, text: str, reply: Reply | None = None) -> Locator:
        """The answer's element, once it has ended."""
        if reply is not None:
            self.fake.replies.append(reply)
        self.send(text)
        self.ended()
        return self.answers.last

    def ended(self) -> None:
        self.page.locator("article.model").last.wait_for()
        self.page.locator("article[aria-busy=true]").wait_for(state="detached")

    @property
    def answers(self) -> Locator:
        return self.page.locator("article.model .answer")

    @property
    def questions(self) -> list[str]:
        return self.page.locator("article.user .bubble").all_inner_texts()

    @property
    def problem(self) -> Locator:
        return self.page.locator(".problem")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def sent(self) -> list[str]:
        """What the newest request told the device, turn by turn."""
        return [message["content"] for message in self.fake.asked[-1]["messages"]]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait, with the page's events running, for at most ten seconds."""
        end = time.monotonic() + 10
        while not true():
            assert time.monotonic() < end, "it never came true"
            self.page.wait_for_timeout(20)

    def stored(self) -> list[Any]:
        entries = self.page.evaluate("() => Object.entries(localStorage)")
        return [json.loads(value) for key, value in entries if key.startswith("starsd.conversation.")]

    def menu(self) -> list[str]:
        return self.page.locator("#conversations .entry span:first-child").all_inner_texts()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: starsd[dev] brings it")
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser is installed, expected one of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def fake() -> Iterator[Fake]:
    device = Fake()
    yield device
    device.kill()


@contextmanager
def _opened(browser: Browser, fake: Fake, *, may_fail: bool = False, **options: Any) -> Iterator[Chat]:
    """The page, opened with the options of a Playwright context; at the end nothing may have gone wrong."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, "reduced_motion": "reduce", **options})
    try:
        chat = Chat(context.new_page(), fake)
        chat.may_fail = may_fail
        yield chat.open()
        assert chat.errors == []
        assert chat.elsewhere == []
    finally:
        context.close()


@pytest.fixture(scope="module")
def opened(browser: Browser) -> Opened:
    """Opens a device's page: `with opened(fake, color_scheme="dark") as chat`."""
    return partial(_opened, browser)


@pytest.fixture
def chat(opened: Opened, fake: Fake) -> Iterator[Chat]:
    with opened(fake) as page:
        yield page
