/** Which stars, underscores and tildes belong together: CommonMark's stack of delimiter runs, on nodes. */

import { element } from "./dom.js";

const MOST_NESTED = 16; // emphasis within emphasis; browsers overflow their stack in very deep trees
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** Whether the run of `letter` from `at` to `next` may open, and may close, emphasis; neither: it is text. */
export function flanks(text, at, next, letter) {
  const [before, after] = [letterBefore(text, at), letterAt(text, next)];
  const [spaceBefore, spaceAfter] = [!before.trim(), !after.trim()];
  const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
  const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
  if (letter === "~") return next - at === 2 ? { opens: left, closes: right } : { opens: false, closes: false };
  if (letter === "*") return { opens: left, closes: right };
  return { opens: left && (!right || markBefore), closes: right && (!left || markAfter) };
}

/** The runs seen so far and not yet paired; each has a text node among its siblings. */
export class Delimiters {
  constructor() {
    this.newest = null; // linked by `before` and `after`
    this.depths = new Map(); // of the elements made
  }

  add(node, letter, { opens, closes }) {
    const { length } = node.data;
    const run = { node, letter, length, left: length, opens, closes, before: this.newest, after: null };
    if (this.newest) this.newest.after = run;
    this.newest = run;
  }

  /** Pair the runs that are newer than `bottom`, wrap what is between each pair, and forget them. */
  pair(bottom) {
    const floors = new Map(); // below these there is no opener for such a closer
    let run = this.newest === bottom ? null : this.newest;
    while (run && run.before !== bottom) run = run.before;
    while (run) {
      if (!run.closes) {
        run = run.after;
        continue;
      }
      const kind = `${run.letter}${run.opens}${run.length % 3}`;
      const floor = floors.has(kind) ? floors.get(kind) : bottom;
      let opener = run.before;
      while (opener !== floor && opener !== bottom && !pairs(opener, run)) opener = opener.before;
      const next = run.after;
      if (opener === floor || opener === bottom || !this.wrap(opener, run)) {
        floors.set(kind, run.before);
        if (!run.opens) this.unlink(run);
        run = next;
        continue;
      }
      opener.after = run;
      run.before = opener;
      if (!opener.left) this.unlink(opener);
      if (!run.left) {
        this.unlink(run);
        run = next;
      }
    }
    this.newest = bottom;
    if (bottom) bottom.after = null;
  }

  /** Put what is between two runs into an element; false where that would nest too deeply. */
  wrap(opener, closer) {
    const used = opener.letter === "~" || (opener.left > 1 && closer.left > 1) ? 2 : 1;
    const made = element(opener.letter === "~" ? "s" : used === 2 ? "strong" : "em");
    let depth = 1;
    for (let node = opener.node.nextSibling; node !== closer.node; node = node.nextSibling) {
      depth = Math.max(depth, 1 + (this.depths.get(node) ?? 0));
    }
    if (depth > MOST_NESTED) return false;
    this.depths.set(made, depth);
    while (opener.node.nextSibling !== closer.node) made.append(opener.node.nextSibling);
    closer.node.before(made);
    for (const run of [opener, closer]) {
      run.left -= used;
      run.node.data = run.letter.repeat(run.left);
    }
    return true;
  }

  unlink(run) {
    if (run.before) run.before.after = run.after;
    if (run.after) run.after.before = run.before;
    else this.newest = run.before;
    if (!run.left) run.node.remove();
  }
}

/** Whether two delimiter runs belong together (CommonMark 0.31, rules 9 and 10 of emphasis). */
function pairs(opener, closer) {
  if (opener.letter !== closer.letter || !opener.opens) return false;
  const both = opener.closes || closer.opens;
  return !(both && closer.length % 3 !== 0 && (opener.length + closer.length) % 3 === 0);
}

function letterAt(text, at) {
  return at < text.length ? String.fromCodePoint(text.codePointAt(at)) : " ";
}

function letterBefore(text, at) {
  const low = at > 1 && /[\udc00-\udfff]/.test(text[at - 1]);
  return at > 0 ? letterAt(text, low ? at - 2 : at - 1) : " ";
}
