"""How the chat page looks and is reached: keyboard, screen readers, dark, a phone's width, and little motion."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from web_fake import Fake, Reply

if TYPE_CHECKING:
    from web_browser import Chat, Opened

pytest_plugins = ("web_browser",)
pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
RICH = Reply(
    [
        "A **word**, [a link](https://example.org/), `code`.\n\n> quoted\n\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n",
        "```\n" + "long " * 60 + "\n```\n\n",
        "x" * 300,
    ],
    sources=["target", "remote", "ngram"],
)

# The contrast of every visible text with what is behind it, as WCAG 2 counts it; [ratio, text] of those below 4.5.
FAINT = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (colour, below = [255, 255, 255]) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = `rgb(${below.join(",")})`;
        canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (node) => {
        if (!node) return [255, 255, 255];
        return rgb(getComputedStyle(node).backgroundColor, behind(node.parentElement));
    };
    const found = [];
    let seen = 0;
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
        if (!own || node.closest(".unseen, .skip, :disabled")) continue;
        if (!node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
        seen += 1;
        const ground = behind(node);
        const [a, b] = [light(rgb(getComputedStyle(node).color, ground)), light(ground)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) found.push([Math.round(ratio * 100) / 100, node.textContent.slice(0, 40)]);
    }
    return [seen, found];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(opened: Opened, fake: Fake, scheme: str) -> None:
    fake.replies.append(RICH)
    with opened(fake, color_scheme=scheme) as chat:
        seen, faint = chat.page.evaluate(FAINT)
        assert (seen > 8, faint) == (True, [])
        chat.ask("Something long")
        chat.page.get_by_role("button", name="Show drafts").click()
        seen, faint = chat.page.evaluate(FAINT)
        assert (seen > 20, faint) == (True, [])
        chat.button("Settings").click()
        seen, faint = chat.page.evaluate(FAINT)
        assert (seen > 30, faint) == (True, [])


def test_the_measure_of_contrast_finds_faint_text(chat: Chat) -> None:
    chat.page.evaluate("() => { document.getElementById('where').style.color = '#b0b0b0' }")
    _, faint = chat.page.evaluate(FAINT)
    assert len(faint) == 1
    assert faint[0][1].startswith("tiny runs on this device")


def test_dark_follows_the_system_and_can_be_chosen(opened: Opened, fake: Fake) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    with opened(fake, color_scheme="dark") as chat:
        dark = chat.page.evaluate(ground)
        chat.button("Settings").click()
        chat.page.select_option("#settings [name=theme]", "light")
        chat.button("Save").click()
        light = chat.page.evaluate(ground)
        assert light != dark
        chat.page.reload()
        assert chat.page.evaluate(ground) == light
        chat.page.emulate_media(color_scheme="light")
        assert chat.page.evaluate(ground) == light


def test_everything_fits_a_phone(opened: Opened, fake: Fake) -> None:
    wide = "() => [document.documentElement.scrollWidth, document.getElementById('scroll').scrollWidth]"
    fake.replies.append(RICH)
    with opened(fake, **PHONE) as chat:
        assert max(chat.page.evaluate(wide)) <= 360
        chat.page.fill("#prompt", "y" * 200)
        chat.page.tap("#send")
        chat.ended()
        assert max(chat.page.evaluate(wide)) <= 360
        assert chat.page.locator("#sidebar").is_hidden()
        chat.button("Conversations").tap()
        assert chat.page.locator("#sidebar").is_visible()
        chat.page.tap(".new")
        chat.page.locator("#sidebar").wait_for(state="hidden")
        assert chat.page.inner_text("#title") == "New chat"
        chat.button("Settings").tap()
        assert max(chat.page.evaluate(wide)) <= 360
        chat.button("Save").tap()
        boxes = [button.bounding_box() for button in chat.page.locator("button:visible").all()]
        assert len(boxes) > 5
        assert [box for box in boxes if box is not None and min(box["width"], box["height"]) < 24] == []


def test_enter_makes_a_line_on_a_phone(opened: Opened, fake: Fake) -> None:
    with opened(fake, **PHONE) as chat:
        chat.page.fill("#prompt", "one")
        chat.page.press("#prompt", "Enter")
        assert chat.page.input_value("#prompt") == "one\n"
        assert fake.asked == []


def test_the_keyboard_is_enough(chat: Chat) -> None:
    keys = chat.page.keyboard
    keys.type("First line")
    keys.press("Shift+Enter")
    keys.type("second line")
    keys.press("Enter")
    chat.ended()
    assert chat.questions == ["First line\nsecond line"]
    keys.press("ArrowUp")  # edits the last turn
    keys.press("End")
    keys.type("!")
    keys.press("Enter")
    chat.until(lambda: chat.questions == ["First line\nsecond line!"])
    chat.ended()
    chat.fake.replies.append(Reply([f"word{n} " for n in range(300)], pause=0.02))
    chat.page.focus("#prompt")
    keys.type("Go on")
    keys.press("Enter")
    chat.answers.filter(has_text="word2").wait_for()
    keys.press("Escape")
    chat.ended()
    assert chat.page.locator("article.model").last.locator(".figures").inner_text() == "stopped"
    keys.press("Control+k")
    assert chat.page.inner_text("#title") == "New chat"
    assert chat.page.evaluate("() => document.activeElement.id") == "prompt"
    keys.press("Enter")
    assert len(chat.fake.asked) == 3  # an empty message is none


def test_every_control_is_reached_with_tab_and_shows_it(chat: Chat) -> None:
    chat.ask("Hello", RICH)
    chat.page.evaluate("() => document.activeElement.blur()")
    state = """() => {
        const node = document.activeElement;
        const style = getComputedStyle(node.id === "prompt" ? node.closest("form") : node);
        const name = node.getAttribute("aria-label") || node.textContent.trim() || node.id;
        return [name, style.outlineStyle !== "none" || node.id === "prompt"];
    }"""
    met: dict[str, bool] = {}
    for _ in range(40):
        chat.page.keyboard.press("Tab")
        name, marked = chat.page.evaluate(state)
        met[re.sub(r"\s+", " ", name)] = marked
    wanted = {"Go to the message box", "New chat Ctrl K", "Hello", "Delete “Hello”", "Show drafts", "Settings", "Copy"}
    wanted |= {"Answer again", "Edit and send again", "Keep on this device", "prompt", "a link", "code", "table"}
    assert wanted <= met.keys()
    assert [name for name in wanted if not met[name]] == []


def test_every_control_has_a_name(chat: Chat) -> None:
    chat.ask("Hello", RICH)
    controls = chat.page.locator("button, input, select, textarea, a, dialog")
    named = """(nodes) => nodes.map((node) => node.getAttribute("aria-label") || node.getAttribute("aria-labelledby")
        || node.textContent.trim() || node.labels?.[0]?.textContent)"""
    names = controls.evaluate_all(named)
    assert len(names) > 20
    assert all(names)
    ids = chat.page.evaluate("() => [...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))


def test_what_shows_a_picture_alone_says_what_it_is(opened: Opened, fake: Fake) -> None:
    """To whoever points at it, and to screen readers."""
    alone = """() => [...document.querySelectorAll("button, [role=img]")].filter((node) => !node.textContent.trim())
        .map((node) => [node.getAttribute("aria-label"), node.title])"""
    for options in ({}, PHONE):
        with opened(fake, **options) as chat:
            chat.page.evaluate("() => document.getElementById('private').click()")
            chat.page.fill("#prompt", "Hello")
            chat.page.click("#send")
            chat.ended()
            found = chat.page.evaluate(alone)
            names = {name for name, _ in found}
            assert {"Kept on this device", "Send", "Stop", "Show drafts", "Settings", "Copy", "Answer again"} <= names
            assert [name for name, title in found if not name or not title.startswith(name[:4])] == []


def test_the_bottom_line_is_in_the_middle(chat: Chat) -> None:
    """With figures and without."""
    off = """() => {
        const parts = [...document.querySelectorAll("#strip span")].map((part) => part.getBoundingClientRect());
        const shown = parts.filter((part) => part.width);
        const strip = document.getElementById("strip").getBoundingClientRect();
        return [shown.length, shown[0].left - strip.left - (strip.right - shown[shown.length - 1].right)];
    }"""
    count, distance = chat.page.evaluate(off)
    assert (count, abs(distance) < 2) == (1, True)
    chat.ask("Hello")
    count, distance = chat.page.evaluate(off)
    assert (count, abs(distance) < 2) == (3, True)


def test_screen_readers_hear_whole_blocks_once(chat: Chat) -> None:
    pieces = ["The first ", "paragraph.\n", "\nThe second", " one.\n\n- a\n- ", "b\n"]
    chat.ask("Hello", Reply(pieces, pause=0.1))
    heard = chat.page.locator("#announcer p").all_inner_texts()
    said = ["The first paragraph.", "The second one.", "a b", "End of the answer."]
    assert [" ".join(text.split()) for text in heard] == said
    assert chat.page.get_attribute("#announcer", "aria-live") == "polite"
    chat.page.click(".entry")  # what is there already is not read out
    assert chat.answers.count() == 1
    assert chat.page.locator("#announcer p").count() == 0


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_motion_only_where_it_is_wanted(opened: Opened, fake: Fake, motion: str) -> None:
    fake.replies.append(Reply(["", "later"], pause=0.5))
    with opened(fake, reduced_motion=motion) as chat:
        chat.send("Hello")
        chat.page.locator("article[aria-busy=true]").wait_for()
        moving = chat.page.evaluate("() => document.getAnimations().filter((one) => one.animationName).length")
        assert (moving > 0) == (motion == "no-preference")
        chat.ended()


def test_the_list_stays_as_it_is_while_nothing_changes(chat: Chat) -> None:
    """Else a click would miss whose button is made anew between press and release."""
    chat.ask("Hello")
    chat.page.evaluate("() => { document.querySelector('.entry').marked = true }")
    asked = chat.fake.paths.count("/v1/starsd/status")
    chat.until(lambda: chat.fake.paths.count("/v1/starsd/status") > asked + 1)
    assert chat.page.evaluate("() => document.querySelector('.entry').marked") is True
