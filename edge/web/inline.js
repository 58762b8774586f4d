/**
 * What is inside a block of Markdown, as nodes: emphasis, code, links, line breaks. CommonMark's algorithm with its
 * delimiter stack, so that time grows with the length of the text, whatever is in it.
 *
 * No node comes from parsing markup, only http and https become links, and pictures become links too: nothing is
 * fetched.
 */

import { element } from "./dom.js";
import { Delimiters, flanks } from "./emphasis.js";
import { addressAt, destination, link, MOST_ADDRESS, safe } from "./links.js";

const SPECIAL = /[\\`*_~[\]!<&\n]|https?:\/\//g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  mdash: "—",
  ndash: "–",
  hellip: "…",
};

/**
 * A fragment with the nodes of `lines`, { text, at } each. `paint(from, to, text)` makes the nodes of a stretch of text
 * that stands at `from` in the whole source; without it a text node does.
 */
export function inline(lines, paint) {
  return new Inline(lines, paint).parse();
}

class Inline {
  constructor(lines, paint) {
    this.text = lines.map((line) => line.text).join("\n");
    this.lines = lines;
    this.paint = paint;
    this.root = document.createDocumentFragment();
    this.delimiters = new Delimiters();
    this.brackets = [];
    this.ticks = null; // lengths of runs of backticks: where they begin, last one first
    this.line = 0; // of `origin`, which is asked in order
    this.starts = [];
    let start = 0;
    for (const line of lines) {
      this.starts.push(start);
      start += line.text.length + 1;
    }
  }

  parse() {
    let at = 0;
    let plain = 0; // where the text begins that has no node yet
    while (at < this.text.length) {
      SPECIAL.lastIndex = at;
      const found = SPECIAL.exec(this.text);
      if (!found) break;
      at = found.index;
      this.plain = plain;
      const next = this.special(at, found[0][0]);
      if (next > at) plain = at = next;
      else at += 1;
    }
    this.add(plain, this.text.length);
    this.delimiters.pair(null);
    return this.root;
  }

  /** Where the text goes on behind the special thing at `at`; `at` itself if there is none. */
  special(at, letter) {
    switch (letter) {
      case "\\":
        return this.escape(at);
      case "`":
        return this.code(at);
      case "\n":
        return this.lineBreak(at);
      case "[":
        return this.open(at, at + 1);
      case "!":
        return this.text[at + 1] === "[" ? this.open(at, at + 2) : at;
      case "]":
        return this.close(at);
      case "<":
        return this.angle(at);
      case "&":
        return this.entity(at);
      case "h":
        return this.address(at);
      default:
        return this.delimiter(at, letter);
    }
  }

  /** Everything up to `at` gets nodes; then `node`. */
  put(at, node) {
    this.add(this.plain, at);
    this.root.append(node);
  }

  add(from, to) {
    if (from < to) this.root.append(...this.nodes(from, to));
  }

  nodes(from, to) {
    if (!this.paint) return [document.createTextNode(this.text.slice(from, to))];
    const made = [];
    while (from < to) {
      while (this.line + 1 < this.starts.length && this.starts[this.line + 1] <= from) this.line += 1;
      const end = Math.min(to, this.starts[this.line + 1] ?? this.text.length);
      const origin = this.lines[this.line].at + from - this.starts[this.line];
      made.push(...this.paint(origin, origin + end - from, this.text.slice(from, end)));
      from = end;
    }
    return made;
  }

  escape(at) {
    const next = this.text[at + 1];
    if (next === "\n") {
      this.put(at, element("br"));
      return at + 2;
    }
    if (!next || !ESCAPABLE.test(next)) return at;
    this.add(this.plain, at);
    this.add(at + 1, at + 2);
    return at + 2;
  }

  /** Every line break is one: models write verse and addresses without the two spaces that Markdown wants. */
  lineBreak(at) {
    let end = at;
    while (end > this.plain && this.text[end - 1] === " ") end -= 1;
    this.add(this.plain, end);
    this.root.append(element("br"));
    return at + 1;
  }

  code(at) {
    const run = runLength(this.text, at);
    const close = this.tickAfter(at + run, run);
    if (close < 0) {
      this.add(this.plain, at + run);
      return at + run;
    }
    let [from, to] = [at + run, close];
    const inside = this.text.slice(from, to);
    if (/^[ \n][^]*[ \n]$/.test(inside) && inside.trim()) [from, to] = [from + 1, to - 1];
    this.add(this.plain, at);
    this.root.append(element("code", {}, ...this.nodes(from, to)));
    return close + run;
  }

  /** Where the next run of `length` backticks begins, -1 for nowhere. All runs are looked for once. */
  tickAfter(at, length) {
    if (!this.ticks) {
      this.ticks = new Map();
      for (const { index, 0: run } of [...this.text.matchAll(/`+/g)].reverse()) {
        if (!this.ticks.has(run.length)) this.ticks.set(run.length, []);
        this.ticks.get(run.length).push(index);
      }
    }
    const places = this.ticks.get(length) ?? [];
    while (places.length && places[places.length - 1] < at) places.pop();
    return places[places.length - 1] ?? -1;
  }

  angle(at) {
    const broken = /<br *\/?>/iy;
    broken.lastIndex = at;
    const found = broken.exec(this.text);
    if (found) {
      this.put(at, element("br"));
      return at + found[0].length;
    }
    const end = this.text.slice(at, at + MOST_ADDRESS).indexOf(">");
    const address = end > 0 ? this.text.slice(at + 1, at + end) : "";
    const href = /[\s<]/.test(address) ? null : safe(address);
    if (!href) return at;
    this.put(at, link(href, address));
    return at + end + 1;
  }

  entity(at) {
    const found = /^&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-z]{2,6}));/.exec(this.text.slice(at, at + 12));
    if (!found) return at;
    const [whole, decimal, hexadecimal, name] = found;
    const number = decimal ? Number(decimal) : parseInt(hexadecimal ?? "0", 16);
    const valid = number > 31 && number <= 0x10ffff && !(number >= 0xd800 && number <= 0xdfff);
    const letter = name
      ? Object.hasOwn(ENTITIES, name)
        ? ENTITIES[name]
        : null
      : valid
        ? String.fromCodePoint(number)
        : null;
    if (letter === null) return at;
    this.put(at, document.createTextNode(letter));
    return at + whole.length;
  }

  /** An address that stands in the text by itself. */
  address(at) {
    if (at > 0 && /[\p{L}\p{N}]/u.test(this.text[at - 1])) return at;
    const found = addressAt(this.text, at);
    const href = safe(found);
    if (!href) return at;
    this.add(this.plain, at);
    this.root.append(link(href, ...this.nodes(at, at + found.length)));
    return at + found.length;
  }

  open(at, next) {
    const node = document.createTextNode(this.text.slice(at, next));
    this.put(at, node);
    this.brackets.push({ node, newest: this.delimiters.newest, picture: next - at === 2, at });
    return next;
  }

  /** The end of a link, if there is one: `[text](address "title")`. Links do not nest. */
  close(at) {
    const bracket = this.brackets.pop();
    const target = bracket && this.text[at + 1] === "(" ? destination(this.text, at + 2) : null;
    const href = target && safe(target.address);
    if (!href) return at;
    this.add(this.plain, at);
    this.delimiters.pair(bracket.newest);
    const made = link(href);
    if (bracket.picture) made.classList.add("picture");
    while (bracket.node.nextSibling) made.append(bracket.node.nextSibling);
    for (const inner of made.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
    if (!made.textContent.trim()) made.append(href);
    bracket.node.replaceWith(made);
    this.brackets.length = 0;
    return target.next;
  }

  delimiter(at, letter) {
    const next = at + runLength(this.text, at);
    const ways = flanks(this.text, at, next, letter);
    if (ways.opens || ways.closes) {
      const node = document.createTextNode(this.text.slice(at, next));
      this.put(at, node);
      this.delimiters.add(node, letter, ways);
    } else this.add(this.plain, next);
    return next;
  }
}

function runLength(text, at) {
  let next = at;
  while (text[next] === text[at]) next += 1;
  return next - at;
}
