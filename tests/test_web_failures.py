"""The chat page when something goes wrong: a device that is away, busy, locked, or refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from web_fake import Fake, Reply

if TYPE_CHECKING:
    from web_browser import Chat, Opened

pytest_plugins = ("web_browser",)
pytestmark = pytest.mark.browser

BUSY = Reply(status=429, message="all are taken", code="rate_limit_exceeded", headers={"Retry-After": "1"})
OVERFLOW = Reply(status=400, message="maximum context length is 2048", code="context_length_exceeded")
SLOW = Reply([f"word{n} " for n in range(400)], pause=0.02)


def test_a_device_that_is_killed_and_comes_back(chat: Chat) -> None:
    chat.may_fail = True
    chat.fake.replies.append(SLOW)
    chat.send("Tell me")
    chat.answers.filter(has_text="word5").wait_for()
    chat.fake.kill()
    chat.ended()
    assert chat.problem.inner_text().splitlines()[0] == "The connection was lost before the answer ended."
    assert "word5" in chat.answers.last.inner_text()
    chat.page.locator("#link[data-state=away]").wait_for()
    assert chat.page.inner_text("#link") == "device not reached"
    chat.button("Try again").click()
    chat.problem.filter(has_text="The device cannot be reached just now.").wait_for()
    again = Fake(chat.fake.port)
    try:
        chat.page.locator("#link[data-state=up]").wait_for()
        chat.button("Try again").click()
        chat.answers.filter(has_text="Hello there.").wait_for()
        assert chat.problem.count() == 0
        assert again.asked[0]["messages"] == [{"role": "user", "content": "Tell me"}]
    finally:
        again.kill()


@pytest.mark.parametrize(
    ("finish", "late_error", "said"),
    [
        (None, "", "The connection was lost before the answer ended."),
        ("", "", "The connection was lost before the answer ended."),
        ("stop", "engine failed", "Something went wrong on the device: engine failed."),
    ],
)
def test_an_answer_that_breaks_off_is_not_taken_for_whole(
    chat: Chat, finish: str | None, late_error: str, said: str
) -> None:
    chat.may_fail = True
    chat.ask("Tell me", Reply(["Once upon"], pause=0.2, finish=finish, late_error=late_error))
    assert chat.problem.inner_text().splitlines()[0] == said
    assert chat.stored()[0]["messages"][1]["state"] == "broken"
    chat.button("Try again").click()
    chat.answers.filter(has_text="Hello there.").wait_for()
    assert chat.questions == ["Tell me"]


def test_link_states(chat: Chat) -> None:
    for changes, words in [
        ({"link": "lost", "regime": "device only"}, "device only · cloud away"),
        ({"link": "connecting"}, "device only · reaching the cloud"),
        ({"link": "up", "busy": 1, "regime": "waits"}, "cloud drafts · 82 ms · waits for drafts"),
        ({"regime": "device only"}, "device only · cloud linked · 82 ms"),
        ({"link": "off", "server": "", "rtt_ms": None, "regime": "device only"}, "device only"),
    ]:
        chat.fake.status.update(changes)
        chat.until(lambda words=words: chat.page.inner_text("#link") == words)  # type: ignore[misc]


def test_nothing_is_kept_from_a_server_that_is_not_there(chat: Chat) -> None:
    switch = chat.page.locator("#private")
    assert switch.is_visible()
    for link, shown in (("off", False), ("lost", True)):
        chat.fake.status["link"] = link
        chat.until(lambda shown=shown: switch.is_visible() == shown)  # type: ignore[misc]


def test_a_key_is_asked_for(opened: Opened, fake: Fake) -> None:
    fake.key = "open sesame"
    with opened(fake, may_fail=True) as chat:
        chat.page.locator("#key[open]").wait_for()
        chat.button("Cancel").locator("visible=true").click()
        assert chat.page.inner_text("#link") == "API key needed"
        chat.send("Let me in")
        chat.page.locator("#key[open]").wait_for()
        chat.page.fill("#key input[name=key]", "wrong")
        chat.button("Go on").click()
        chat.page.locator("#key[open]").wait_for()
        chat.page.fill("#key input[name=key]", "open sesame")
        chat.button("Go on").click()
        chat.answers.filter(has_text="Hello there.").wait_for()
        assert fake.asked[0]["messages"] == [{"role": "user", "content": "Let me in"}]
        assert chat.page.evaluate("() => localStorage.getItem('starsd.key')") is None
        chat.page.locator("#link[data-state=up]").wait_for()
        chat.page.reload()
        chat.page.locator("#link[data-state=up]").wait_for()
        assert not chat.page.locator("#key[open]").count()


def test_a_key_that_is_not_given_leaves_a_way_back(opened: Opened, fake: Fake) -> None:
    fake.key = "open sesame"
    with opened(fake, may_fail=True) as chat:
        chat.page.keyboard.press("Escape")
        chat.send("Let me in")
        chat.page.locator("#key[open]").wait_for()
        chat.page.keyboard.press("Escape")
        assert chat.problem.inner_text().splitlines()[0] == "The device asks for an API key."
        chat.button("Enter it").click()
        chat.page.fill("#key input[name=key]", "open sesame")
        chat.page.check("#key input[name=remember]")
        chat.page.press("#key input[name=key]", "Enter")
        chat.answers.filter(has_text="Hello there.").wait_for()
        assert chat.page.evaluate("() => localStorage.getItem('starsd.key')") == "open sesame"


def test_a_busy_device_is_waited_for(chat: Chat) -> None:
    chat.may_fail = True
    chat.fake.replies += [BUSY, Reply(status=503, message="ending", headers={"Retry-After": "60"})]
    chat.send("Hello?")
    chat.problem.filter(has_text="Trying again in 1 s").wait_for()
    chat.problem.filter(has_text="Trying again in 60 s").wait_for()
    chat.button("Try now").click()
    chat.ended()
    assert chat.answers.last.inner_text() == "Hello there."
    assert len(chat.fake.asked) == 3
    assert not chat.problem.count()


def test_waiting_can_be_stopped(chat: Chat) -> None:
    chat.may_fail = True
    chat.fake.replies.append(Reply(status=429, message="all are taken", headers={"Retry-After": "60"}))
    chat.send("Hello?")
    chat.problem.wait_for()
    chat.page.keyboard.press("Escape")
    chat.ended()
    assert not chat.problem.count()
    assert len(chat.fake.asked) == 1


def test_a_conversation_that_is_too_long_goes_on_without_its_beginning(chat: Chat) -> None:
    chat.may_fail = True
    for word in ("One", "Two", "Three"):
        chat.ask(word)
    chat.ask("Four", OVERFLOW)
    assert chat.problem.inner_text().splitlines()[0] == "This conversation has become longer than the model can hold."
    chat.fake.replies.append(OVERFLOW)
    chat.button("Leave out the oldest turns").click()
    chat.until(lambda: len(chat.fake.asked) == 5)
    chat.ended()
    assert chat.sent() == ["Three", "Hello there.", "Four"]
    chat.button("Leave out the oldest turns").click()
    chat.until(lambda: len(chat.fake.asked) == 6)
    chat.ended()
    assert chat.sent() == ["Four"]
    assert chat.questions == ["One", "Two", "Three", "Four"]
    assert chat.page.inner_text(".divider") == "What is above is not sent to the model any more"
    chat.page.reload()
    assert chat.page.locator(".divider").count() == 1
    chat.button("Edit and send again").first.click()  # above the line
    chat.page.fill("form.edit textarea", "One more")
    chat.page.press("form.edit textarea", "Enter")
    chat.answers.filter(has_text="Hello there.").wait_for()
    assert (chat.questions, chat.sent()) == (["One more"], ["One more"])
    assert chat.page.locator(".divider").count() == 0


def test_one_turn_that_is_too_long(chat: Chat) -> None:
    chat.may_fail = True
    chat.ask("Much too long", OVERFLOW)
    chat.button("Leave out the oldest turns").click()
    assert "a shorter message" in chat.page.inner_text("#notices")
    assert len(chat.fake.asked) == 1


def test_a_refusal_says_why(chat: Chat) -> None:
    chat.may_fail = True
    chat.ask("Hello?", Reply(status=400, message="temperature: expected at most 2"))
    assert chat.problem.inner_text().splitlines()[0] == "The device did not take this: temperature: expected at most 2."


def test_turns_without_an_answer_are_joined(chat: Chat) -> None:
    chat.may_fail = True
    chat.ask("One", Reply(status=500, message="no"))
    chat.ask("Two")
    assert chat.fake.asked[1]["messages"] == [{"role": "user", "content": "One\n\nTwo"}]
