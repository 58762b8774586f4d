/** What is said beside the conversation: notices that go by themselves, and questions. */

import { setKey } from "./api.js";
import { element } from "./dom.js";

const STAYS = 9000; // ms

/** Say something for a while, with something that can be done about it. */
export function notice(text, label = "", onclick = () => {}) {
  const act = () => {
    part.remove();
    onclick();
  };
  const button = label ? element("button", { type: "button", class: "text", onclick: act }, label) : null;
  const part = element("div", { class: "notice" }, element("span", {}, text), button);
  document.getElementById("notices").replaceChildren(part);
  setTimeout(() => part.remove(), STAYS);
}

/** Ask before something that cannot be taken back; a promise of whether the user wants it. */
export function ask({ title, text, yes }) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-text").textContent = text;
  dialog.querySelector("[data-yes]").textContent = yes;
  dialog.querySelector("[data-no]").onclick = () => dialog.close();
  return submitted(dialog);
}

/** Ask for an API key, and keep it; a promise of whether there is one. */
export async function askKey() {
  const dialog = document.getElementById("key");
  if (dialog.open) return false;
  const { elements } = dialog.querySelector("form");
  dialog.querySelector("form").reset();
  if (!(await submitted(dialog))) return false;
  setKey(elements.key.value.trim(), elements.remember.checked);
  return true;
}

/** Show a dialog; a promise of whether its form was submitted. */
function submitted(dialog) {
  const { promise, resolve } = Promise.withResolvers();
  dialog.querySelector("form").onsubmit = (event) => {
    event.preventDefault();
    resolve(true);
    dialog.close();
  };
  dialog.addEventListener("close", () => resolve(false), { once: true });
  dialog.showModal();
  return promise;
}
