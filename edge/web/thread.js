/** The messages of the conversation on the screen. */

import { copyButton, element, iconButton } from "./dom.js";
import { painter } from "./drafts.js";
import { MarkdownView } from "./markdown.js";
import { problemPart } from "./problems.js";

const MOST_ANNOUNCED = 30; // blocks kept for screen readers

/** `actions`: edit(index, text), retry(index), hurry(), skip(index), key(index), and moved(), after the text grew. */
export class Thread {
  constructor(place, announcer, actions) {
    this.place = place;
    this.announcer = announcer;
    this.actions = actions;
    this.tinted = false;
    this.rows = new Map(); // of the answers, by message
    this.pending = null;
    this.idleUntil = 0;
  }

  show(conversation) {
    this.rows.clear();
    this.announcer.replaceChildren();
    const { messages, from } = conversation;
    const parts = messages.map((message, index) =>
      message.role === "user" ? this.asked(message, index) : this.answer(message, index),
    );
    if (from > 0)
      parts.splice(from, 0, element("p", { class: "divider" }, "What is above is not sent to the model any more"));
    this.place.replaceChildren(...parts);
  }

  /** Tint answers by who drafted them, or no more. */
  tint(on) {
    this.tinted = on;
    for (const [message, row] of this.rows) this.write(message, row);
  }

  /** An answer has more text. It is laid out with the next picture, and less often the longer that takes. */
  grew(message) {
    const row = this.rows.get(message);
    if (!row || this.pending) return;
    row.problem.replaceChildren();
    const late = Math.max(0, this.idleUntil - performance.now());
    this.pending = setTimeout(() => requestAnimationFrame(() => this.lay(message)), late);
  }

  lay(message) {
    this.pending = null;
    const row = this.rows.get(message);
    if (!row || message.state !== "running") return;
    const began = performance.now();
    row.view.show(message.content, false);
    this.idleUntil = performance.now() + 3 * (performance.now() - began);
    this.actions.moved();
  }

  ended(message) {
    const row = this.rows.get(message);
    if (!row) return;
    row.view.show(message.content, true);
    this.finish(message, row);
    const words = { stopped: "Stopped.", broken: "", length: "The answer was cut at its longest." };
    this.announce(words[message.state] ?? "End of the answer.");
    this.actions.moved();
  }

  waits(message, seconds) {
    const row = this.rows.get(message);
    row?.problem.replaceChildren(problemPart(message, { kind: "busy", seconds }, this.actions));
    this.actions.moved();
  }

  asked(message, index) {
    const bubble = element("div", { class: "bubble" }, message.content);
    const tools = element(
      "div",
      { class: "tools" },
      iconButton("edit", "Edit and send again", () => this.edit(article, message, index)),
      copyButton(() => message.content),
    );
    const article = element("article", { class: "user", "aria-label": "You" }, bubble, tools);
    return article;
  }

  edit(article, message, index) {
    const area = element("textarea", { "aria-label": "Edit your message", rows: 1 });
    area.value = message.content;
    const back = () => {
      const fresh = this.asked(message, index);
      form.replaceWith(fresh);
      fresh.querySelector("button").focus();
    };
    const send = (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(index, area.value.trim());
    };
    const form = element(
      "form",
      { class: "edit", onsubmit: send },
      area,
      element("p", { class: "hint" }, "What came after it goes."),
      element("button", { type: "button", class: "text", onclick: back }, "Cancel"),
      element("button", { type: "submit", class: "primary" }, "Send"),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        back();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    });
    article.replaceWith(form);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  answer(message, index) {
    const row = {
      text: element("div", { class: "answer" }),
      problem: element("div", { class: "problems" }),
      tools: element("div", { class: "tools" }),
      index,
    };
    row.article = element("article", { class: "model", "aria-label": "Model" }, row.text, row.problem, row.tools);
    this.rows.set(message, row);
    this.write(message, row);
    return row.article;
  }

  write(message, row) {
    const running = message.state === "running";
    row.view = new MarkdownView(row.text, {
      paint: this.tinted ? painter(message.runs) : null,
      onblock: (node) => row.live && this.announce(spoken(node)),
    });
    row.live = false; // what is there already is not read out
    row.view.show(message.content, !running);
    row.live = running;
    row.article.setAttribute("aria-busy", running);
    if (!running) this.finish(message, row);
  }

  finish(message, row) {
    row.article.setAttribute("aria-busy", false);
    row.problem.replaceChildren(
      ...(message.problem ? [problemPart(message, message.problem, this.actions, row.index)] : []),
    );
    row.tools.replaceChildren(
      copyButton(() => message.content),
      iconButton("retry", "Answer again", () => this.actions.retry(row.index)),
      element("span", { class: "figures" }, summary(message)),
    );
  }

  announce(text) {
    if (!text) return;
    this.announcer.append(element("p", {}, text));
    while (this.announcer.childNodes.length > MOST_ANNOUNCED) this.announcer.firstChild.remove();
  }
}

function spoken(node) {
  if (node.nodeName === "FIGURE") return `Code: ${node.querySelector("code").textContent}`;
  return node.innerText;
}

function summary({ state, usage }) {
  const said = { stopped: ["stopped"], length: ["cut at its longest"] }[state] ?? [];
  if (!usage) return said.join(" · ");
  said.push(`${usage.written} token${usage.written === 1 ? "" : "s"}`);
  if (usage.speed) said.push(`${usage.speed.toFixed(1)} a second`);
  if (usage.tau) said.push(`tau ${usage.tau.toFixed(2)}`);
  if (usage.remote) said.push(`${usage.remote} drafted in the cloud`);
  if (usage.ngram) said.push(`${usage.ngram} on this device`);
  return said.join(" · ");
}
