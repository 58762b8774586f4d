"""The chat page's Markdown in a real browser: what it makes of text, its safety, and that streaming changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from web_fake import Fake

pytest_plugins = ("web_browser",)
pytestmark = pytest.mark.browser

# What is shown at once, and what is shown while it comes in parts of which `cuts` are the ends.
LOAD = """async () => {
    const { MarkdownView } = await import("/web/markdown.js");
    const { painter, addTokens } = await import("/web/drafts.js");
    const strip = (place) => {
        for (const caption of place.querySelectorAll("figcaption")) caption.remove();
        return place.innerHTML.replaceAll(/ (target|rel|title|tabindex|aria-label|role)="[^"]*"/g, "");
    };
    window.shown = (text) => {
        const place = document.createElement("div");
        new MarkdownView(place).show(text);
        return strip(place);
    };
    window.said = (text) => {
        const place = document.createElement("div");
        new MarkdownView(place).show(text);
        return place.textContent;
    };
    window.streamed = (text, cuts) => {
        const place = document.createElement("div");
        const heard = [];
        const view = new MarkdownView(place, { onblock: (node) => heard.push(node) });
        for (const cut of cuts) view.show(text.slice(0, cut), false);
        view.show(text, true);
        const all = [...place.childNodes];
        return heard.length === all.length && heard.every((node, i) => node === all[i]) ? strip(place) : "heard wrong";
    };
    window.painted = (text, tokens) => {
        const runs = [];
        addTokens(runs, tokens);
        const place = document.createElement("div");
        const view = new MarkdownView(place, { paint: painter(runs) });
        for (let cut = 1; cut < text.length; cut += 1) view.show(text.slice(0, cut), false);
        view.show(text);
        return [...place.querySelectorAll(".draft")].map((part) => [part.className, part.textContent]);
    };
    window.built = (text) => {
        const began = performance.now();
        const place = document.createElement("div");
        new MarkdownView(place).show(text);
        document.getElementById("thread").replaceChildren(place);
        place.getBoundingClientRect();
        const seconds = (performance.now() - began) / 1000;
        document.getElementById("thread").replaceChildren();
        return [seconds, place.textContent.length];
    };
}"""


@pytest.fixture(scope="module")
def page(opened: Any) -> Iterator[Any]:
    fake = Fake()
    with opened(fake) as chat:
        chat.page.evaluate(LOAD)
        yield chat.page
    fake.kill()


@pytest.fixture(scope="module")
def shown(page: Any) -> Callable[[str], str]:
    return lambda text: str(page.evaluate("(text) => shown(text)", text))


CASES = {
    "": "",
    "one\ntwo": "<p>one<br>two</p>",
    "one  \ntwo\\\nthree": "<p>one<br>two<br>three</p>",
    "one\n\ntwo": "<p>one</p><p>two</p>",
    "a\r\nb\r\n\r\nc": "<p>a<br>b</p><p>c</p>",
    "# A #\n## B ##c\n####### D": "<h3>A</h3><h4>B ##c</h4><p>####### D</p>",
    "A\n===\nB\n---": "<h3>A</h3><h4>B</h4>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "* * *": "<hr>",
    "*a* _b_ **c** __d__ ***e*** ~~f~~": "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> "
    "<em><strong>e</strong></em> <s>f</s></p>",
    "snake_case_name 2 * 3 * 4 ~1~": "<p>snake_case_name 2 * 3 * 4 ~1~</p>",
    "*open **and** closed*, *not": "<p><em>open <strong>and</strong> closed</em>, *not</p>",
    "**a*": "<p>*<em>a</em></p>",
    "*a **b*": "<p>*a *<em>b</em></p>",
    r"\*a\* \[b\] c\d": "<p>*a* [b] c\\d</p>",
    "`a` ``b ` c`` `d": "<p><code>a</code> <code>b ` c</code> `d</p>",
    "`*a*` *b `c*`": "<p><code>*a*</code> *b <code>c*</code></p>",
    "&lt;b&gt; &amp; &#65; &#x42; &bogus; &constructor;": "<p>&lt;b&gt; &amp; A B &amp;bogus; &amp;constructor;</p>",
    "```py\na < b\n  c\n```\nd": '<figure class="code"><pre><code>a &lt; b\n  c</code></pre></figure><p>d</p>',
    "~~~~\n```\n~~~\n~~~~": '<figure class="code"><pre><code>```\n~~~</code></pre></figure>',
    "```\nnever closed\n# x": '<figure class="code"><pre><code>never closed\n# x</code></pre></figure>',
    "a\n\n    b\n\n      c\n\nd": '<p>a</p><figure class="code"><pre><code>b\n\n  c</code></pre></figure><p>d</p>',
    "> a\n> > b\nlazy\n\nc": "<blockquote><p>a</p><blockquote><p>b<br>lazy</p></blockquote></blockquote><p>c</p>",
    "- a\n- b\n  - c\n    more\n- d": "<ul><li>a</li><li>b<ul><li>c<br>more</li></ul></li><li>d</li></ul>",
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "- a\n\n  b\n- c": "<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>",
    "- a\n+ b": "<ul><li>a</li></ul><ul><li>b</li></ul>",
    "1. a\n2. b": "<ol><li>a</li><li>b</li></ol>",
    "7) a\n8) b": '<ol start="7"><li>a</li><li>b</li></ol>',
    "1. a\n  - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "in 1999\n1984. was": "<p>in 1999<br>1984. was</p>",
    "- ```\n  a\n\n  b\n  ```\n- c": '<ul><li><figure class="code"><pre><code>a\n\nb</code></pre></figure></li>'
    "<li>c</li></ul>",
    "+ \tb": "<ul><li>b</li></ul>",
    "- [ ] a\n- [x] b": '<ul><li class="task"><input type="checkbox" disabled=""> a</li>'
    '<li class="task"><input type="checkbox" disabled=""> b</li></ul>',
    "| a | b |\n|---|--:|\n| *c* | d \\| e |\n| f |\n\ng": '<div class="table"><table><thead><tr><th scope="col">a</th>'
    '<th class="right" scope="col">b</th></tr></thead><tbody><tr><td><em>c</em></td><td class="right">d | e</td></tr>'
    '<tr><td>f</td><td class="right"></td></tr></tbody></table></div><p>g</p>',
    "a | b\n-- | --\n1<br>2 | 3": '<div class="table"><table><thead><tr><th scope="col">a</th><th scope="col">b</th>'
    "</tr></thead><tbody><tr><td>1<br>2</td><td>3</td></tr></tbody></table></div>",
    "not | a table\n\n-- | --": "<p>not | a table</p><p>-- | --</p>",
    '[a *b*](https://example.org/x_(y) "t") c': '<p><a href="https://example.org/x_(y)">a <em>b</em></a> c</p>',
    "[a](<https://example.org/b>)": '<p><a href="https://example.org/b">a</a></p>',
    "see https://example.org/a_b_c?d=1, (http://example.org/).": '<p>see <a href="https://example.org/a_b_c?d=1">'
    'https://example.org/a_b_c?d=1</a>, (<a href="http://example.org/">http://example.org/</a>).</p>',
    "<https://example.org/?a=1&b=2>": '<p><a href="https://example.org/?a=1&amp;b=2">https://example.org/?a=1&amp;b=2</a></p>',
    "![a cat](https://example.org/cat.png)": '<p><a href="https://example.org/cat.png" class="picture">a cat</a></p>',
    "[https://example.org](https://example.net)": '<p><a href="https://example.net/">https://example.org</a></p>',
}


@pytest.mark.parametrize("text", CASES, ids=range(len(CASES)))
def test_markdown(shown: Callable[[str], str], text: str) -> None:
    assert shown(text) == CASES[text]


HOSTILE = [
    "<script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 1'>",
    "<svg onload=window.hurt=1><a href=javascript:hurt=1>x</a></svg>",
    "[x](javascript:window.hurt=1)",
    "[x](JaVaScRiPt:window.hurt=1) [y](java\nscript:hurt=1) [z](&#106;avascript:hurt=1)",
    "[x](data:text/html,<script>hurt=1</script>)",
    "[x](vbscript:hurt) [y](file:///etc/passwd) [z](//example.org) [w](mailto:a@example.org)",
    "<javascript:alert(1)> <data:text/html,x>",
    '[x](https://example.org" onmouseover="window.hurt=1)',
    "![x](javascript:window.hurt=1)",
    "```<img src=x onerror=window.hurt=1>\n</code><script>window.hurt=1</script>\n```",
    '```js onload=1" class="x\n1\n```',
    "| <script>window.hurt=1</script> | b |\n|---|---|\n| <img src=x onerror=window.hurt=1> | [x](javascript:hurt=1) |",
    "&lt;script&gt;window.hurt=1&lt;/script&gt; &#60;img src=x onerror=window.hurt=1&#62;",
    "<style>body{display:none}</style><iframe src=https://example.org></iframe>",
    "# <b onclick=window.hurt=1>x</b>\n> <form action=https://example.org><input name=x></form>",
    "\u202etxt.exe \u0000 \ud800",
]
ALLOWED = {
    *("A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DIV", "EM", "FIGCAPTION", "FIGURE", "H3", "H4", "H5", "H6", "HR"),
    *("INPUT", "LI", "OL", "P", "PRE", "S", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"),
    *("svg", "use"),
}
INSPECT = """(text) => {
    const place = document.createElement("div");
    document.body.append(place);
    return import("/web/markdown.js").then(({ MarkdownView }) => {
        new MarkdownView(place).show(text);
        const all = [...place.querySelectorAll("*")];
        place.remove();
        return {
            tags: all.map((node) => node.nodeName),
            names: all.flatMap((node) => node.getAttributeNames()),
            links: all.filter((node) => node.nodeName === "A").map(({ href, rel, target }) => [href, rel, target]),
        };
    });
}"""


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(page: Any, text: str) -> None:
    found = page.evaluate(INSPECT, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    assert set(found["tags"]) <= ALLOWED
    assert not [name for name in found["names"] if name.startswith("on") or name in ("style", "src", "id", "srcset")]
    for href, rel, target in found["links"]:
        assert href.startswith(("http://", "https://"))
        assert (rel, target) == ("noopener noreferrer", "_blank")
    assert page.evaluate("() => window.hurt") is None


PARTS = """a|b c| |  |    |- |* |1. |2) |> |# |```|~~~|`|``|*|**|_|~~|[|](|)|https://example.org/|---|===|<br>|&amp;|![
[x](https://example.org)|- [ ] |-|é|😀|<|>|+ |\\""".replace("\n", "|").split("|")
PARTS += ["|", "|---|", "| a | b |\n", "\t", "\n", "\n\n", "\r\n", "\n- ", "\n  ", "\n```\n", "\n> "]


def pieces(chance: random.Random) -> str:
    """Markdown with everything in it, in any order."""
    return "".join(chance.choice(PARTS) for _ in range(chance.randint(1, 60)))


def test_streaming_changes_nothing(page: Any) -> None:
    chance = random.Random(6)
    texts = [pieces(chance) for _ in range(400)] + [*CASES, *HOSTILE[:-1]]
    jobs = []
    for text in texts:
        length = len(text.encode("utf-16-le")) // 2
        every = range(1, length) if length < 60 else sorted(chance.sample(range(1, length), 40))
        jobs.append([text, list(every)])
    different = page.evaluate("(jobs) => jobs.filter(([text, cuts]) => shown(text) !== streamed(text, cuts))", jobs)
    assert [(*job, page.evaluate("([t, c]) => [shown(t), streamed(t, c)]", job)) for job in different[:3]] == []


def test_no_letter_is_lost_by_layout(page: Any) -> None:
    chance = random.Random(7)
    for _ in range(200):
        text = "".join(letter for letter in pieces(chance) if letter not in "`~|")  # fences and tables drop some
        kept = page.evaluate("(text) => said(text)", text)
        assert kept.count("b c") == text.count("b c")


GIANT = 48_000  # characters; a block with more than 50,000 is not laid out
GIANTS = {
    "brackets": "[" * GIANT,
    "links": "[a](" * (GIANT // 4),
    "stars": "*a " * (GIANT // 3),
    "nested stars": "*a " * (GIANT // 6) + "a* " * (GIANT // 6),
    "both ways": "a**b" + "c* " * (GIANT // 3),
    "underscores": "_" * GIANT,
    "backticks": "".join("`" * n + " " for n in range(1, 300)),
    "quotes": ">" * GIANT,
    "deep quotes and lists": "\n".join("> " * n + "- a" for n in range(1, 300)),
    "deep lists": "\n".join("  " * n + "- a" for n in range(1, 400)),
    "many items": "- a\n" * (GIANT // 4),
    "one item of many lines": "- a\n" + "  b\n\n" * (GIANT // 5),
    "addresses": "http://" * (GIANT // 7),
    "trailing brackets": "http://a" + ")" * GIANT,
    "spaces": "# " + " " * GIANT + "a",
    "hashes": "# " + "#" * GIANT + "a",
    "table": "|a" * (GIANT // 4) + "\n" + "|-" * (GIANT // 4),
    "rows": "a | b\n-|-\n" + "c | d\n" * (GIANT // 6),
    "angles": "<" * GIANT,
    "entities": "&" * GIANT,
    "one line": "*word* " * (GIANT // 7),
    "a longer line": "*word* " * GIANT,
    "letters behind stars": "*a" * (GIANT // 2),
    "a book": "# Title\n\nSome *words* of `text`, [here](https://example.org).\n\n" * (GIANT // 64),
    "more than is laid out": "a *b*\n\n" * 100_000,
}


@pytest.mark.parametrize("name", GIANTS)
def test_giant_text_takes_no_time(page: Any, name: str) -> None:
    seconds, letters = page.evaluate("(text) => built(text)", GIANTS[name])
    assert letters > 0 or name in ("quotes", "hashes", "underscores")
    assert seconds < 4  # milliseconds where it is idle; what grows with the square takes minutes


def test_drafts_are_tinted_where_they_stand(page: Any) -> None:
    text = "The **Moon** pulls\n\n- the `sea`\n- up\n\n```\nx = 1\n```\n"
    parts = ["The **Mo", "on** pu", "lls\n\n- the", " `sea`\n- u", "p\n\n```\nx", " = 1\n```\n"]
    sources = ["target", "remote", "ngram", "remote", "target", "remote"]
    tokens = [{"text": part, "source": source} for part, source in zip(parts, sources, strict=True)]
    assert "".join(token["text"] for token in tokens) == text
    painted = page.evaluate("([text, tokens]) => painted(text, tokens)", [text, tokens])
    assert painted == [
        *(["draft remote", "on"], ["draft remote", "pu"], ["draft ngram", "lls"], ["draft ngram", "the"]),
        *(["draft remote", "sea"], ["draft remote", "u"], ["draft remote", "= 1"]),
    ]


def test_code_that_is_being_written_keeps_its_element(page: Any) -> None:
    same = """async () => {
        const { MarkdownView } = await import("/web/markdown.js");
        const place = document.createElement("div");
        const view = new MarkdownView(place);
        view.show("```py\\na", false);
        const code = place.querySelector("code");
        view.show("```py\\na = 1\\nb", false);
        return [code === place.querySelector("code"), code.textContent];
    }"""
    assert page.evaluate(same) == [True, "a = 1\nb"]


def test_copying_code(page: Any) -> None:
    script = """async () => {
        const { MarkdownView } = await import("/web/markdown.js");
        const place = document.getElementById("thread");
        new MarkdownView(place).show("```py\\na = 1\\n```");
    }"""
    page.evaluate(script)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("() => document.body.classList.remove('empty')")
    page.click("figure.code button")
    page.locator("figure.code button[aria-label=Copied]").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == "a = 1"
