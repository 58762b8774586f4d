"""The chat page in a real browser, talking to a fake device: what a user does with a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from web_fake import Reply

if TYPE_CHECKING:
    from web_browser import Chat

pytest_plugins = ("web_browser",)
pytestmark = pytest.mark.browser

SLOW = Reply([f"word{n} " for n in range(400)], pause=0.02)


def test_a_message_is_answered(chat: Chat) -> None:
    answer = chat.ask("Is *anybody* there?", Reply(["Some", "body **is**", "."]))
    assert answer.inner_html() == "<p>Somebody <strong>is</strong>.</p>"
    assert chat.questions == ["Is *anybody* there?"]
    (asked,) = chat.fake.asked
    assert asked == {
        "messages": [{"role": "user", "content": "Is *anybody* there?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "starsd": {"private": False, "show_drafts": True},
    }
    figures = chat.page.inner_text("article.model .figures")
    assert figures == "12 tokens · 31.5 a second · tau 2.20 · 4 drafted in the cloud · 3 on this device"
    chat.ask("And now?")
    assert chat.sent() == ["Is *anybody* there?", "Somebody **is**.", "And now?"]
    assert chat.page.title() == "Is *anybody* there? · starsd"


def test_text_shows_while_it_comes_and_stops(chat: Chat) -> None:
    chat.fake.replies.append(SLOW)
    chat.send("Go on and on")
    chat.answers.filter(has_text="word3").wait_for()
    assert chat.page.locator("article[aria-busy=true]").count() == 1
    assert not chat.button("Send").is_visible()
    chat.until(lambda: "tokens/s" in chat.page.inner_text("#speed"))
    chat.button("Stop").click()
    chat.ended()
    assert chat.fake.left.wait(10)  # the device is told
    shown = chat.answers.last.inner_text()
    assert "word3" in shown
    assert "word399" not in shown
    assert chat.page.inner_text(".figures") == "stopped"
    assert not chat.problem.count()
    assert chat.page.evaluate("() => document.activeElement.id") == "prompt"
    chat.ask("Still there?")
    assert chat.fake.asked[1]["messages"][1]["content"].startswith("word0 word1")


def test_editing_asks_again_and_can_be_undone(chat: Chat) -> None:
    chat.ask("One", Reply(["Answer one."]))
    chat.ask("Two", Reply(["Answer two."]))
    chat.button("Edit and send again").first.click()
    chat.page.fill("form.edit textarea", "One, but better")
    chat.page.press("form.edit textarea", "Enter")
    chat.answers.filter(has_text="Hello there.").wait_for()
    assert chat.questions == ["One, but better"]
    assert chat.fake.asked[-1]["messages"] == [{"role": "user", "content": "One, but better"}]
    assert chat.menu() == ["One, but better"]
    chat.button("Undo").click()
    assert chat.questions == ["One", "Two"]
    assert chat.answers.all_inner_texts() == ["Answer one.", "Answer two."]
    assert len(chat.stored()) == 1


def test_an_edit_can_be_given_up(chat: Chat) -> None:
    chat.ask("One")
    chat.button("Edit and send again").click()
    chat.page.fill("form.edit textarea", "Something else")
    chat.page.press("form.edit textarea", "Escape")
    assert chat.questions == ["One"]
    assert len(chat.fake.asked) == 1


def test_answering_again(chat: Chat) -> None:
    chat.ask("One", Reply(["Answer one."]))
    chat.button("Answer again").click()
    chat.answers.filter(has_text="Hello there.").wait_for()
    assert chat.questions == ["One"]
    assert chat.fake.asked[0] == chat.fake.asked[1]


def test_answering_again_stops_what_runs(chat: Chat) -> None:
    chat.fake.replies.append(SLOW)
    chat.send("Tell me")
    chat.answers.filter(has_text="word2").wait_for()
    chat.button("Edit and send again").click()
    chat.page.press("form.edit textarea", "Enter")
    chat.answers.filter(has_text="Hello there.").wait_for()
    assert chat.answers.count() == 1


def test_keep_on_this_device(chat: Chat) -> None:
    switch = chat.page.get_by_role("switch", name="Keep on this device")
    switch.click()
    assert switch.get_attribute("aria-checked") == "true"
    assert chat.page.inner_text("#link") == "kept on this device"
    chat.ask("A secret")
    assert chat.fake.asked[0]["starsd"]["private"] is True
    switch.click()  # would tell the server of what was kept
    assert "whole conversation" in chat.page.inner_text("#confirm")
    chat.page.locator("#confirm [data-no]").click()
    assert switch.get_attribute("aria-checked") == "true"
    chat.page.reload()
    assert switch.get_attribute("aria-checked") == "true"
    switch.click()
    chat.page.locator("#confirm [data-yes]").click()
    chat.ask("No secret")
    assert chat.fake.asked[1]["starsd"]["private"] is False
    switch.click()
    chat.button("New chat Ctrl K").click()
    assert switch.get_attribute("aria-checked") == "true"  # as the last one


def test_settings_reach_the_device(chat: Chat) -> None:
    chat.button("Settings").click()
    for name, value in [("temperature", "0.5"), ("top_p", "0.9"), ("top_k", "40"), ("max_tokens", "64"), ("seed", "7")]:
        chat.page.fill(f"#settings [name={name}]", value)
    chat.page.fill("#settings [name=system]", "Answer in rhyme.")
    chat.button("Save").click()
    chat.page.reload()
    chat.ask("Hello")
    asked = chat.fake.asked[0]
    assert asked["messages"][0] == {"role": "system", "content": "Answer in rhyme."}
    sampling = {name: asked.get(name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    assert sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 64, "seed": 7}
    chat.button("Settings").click()
    chat.button("Use the defaults").click()
    chat.page.fill("#settings [name=system]", "")
    chat.button("Save").click()
    chat.ask("Hello again")
    assert chat.fake.asked[1]["messages"][0]["role"] == "user"
    assert not {"temperature", "top_p", "top_k", "max_tokens", "seed"} & chat.fake.asked[1].keys()


def test_what_is_left_empty_shows_what_holds_then(chat: Chat) -> None:
    def shown() -> dict[str, str | None]:
        chat.button("Settings").click()
        names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
        found = {name: chat.page.get_attribute(f"#settings [name={name}]", "placeholder") for name in names}
        chat.button("Cancel").locator("visible=true").click()
        return found

    assert shown() == {
        "temperature": "0.8",
        "top_p": "0.95",
        "top_k": "all",
        "max_tokens": "up to 2048",
        "seed": "random",
    }
    chat.fake.status.update(sampling={"temperature": 0.6, "top_p": 1, "top_k": 20}, context=512)
    asked = chat.fake.paths.count("/v1/starsd/status")
    chat.until(lambda: chat.fake.paths.count("/v1/starsd/status") > asked + 1)
    assert shown() == {"temperature": "0.6", "top_p": "1", "top_k": "20", "max_tokens": "up to 512", "seed": "random"}


def test_settings_out_of_range_are_not_saved(chat: Chat) -> None:
    chat.button("Settings").click()
    chat.page.fill("#settings [name=temperature]", "3")
    chat.button("Save").click()
    assert chat.page.locator("#settings[open]").count() == 1
    chat.button("Cancel").locator("visible=true").click()
    chat.ask("Hello")
    assert "temperature" not in chat.fake.asked[0]


def test_two_conversations_are_answered_at_once(chat: Chat) -> None:
    chat.fake.replies.append(Reply([f"slow{n} " for n in range(60)], pause=0.03))
    chat.send("Slow one")
    chat.answers.filter(has_text="slow1").wait_for()
    chat.page.keyboard.press("Control+k")
    chat.ask("Quick one", Reply(["Quick."]))
    assert chat.answers.all_inner_texts() == ["Quick."]
    assert chat.page.locator(".running").count() == 1
    chat.page.locator(".running").wait_for(state="detached")
    assert chat.answers.all_inner_texts() == ["Quick."]
    chat.page.locator(".entry", has_text="Slow one").click()
    assert "slow59" in chat.answers.last.inner_text()


def test_drafts_are_tinted_on_demand(chat: Chat) -> None:
    sources = ["target", "remote", "ngram", "remote"]
    chat.ask("Who wrote it?", Reply(["One", " two", " **three", " four**"], sources=sources))
    assert chat.page.locator(".draft").locator("visible=true").count() == 0
    button = chat.page.get_by_role("button", name="Show drafts")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    tinted = chat.page.locator(".answer .draft")
    assert tinted.evaluate_all("(parts) => parts.map((part) => [part.className, part.textContent])") == [
        ["draft remote", "two"],
        ["draft ngram", "three"],
        ["draft remote", "four"],
    ]
    chat.page.reload()
    assert tinted.count() == 3
    button.click()
    assert tinted.count() == 0


def test_the_page_follows_the_text_unless_the_reader_is_elsewhere(chat: Chat) -> None:
    chat.fake.replies.append(Reply([f"line {n}\n\n" for n in range(150)], pause=0.01))
    chat.send("Many lines")
    chat.answers.filter(has_text="line 60").wait_for()
    gap = "() => { const s = document.getElementById('scroll'); return s.scrollHeight - s.scrollTop - s.clientHeight }"
    assert chat.page.evaluate(gap) < 200
    chat.page.evaluate("() => document.getElementById('scroll').scrollTo(0, 0)")
    chat.ended()
    assert chat.page.evaluate("() => document.getElementById('scroll').scrollTop") == 0
    chat.button("Go to the newest text").click()
    assert chat.page.evaluate(gap) < 5


def test_hostile_answers_and_questions_stay_text(chat: Chat) -> None:
    hostile = "<img src=x onerror='document.title=1'> [a](javascript:document.title=2) ![b](https://example.org/x.png)"
    chat.ask(hostile, Reply([hostile[:10], hostile[10:40], hostile[40:]]))
    assert chat.questions == [hostile]
    assert chat.menu() == [hostile[:59].rstrip() + "…"]
    assert chat.page.locator("article img, #conversations img").count() == 0
    links = chat.page.locator("article a").evaluate_all("(links) => links.map((link) => link.href)")
    assert links == ["https://example.org/x.png"]
    assert chat.page.title().startswith("<img")
