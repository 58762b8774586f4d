/**
 * The blocks of a Markdown text: CommonMark's paragraphs, headings, lists, quotes, code and rules, and GitHub's tables.
 * HTML is text, and there are no reference links.
 *
 * Lines are { text, at }: what is left of a line inside its containers, and where that is in the whole text. A block
 * that begins on a complete line ends the ones before it for good, which is what streaming builds on.
 */

const MOST_NESTED = 12; // lists and quotes within each other; what is deeper is text
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;

/** Blocks of `source`, each with `at`, where it begins in the text; `offset` is where `source` itself begins. */
export function blocksOf(source, offset = 0) {
  let at = offset;
  const lines = source.split("\n").map((raw) => {
    const line = { text: raw.endsWith("\r") ? raw.slice(0, -1) : raw, at };
    at += raw.length + 1;
    return line;
  });
  return parse(lines, 0);
}

function parse(lines, depth) {
  const readers = depth < MOST_NESTED ? [...CONTAINERS, ...LEAVES] : LEAVES;
  const blocks = [];
  let next = 0;
  while (next < lines.length) {
    if (isBlank(lines[next])) {
      next += 1;
      continue;
    }
    for (const reader of readers) {
      const read = reader(lines, next, depth);
      if (read) {
        blocks.push({ ...read.block, at: lines[next].at });
        next = read.next;
        break;
      }
    }
  }
  return blocks;
}

function rule(lines, from) {
  return isRule(lines[from].text) ? { block: { type: "rule" }, next: from + 1 } : null;
}

function heading(lines, from) {
  const found = HEADING.exec(lines[from].text);
  if (!found) return null;
  const line = trimmed(cut(lines[from], found[0].length));
  let end = line.text.length;
  while (end > 0 && line.text[end - 1] === "#") end -= 1;
  const closed = end === 0 || " \t".includes(line.text[end - 1]);
  const text = (closed ? line.text.slice(0, end) : line.text).trimEnd();
  return { block: { type: "heading", level: found[1].length, lines: [{ text, at: line.at }] }, next: from + 1 };
}

function fenced(lines, from) {
  const found = FENCE.exec(lines[from].text);
  if (!found || (found[1][0] === "`" && found[2].includes("`"))) return null;
  const [, fence, info] = found;
  const indent = indentOf(lines[from].text);
  let next = from + 1;
  while (next < lines.length && !closes(lines[next].text, fence)) next += 1;
  const inside = lines.slice(from + 1, next).map((line) => outdented(line, indent));
  const language = info
    .trim()
    .split(/[ \t,{]/, 1)[0]
    .slice(0, 40);
  return { block: { type: "code", language, lines: inside }, next: next + 1 };
}

function indented(lines, from) {
  if (indentOf(lines[from].text) < 4) return null;
  let next = from;
  let last = from;
  while (next < lines.length && (isBlank(lines[next]) || indentOf(lines[next].text) >= 4)) {
    if (!isBlank(lines[next])) last = next;
    next += 1;
  }
  const inside = lines.slice(from, last + 1).map((line) => outdented(line, 4));
  return { block: { type: "code", language: "", lines: inside }, next: last + 1 };
}

function quote(lines, from, depth) {
  if (!QUOTE.test(lines[from].text)) return null;
  const inside = [];
  let next = from;
  for (; next < lines.length; next += 1) {
    const marker = QUOTE.exec(lines[next].text);
    if (marker) inside.push(cut(lines[next], marker[0].length));
    else if (continues(lines, next) && !isBlank(inside[inside.length - 1])) inside.push(lines[next]);
    else break;
  }
  return { block: { type: "quote", blocks: parse(inside, depth + 1) }, next };
}

function list(lines, from, depth) {
  const first = itemOf(lines[from]);
  if (!first) return null;
  const items = [];
  let loose = false;
  let next = from;
  for (let mark = first; mark?.kind === first.kind; mark = next < lines.length ? itemOf(lines[next]) : null) {
    const inside = [outdented(cut(lines[next], mark.marked), mark.width - mark.marked)];
    let open = fenceAfter("", inside[0].text);
    let blank = false;
    for (next += 1; next < lines.length; next += 1) {
      const line = lines[next];
      const belongs =
        indentOf(line.text) >= mark.width || (indentOf(line.text) >= mark.indent + 2 && ITEM.test(line.text));
      if (isBlank(line)) blank = true;
      else if (!belongs && (blank || open || !continues(lines, next))) break;
      else blank = false;
      inside.push(belongs ? outdented(line, mark.width) : line);
      open = fenceAfter(open, inside[inside.length - 1].text);
    }
    while (inside.length > 1 && isBlank(inside[inside.length - 1])) inside.pop();
    const another = blank && next < lines.length && itemOf(lines[next])?.kind === first.kind;
    const blocks = parse(inside, depth + 1);
    const spaced = new Set(inside.filter((line, place) => place && isBlank(inside[place - 1])).map((line) => line.at));
    loose ||= another || blocks.slice(1).some((block) => spaced.has(block.at));
    items.push(blocks);
  }
  const { ordered, start } = first;
  return { block: { type: "list", ordered, start, loose, items }, next };
}

function table(lines, from) {
  if (from + 1 >= lines.length || !startsTable(lines, from)) return null;
  const aligned = cellsOf(lines[from + 1]).map(({ text }) => {
    const [left, right] = [text.startsWith(":"), text.endsWith(":")];
    return left && right ? "center" : right ? "right" : "";
  });
  const rows = [];
  let next = from + 2;
  for (; next < lines.length && !isBlank(lines[next]) && !interrupts(lines, next); next += 1) {
    rows.push(cellsOf(lines[next]).slice(0, aligned.length));
  }
  return { block: { type: "table", aligned, head: cellsOf(lines[from]), rows }, next };
}

function paragraph(lines, from) {
  const inside = [trimmed(lines[from])];
  let next = from + 1;
  while (next < lines.length && !isBlank(lines[next])) {
    const underline = UNDERLINE.exec(lines[next].text);
    if (underline) {
      const level = underline[1][0] === "=" ? 1 : 2;
      return { block: { type: "heading", level, lines: inside }, next: next + 1 };
    }
    if (interrupts(lines, next)) break;
    inside.push(trimmed(lines[next]));
    next += 1;
  }
  return { block: { type: "paragraph", lines: inside }, next };
}

const CONTAINERS = [rule, quote, list]; // a rule of stars is no list
const LEAVES = [rule, heading, fenced, indented, table, paragraph]; // a paragraph takes anything

/** Whether a line ends a paragraph before it. An item does only where it has text and, numbered, begins at 1. */
function interrupts(lines, at) {
  const { text } = lines[at];
  if (indentOf(text) >= 4) return false;
  const item = itemOf(lines[at]);
  if (item && (!item.ordered || item.start === 1) && text.slice(item.marked).trim()) return true;
  const fence = FENCE.exec(text);
  if (fence && !(fence[1][0] === "`" && fence[2].includes("`"))) return true;
  return HEADING.test(text) || QUOTE.test(text) || isRule(text) || startsTable(lines, at);
}

/** Whether a line may go on with the paragraph of a container whose marker it lacks. */
function continues(lines, at) {
  return !isBlank(lines[at]) && !itemOf(lines[at]) && !interrupts(lines, at);
}

function itemOf(line) {
  const found = ITEM.exec(line.text);
  if (!found || isRule(line.text)) return null;
  const [whole, indent, marker] = found;
  const ordered = marker.length > 1;
  const gap = indentOf(line.text.slice(whole.length));
  const empty = !line.text.slice(whole.length).trim();
  return {
    kind: marker[marker.length - 1],
    ordered,
    start: ordered ? Number(marker.slice(0, -1)) : 0,
    indent: indent.length,
    marked: whole.length,
    width: whole.length + (empty || gap > 4 ? 1 : gap),
  };
}

function startsTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].text.includes("|") || !lines[at + 1].text.includes("-")) return false;
  const under = cellsOf(lines[at + 1]);
  const piped = lines[at + 1].text.includes("|");
  return piped && under.every(({ text }) => /^:?-+:?$/.test(text)) && under.length === cellsOf(lines[at]).length;
}

