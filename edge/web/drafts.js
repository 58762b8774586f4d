/**
 * Who proposed which part of an answer, as lengths of text: [12, 0, 5, 1, …], 12 characters that the model wrote by
 * itself, then 5 that the drafter in the cloud proposed. Short enough to be kept with every answer.
 */

import { element } from "./dom.js";

const SOURCES = ["target", "remote", "ngram"];

/** Add a chunk's tokens, { text, source } each. */
export function addTokens(runs, tokens) {
  for (const { text, source } of tokens) {
    const code = Math.max(0, SOURCES.indexOf(source === "phrase" ? "ngram" : source)); // both are the device's own
    if (runs.length && runs[runs.length - 1] === code) runs[runs.length - 2] += text.length;
    else if (text) runs.push(text.length, code);
  }
}

/** A painter for MarkdownView: the stretch of the answer from `from` to `to`, tinted by who proposed it. */
export function painter(runs) {
  let place = 0; // of the run that the last stretch ended in, which begins at `start`
  let start = 0;
  return (from, to, text) => {
    if (from < start) [place, start] = [0, 0];
    const made = [];
    for (let at = from; at < to;) {
      while (place < runs.length && start + runs[place] <= at) {
        start += runs[place];
        place += 2;
      }
      const known = place < runs.length;
      const end = known ? Math.min(to, start + runs[place]) : to;
      const source = known ? SOURCES[runs[place + 1]] : "target";
      const part = text.slice(at - from, end - from);
      const space = source === "target" ? part.length : part.length - part.trimStart().length; // not worth a colour
      if (space) made.push(document.createTextNode(part.slice(0, space)));
      if (space < part.length) made.push(element("span", { class: `draft ${source}` }, part.slice(space)));
      at = end;
    }
    return made;
  };
}
