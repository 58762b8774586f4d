/** The list of conversations. */

import { element, icon, iconButton } from "./dom.js";

const KEPT = "Kept on this device";

export class Sidebar {
  /** `actions`: open(id), remove(conversation). */
  constructor(place, actions) {
    this.place = place;
    this.actions = actions;
    this.shown = "";
  }

  /** Made anew only where something of it has changed, so that the focus stays. */
  show(conversations, current, running) {
    const state = JSON.stringify(
      conversations.map(({ id, title, private: kept }) => [id, title, kept, id === current, running.has(id)]),
    );
    if (state === this.shown) return;
    this.shown = state;
    const held = this.place.contains(document.activeElement) ? document.activeElement.closest("li").dataset.id : null;
    this.place.replaceChildren(...conversations.map((conversation) => this.entry(conversation, current, running)));
    if (held) this.place.querySelector(`[data-id="${held}"] .entry`)?.focus();
  }

  entry(conversation, current, running) {
    const { id, title } = conversation;
    const open = element(
      "button",
      {
        type: "button",
        class: "entry",
        "aria-current": id === current ? "page" : null,
        onclick: () => this.actions.open(id),
      },
      element("span", {}, title),
    );
    if (conversation.private)
      open.append(element("span", { role: "img", "aria-label": KEPT, title: KEPT }, icon("lock")));
    if (running.has(id))
      open.append(element("span", { class: "running", role: "img", "aria-label": "Answering", title: "Answering" }));
    const remove = iconButton("delete", `Delete “${title}”`, () => this.actions.remove(conversation));
    return element("li", { "data-id": id }, open, remove);
  }
}

/** On small screens the list lies over the messages. */
export function openMenu() {
  document.body.classList.add("menu");
  document.querySelector("[data-do=menu]").setAttribute("aria-expanded", true);
  document.querySelector("#sidebar .new").focus();
}

export function closeMenu() {
  if (!document.body.classList.contains("menu")) return;
  document.body.classList.remove("menu");
  const button = document.querySelector("[data-do=menu]");
  button.setAttribute("aria-expanded", false);
  button.focus();
}
