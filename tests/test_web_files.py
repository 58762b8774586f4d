"""The chat page's files: nothing from elsewhere, nothing that a strict policy forbids, nothing that parses markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from web_fake import WEB

FILES = sorted(path for path in WEB.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
LONGEST = 350  # lines, as of our Python

# What makes elements from text (inner- and the like), or code from it.
SINKS = ("innerH", "outerH", "AdjacentH", "setH", "document.w", "DOMP", "eval(", "new Fun", "srcd", 'Fragment("')


class Page(HTMLParser):
    """Tags with their attributes, and what stands between script and style tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.inside.append(data)


@pytest.fixture(scope="module")
def page() -> Page:
    parser = Page()
    parser.feed((WEB / "index.html").read_text())
    return parser


def test_the_page_has_no_inline_code_or_style(page: Page) -> None:
    assert page.inside == []
    assert not [tag for tag, _ in page.tags if tag == "style"]
    names = [name for _, attributes in page.tags for name in attributes]
    assert not [name for name in names if name == "style" or name.startswith("on")]


def test_the_page_carries_its_own_policy(page: Page) -> None:
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")


def test_what_the_page_names_is_there(page: Page) -> None:
    named = {value for _, attributes in page.tags for name in ("src", "href") if (value := attributes.get(name))}
    files = {name.removeprefix("web/") for name in named if not name.startswith("#")}
    assert files == {"icon.svg", "chat.css", "answer.css", "app.js"}
    assert all((WEB / name).is_file() for name in files)
    made = {attributes.get("id") for _, attributes in page.tags}
    assert {name[1:] for name in named if name.startswith("#")} <= made


def test_every_module_is_there_and_used() -> None:
    wanted = {name for path in SCRIPTS for name in re.findall(r' from "\./([\w.]+)"', path.read_text())}
    assert wanted | {"app.js"} == {path.name for path in SCRIPTS}


def test_ids_that_scripts_ask_for_are_in_the_page(page: Page) -> None:
    made = {attributes.get("id") for _, attributes in page.tags}
    asked = {
        name for path in SCRIPTS for name in re.findall(r'(?:\bat|getElementById)\("([\w-]+)"\)', path.read_text())
    }
    assert len(asked) > 15
    assert asked <= made


def test_icons_that_scripts_ask_for_are_in_the_page(page: Page) -> None:
    made = {attributes.get("id") for tag, attributes in page.tags if tag == "symbol"}
    asked = {name for path in SCRIPTS for name in re.findall(r'(?:\bicon|iconButton)\("(\w+)"', path.read_text())}
    assert asked
    assert {f"icon-{name}" for name in asked} <= made


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_small_and_from_here(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST
    assert path.suffix == ".html" or max(map(len, text.splitlines())) <= 120
    hosts = re.findall(r"https?://(?!www\.w3\.org/2000/svg)[\w.-]+\.\w+", text)
    assert hosts == []
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_never_parse_markup_or_code(path: Path) -> None:
    text = path.read_text()
    assert [sink for sink in SINKS if sink in text] == []
