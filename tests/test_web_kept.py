"""What the chat page keeps in the browser: conversations outlive it, are bounded, and can be taken elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from web_fake import Reply

if TYPE_CHECKING:
    from web_browser import Chat

pytest_plugins = ("web_browser",)
pytestmark = pytest.mark.browser

SLOW = Reply([f"word{n} " for n in range(400)], pause=0.02)


def test_conversations_outlive_the_page(chat: Chat) -> None:
    chat.ask("First of all")
    chat.page.keyboard.press("Control+k")
    chat.ask("A second one", Reply(["Two."]))
    assert chat.menu() == ["A second one", "First of all"]
    chat.page.reload()
    assert chat.questions == ["A second one"]
    assert chat.answers.last.inner_text() == "Two."
    chat.page.locator(".entry", has_text="First of all").click()
    assert chat.answers.last.inner_text() == "Hello there."
    chat.ask("Go on")
    assert len(chat.fake.asked[-1]["messages"]) == 3
    assert chat.menu() == ["First of all", "A second one"]


def test_a_reload_in_the_middle_of_an_answer_keeps_its_beginning(chat: Chat) -> None:
    chat.fake.replies.append(SLOW)
    chat.send("Tell me")
    chat.answers.filter(has_text="word5").wait_for()
    chat.page.reload()
    assert "word5" in chat.answers.last.inner_text()
    assert chat.problem.inner_text().splitlines()[0] == "The page was closed before this answer ended."
    assert chat.fake.left.wait(10)
    chat.button("Try again").click()
    chat.answers.filter(has_text="Hello there.").wait_for()


def test_delete_undo_export_and_import(chat: Chat, tmp_path: Path) -> None:
    chat.ask("Keep me", Reply(["Kept."]))
    chat.button("Delete “Keep me”").click()
    assert (chat.menu(), chat.questions, chat.stored()) == ([], [], [])
    chat.button("Undo").click()
    assert chat.menu() == ["Keep me"]
    chat.button("Settings").click()
    with chat.page.expect_download() as download:
        chat.button("Export").click()
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text())
    assert exported["conversations"][0]["messages"][0] == {"role": "user", "content": "Keep me"}
    chat.button("Delete all").click()
    chat.button("Delete").click()
    assert (chat.menu(), chat.stored()) == ([], [])
    chat.page.set_input_files("#file", file)
    chat.page.locator(".entry", has_text="Keep me").click()
    assert chat.answers.last.inner_text() == "Kept."


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", '{"format": "other"}', '{"format":"starsd conversations","conversations":{}}'],
)
def test_files_that_are_something_else(chat: Chat, content: str) -> None:
    chat.page.set_input_files("#file", {"name": "x.json", "mimeType": "application/json", "buffer": content.encode()})
    chat.page.locator("#notices", has_text="Nothing was read").wait_for()
    assert chat.stored() == []


def test_entries_that_are_damaged_do_no_harm(chat: Chat) -> None:
    good: dict[str, Any] = {"id": "good", "title": "Good", "messages": [{"role": "user", "content": "Hi"}]}
    bad: list[Any] = [None, 7, {"id": "x2", "messages": {}}]
    bad.append({**good, "id": "x3", "messages": [{"role": "root", "content": ""}]})
    bad.append({**good, "id": "x4", "messages": [{"role": "user", "content": 1}]})
    bad.append({**good, "id": "another than its key's"})
    entries = {f"starsd.conversation.x{number}": json.dumps(one) for number, one in enumerate(bad)}
    entries["starsd.conversation.good"] = json.dumps({**good, "from": 99, "private": 1, "updated": "x"})
    entries["starsd.conversation.y"] = "{"
    entries["starsd.settings"] = '{"temperature":"hot","theme":7}'
    chat.page.evaluate("(entries) => Object.entries(entries).forEach(([k, v]) => localStorage.setItem(k, v))", entries)
    chat.page.reload()
    assert chat.menu() == ["Good"]
    chat.page.click(".entry")
    assert chat.questions == ["Hi"]


def test_the_browser_keeps_a_bounded_number(chat: Chat) -> None:
    script = """() => import("/web/store.js").then(({ MOST, Store, newConversation }) => {
        const gone = [];
        const store = new Store({ onforget: (titles) => gone.push(...titles) });
        const save = (title, updated, content) =>
            store.save({ ...newConversation("", false), title, updated, messages: [{ role: "user", content }] });
        for (let n = 0; n < MOST + 3; n += 1) {
            save(`n${n}`, n, "x");
        }
        save("long", 1000, "x".repeat(3_999_900));
        return [MOST, gone.slice(0, 3), store.all().length];
    })"""
    most, gone, held = chat.page.evaluate(script)
    assert gone == ["n0", "n1", "n2"]
    assert held == len(chat.stored())
    assert 50 < held <= 101 < most


def test_another_tab_sees_changes(chat: Chat) -> None:
    chat.ask("In the first tab")
    other = chat.page.context.new_page()
    other.goto(chat.page.url)
    other.fill("#prompt", "In the second")
    other.press("#prompt", "Enter")
    other.locator("article.model .answer").nth(1).filter(has_text="Hello").wait_for()
    chat.until(lambda: chat.questions == ["In the first tab", "In the second"])


def test_an_answer_that_was_never_ended_says_so(chat: Chat) -> None:
    """As a browser leaves it that was killed, or ran out of power."""
    answer = {"role": "assistant", "content": "Once upon", "state": "running"}
    one = {"id": "x", "title": "X", "messages": [{"role": "user", "content": "Tell me"}, answer]}
    chat.page.evaluate("(one) => localStorage.setItem('starsd.conversation.x', JSON.stringify(one))", one)
    chat.page.reload()
    chat.page.click(".entry")
    assert chat.problem.inner_text().splitlines()[0] == "The page was closed before this answer ended."
    chat.button("Try again").click()
    chat.answers.filter(has_text="Hello there.").wait_for()
