/** How answers are sampled and the page looks: kept in this browser, edited in the dialog #settings. */

import { local } from "./storage.js";

const PLACE = "starsd.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"]; // null: what the device takes by itself
const THEMES = ["auto", "light", "dark"];

/** `settings.now` is what holds; `onchange` hears of every change. */
export class Settings {
  constructor(onchange = () => {}) {
    this.onchange = onchange;
    this.now = read();
    this.dress();
  }

  change(some) {
    this.now = { ...this.now, ...some };
    try {
      local.setItem(PLACE, JSON.stringify(this.now));
    } catch {
      // full: the settings last as long as this page
    }
    this.dress();
    this.onchange();
  }

  /** The part of a request that says how to sample. */
  sampling() {
    return Object.fromEntries(NUMBERS.map((name) => [name, this.now[name]]).filter(([, value]) => value !== null));
  }

  dress() {
    document.documentElement.dataset.theme = this.now.theme;
  }

  /**
   * Connect the dialog's fields; `conversation()` is on the screen, and its instructions are edited with them. What is
   * left empty shows what holds then, by the device's `status()`.
   */
  bind(dialog, { conversation, status, onsystem }) {
    const form = dialog.querySelector("form");
    const field = (name) => form.elements.namedItem(name);
    dialog.addEventListener("open-settings", () => {
      const defaults = inForce(status());
      for (const name of NUMBERS) {
        field(name).value = this.now[name] ?? "";
        field(name).placeholder = defaults[name];
      }
      field("theme").value = this.now.theme;
      field("system").value = conversation().system;
      dialog.showModal();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const read = (name) => (field(name).value.trim() === "" ? null : Number(field(name).value));
      const system = field("system").value.trim();
      this.change({
        ...Object.fromEntries(NUMBERS.map((name) => [name, read(name)])),
        theme: field("theme").value,
        system,
      });
      onsystem(system);
      dialog.close();
    });
    dialog.querySelector("[data-reset]").addEventListener("click", () => {
      for (const name of NUMBERS) field(name).value = "";
    });
  }
}

/** What holds where nothing is set, in words. */
function inForce(told) {
  const { temperature = "", top_p = "", top_k } = told?.sampling ?? {};
  const most = told?.context ? `up to ${told.context}` : "";
  return { temperature, top_p, top_k: top_k === 0 ? "all" : (top_k ?? ""), max_tokens: most, seed: "random" };
}

function read() {
  let held;
  try {
    held = JSON.parse(local.getItem(PLACE)) ?? {};
  } catch {
    held = {};
  }
  const numbers = NUMBERS.map((name) => [name, Number.isFinite(held[name]) ? held[name] : null]);
  return {
    ...Object.fromEntries(numbers),
    system: typeof held.system === "string" ? held.system : "",
    private: held.private === true,
    tinted: held.tinted === true,
    theme: THEMES.includes(held.theme) ? held.theme : "auto",
  };
}
