"""Makes the pictures of docs/chat.md anew: `python tests/web_screenshots.py docs`. The conversations are invented."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from web_browser import BROWSERS, Chat
from web_fake import Fake, Reply

TIDES = """The Moon pulls on the sea, and the Earth turns underneath. So the water seems to come and go.

## What happens in a day

1. On the Moon's side the water is *high*.
2. On the far side it is high too: there the Moon pulls on the Earth **more** than on the water.
3. In between it is low.

| place | rise |
|---|---:|
| open sea | half a metre |
| a bay like a funnel | more than ten metres |

```python
def height(hours: float) -> float:
    return 0.25 * math.cos(2 * math.pi * hours / 12.42)
```

> Remember one number: `12.42` hours from one high tide to the next.
"""
HARBOUR = """The boats have folded up their wings,
the water keeps a light or two,
and someone on the far side sings
a song the harbour always knew.
"""
SOURCES = ["target", "remote", "remote", "target", "ngram", "remote", "remote", "remote", "target", "remote", "ngram"]


def reply(text: str) -> Reply:
    """Every word a token, and the figures that belong to these."""
    words = re.findall(r"\s*\S+|\s+$", text)
    by = [SOURCES[number % len(SOURCES)] for number in range(len(words))]
    counts = {source: by.count(source) for source in SOURCES}
    drafts = {
        "accepted_remote": counts["remote"],
        "accepted_ngram": counts["ngram"],
        "tau": len(words) / max(1, counts["target"]),
        "tokens_per_second": 31.5,
    }
    return Reply(words, sources=SOURCES, usage={"prompt_tokens": 20, "completion_tokens": len(words), "starsd": drafts})


def main(folder: Path) -> None:
    program = next(found for name in BROWSERS if (found := shutil.which(name)))
    phone = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    pictures = {
        "light": ({}, False, TIDES),
        "dark": ({"color_scheme": "dark"}, True, TIDES),
        "phone": (phone, False, HARBOUR),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (options, tinted, last) in pictures.items():
            fake = Fake()
            fake.status["model"] = "smollm2-135m"
            context = browser.new_context(**{"viewport": {"width": 1160, "height": 860}, **options})
            chat = Chat(context.new_page(), fake).open()
            for question, answer in [
                ("Plan a week of simple dinners", "Monday: soup."),
                ("Rhymes with tide?", "Wide."),
            ]:
                ask(chat, question, answer)
                chat.page.evaluate("() => document.querySelector('.new').click()")
            ask(
                chat,
                "A short poem about a quiet harbour" if last is HARBOUR else "Explain tides to a ten-year-old",
                last,
            )
            if tinted:
                chat.page.get_by_role("button", name="Show drafts").click()
            chat.page.evaluate("() => document.getElementById('scroll').scrollTo(0, 0)")
            chat.page.wait_for_timeout(500)
            chat.page.screenshot(path=folder / f"chat-{name}.png")
            context.close()
            fake.kill()
        browser.close()


def ask(chat: Chat, question: str, answer: str) -> None:
    chat.fake.replies.append(reply(answer))
    chat.page.fill("#prompt", question)
    chat.page.click("#send")
    chat.ended()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
