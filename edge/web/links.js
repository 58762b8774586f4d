/** Where links may lead: http and https alone, in a new tab that knows nothing of this page. */

import { element } from "./dom.js";

export const MOST_ADDRESS = 2000; // characters
const ADDRESS = new RegExp(`https?://[^\\s<>"\`\\\\^{}|]{1,${MOST_ADDRESS}}`, "y");

/** The address if a link may go there, else null. */
export function safe(address) {
  if (address.length > MOST_ADDRESS) return null;
  try {
    const { protocol, href } = new URL(address);
    return protocol === "http:" || protocol === "https:" ? href : null;
  } catch {
    return null;
  }
}

export function link(href, ...children) {
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** The address that stands in `text` at `at` by itself, without the punctuation behind it; "" for none. */
export function addressAt(text, at) {
  ADDRESS.lastIndex = at;
  let found = ADDRESS.exec(text)?.[0] ?? "";
  for (;;) {
    const last = found[found.length - 1];
    if (last === ")" && count(found, ")") <= count(found, "(")) break;
    if (!last || !"?!.,:;*_~'\")]".includes(last)) break;
    found = found.slice(0, -1);
  }
  return found.length >= "http://a".length ? found : "";
}

/** What stands in a link's parentheses, and where the text goes on behind them; null where they do not close. */
export function destination(text, from) {
  const inside = text.slice(from, from + MOST_ADDRESS + 200);
  const angled = /^\s*<([^<>\n]*)>/.exec(inside);
  let at = angled ? angled[0].length : 0;
  while (!angled && " \n".includes(inside[at] || "x")) at += 1;
  let address = angled?.[1];
  if (!angled) {
    const start = at;
    for (let open = 0; at < inside.length && !/\s/.test(inside[at]); at += 1) {
      if (inside[at] === "(") open += 1;
      else if (inside[at] === ")" && open-- === 0) break;
    }
    address = inside.slice(start, at);
  }
  const rest = /^(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(inside.slice(at));
  return rest ? { address, next: from + at + rest[0].length } : null;
}

function count(text, letter) {
  return text.split(letter).length - 1;
}
