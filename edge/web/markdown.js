/** Markdown as elements of the page; while a text grows, only its last block is made again. */

import { blocksOf } from "./blocks.js";
import { copyButton, element } from "./dom.js";
import { inline } from "./inline.js";

const MOST_IN_BLOCK = 50_000; // characters; a block with more is shown as it is
const MOST_IN_ALL = 200_000;

/** Shows a text in `place`. `onblock(node)` hears of every block that is finished, in order. */
export class MarkdownView {
  constructor(place, { onblock = () => {}, paint = null } = {}) {
    this.place = place;
    this.onblock = onblock;
    this.paint = paint;
    this.clear();
  }

  clear() {
    this.place.replaceChildren();
    this.cut = 0; // what is before it in the text does not change any more
    this.kept = 0; // and has so many nodes
    this.openCode = null; // the last block, if it is code: where it begins, and its element
  }

  /** Show `source`, which begins with what was shown before; `ended` when nothing will follow. */
  show(source, ended = true) {
    const blocks =
      source.length > MOST_IN_ALL
        ? asItIs(source.slice(this.cut), this.cut)
        : blocksOf(source.slice(this.cut), this.cut);
    if (!this.grow(blocks)) {
      while (this.place.childNodes.length > this.kept) this.place.lastChild.remove();
      this.place.append(...blocks.map((block) => this.node(block)));
      const last = blocks[blocks.length - 1];
      this.openCode = last?.type === "code" ? { at: last.at, language: last.language } : null;
    }
    this.keep(blocks, ended ? Infinity : source.lastIndexOf("\n") + 1, ended);
  }

  /** Add to the code that is being written; a reader's selection in it, and its button, stay. */
  grow(blocks) {
    const [block] = blocks;
    const { at, language } = this.openCode ?? {};
    if (blocks.length !== 1 || block.type !== "code" || block.at !== at || block.language !== language) return false;
    const code = this.place.lastChild.querySelector("code");
    const text = textOf(block.lines);
    if (this.paint || !text.startsWith(code.textContent)) return false;
    code.append(text.slice(code.textContent.length));
    code.normalize();
    return true;
  }

  /** Blocks before the last that begins on a complete line are final: see blocks.js. */
  keep(blocks, complete, ended) {
    let last = blocks.length - 1;
    while (last > 0 && blocks[last].at >= complete) last -= 1;
    const final = ended ? blocks.length : Math.max(0, last);
    for (let done = 0; done < final; done += 1) this.onblock(this.place.childNodes[this.kept + done]);
    if (ended || !final) return;
    this.cut = blocks[final].at;
    this.kept += final;
  }

  node(block) {
    const { lines = [] } = block;
    if (block.type !== "code" && lines.reduce((sum, line) => sum + line.text.length, 0) > MOST_IN_BLOCK) {
      return element("p", { class: "as-it-is" }, textOf(lines));
    }
    switch (block.type) {
      case "heading":
        return element(`h${Math.min(6, block.level + 2)}`, {}, inline(lines, this.paint)); // the page has h1 and h2
      case "code":
        return this.code(block);
      case "quote":
        return element("blockquote", {}, ...block.blocks.map((inner) => this.node(inner)));
      case "list":
        return this.list(block);
      case "table":
        return this.table(block);
      case "rule":
        return element("hr");
      default:
        return element("p", {}, inline(lines, this.paint));
    }
  }

  code({ language, lines }) {
    const code = element("code");
    for (const [place, line] of lines.entries()) {
      const text = place < lines.length - 1 ? `${line.text}\n` : line.text;
      code.append(...(this.paint ? this.paint(line.at, line.at + text.length, text) : [text]));
    }
    code.normalize();
    return element(
      "figure",
      { class: "code" },
      element(
        "figcaption",
        {},
        element("span", {}, language || "text"),
        copyButton(() => code.textContent),
      ),
      element("pre", { tabindex: 0, "aria-label": language ? `${language} code` : "code" }, code),
    );
  }

  list({ ordered, start, loose, items }) {
    const attributes = ordered && start !== 1 ? { start } : {};
    return element(ordered ? "ol" : "ul", attributes, ...items.map((blocks) => this.item(blocks, loose)));
  }

  item(blocks, loose) {
    const made = element("li");
    for (const block of blocks) {
      const node = this.node(block);
      if (block.type === "paragraph" && !loose)
        made.append(...(made.childNodes.length ? ["\n"] : []), ...node.childNodes);
      else made.append(node);
    }
    const first = loose && made.firstChild?.nodeName === "P" ? made.firstChild : made;
    const box = /^\[([ xX])\] /.exec(first.firstChild?.nodeType === Node.TEXT_NODE ? first.textContent : "");
    if (box) this.check(made, first, box[1] !== " ");
    return made;
  }

  /** `[x] ` at the head of an item is a box that is ticked. The bracket is a node of its own. */
  check(item, place, ticked) {
    let rest = 4;
    while (rest > 0 && place.firstChild?.nodeType === Node.TEXT_NODE) {
      const { data } = place.firstChild;
      if (data.length > rest) place.firstChild.data = data.slice(rest);
      else place.firstChild.remove();
      rest -= Math.min(rest, data.length);
    }
    item.classList.add("task");
    const box = element("input", { type: "checkbox", disabled: true, "aria-label": ticked ? "done" : "to do" });
    box.checked = ticked;
    place.prepend(box, " ");
  }

  table({ aligned, head, rows }) {
    const row = (cells, tag) =>
      element(
        "tr",
        {},
        ...aligned.map((side, column) => {
          const cell = cells[column] ? inline([cells[column]], this.paint) : null;
          return element(tag, { class: side || null, scope: tag === "th" ? "col" : null }, cell);
        }),
      );
    const body = element("tbody", {}, ...rows.map((cells) => row(cells, "td")));
    const made = element("table", {}, element("thead", {}, row(head, "th")), body);
    return element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "table" }, made);
  }
}

function textOf(lines) {
  return lines.map((line) => line.text).join("\n");
}

/** The rest of a text that is too long to be laid out. */
function asItIs(source, at) {
  return [{ type: "code", language: "", lines: [{ text: source, at }], at }];
}