/** The cells of a row, without the pipes around it; a pipe after a backslash is text. */
function cellsOf(line) {
  const row = trimmed(line);
  const cells = [];
  let start = row.text.startsWith("|") ? 1 : 0;
  for (let at = start; at <= row.text.length; at += 1) {
    if (row.text[at] === "\\") at += 1;
    else if (row.text[at] === "|" || at === row.text.length) {
      if (at < row.text.length || start < at) cells.push(cell(row, start, at));
      start = at + 1;
    }
  }
  if (start < row.text.length) cells.push(cell(row, start));
  return cells;
}

function cell(row, from, to) {
  return trimmed({ text: row.text.slice(from, to).trimEnd(), at: row.at + from });
}

/** The fence that is open after a line, where `open` was before it; "" for none. */
function fenceAfter(open, text) {
  if (open) return closes(text, open) ? "" : open;
  return FENCE.exec(text)?.[1] ?? "";
}

function closes(text, fence) {
  const found = FENCE.exec(text);
  return found !== null && found[1][0] === fence[0] && found[1].length >= fence.length && !found[2].trim();
}

function isRule(text) {
  const bare = text.trim();
  return indentOf(text) < 4 && /^[-*_]/.test(bare) && bare.replaceAll(/[ \t]/g, "").length > 2 && onlyOf(bare[0], bare);
}

function onlyOf(mark, text) {
  for (const letter of text) if (letter !== mark && letter !== " " && letter !== "\t") return false;
  return true;
}

function isBlank(line) {
  return !line.text.trim();
}

/** Columns of white space at the head of a line. */
function indentOf(text) {
  let columns = 0;
  for (const letter of text) {
    if (letter === " ") columns += 1;
    else if (letter === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

function outdented(line, most) {
  let at = 0;
  for (let columns = 0; columns < most && " \t".includes(line.text[at] || "x"); at += 1) {
    columns += line.text[at] === "\t" ? 4 - (columns % 4) : 1;
  }
  return cut(line, at);
}

function cut(line, length) {
  return { text: line.text.slice(length), at: line.at + Math.min(length, line.text.length) };
}

function trimmed(line) {
  const text = line.text.trimStart();
  return { text, at: line.at + line.text.length - text.length };
}
