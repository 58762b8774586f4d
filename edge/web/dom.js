/** Elements made by hand: the page never parses markup that it did not ship. */

/**
 * `element("a", { class: "x", href: "…", onclick: f }, "text", node)`; names that begin with "on" are listeners, true
 * is an attribute without a value, false and null leave it out.
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** A picture of the sprite in index.html. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  picture.setAttribute("class", "icon");
  picture.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  picture.append(use);
  return picture;
}

/** A button that shows a picture alone; `label` is what it is called. */
export function iconButton(name, label, onclick, attributes = {}) {
  return element(
    "button",
    { type: "button", class: "quiet", "aria-label": label, title: label, onclick, ...attributes },
    icon(name),
  );
}

/** A button with `copied()`'s text; it says so for a moment. */
export function copyButton(copied) {
  const button = iconButton("copy", "Copy", async () => {
    const done = await copy(copied());
    button.replaceChildren(icon(done ? "check" : "cross"));
    button.setAttribute("aria-label", done ? "Copied" : "The browser did not allow copying");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", "Copy");
    }, 1600);
  });
  return button;
}

/** Whether `text` is on the clipboard now. The clipboard itself is there only on https and localhost. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const held = document.activeElement;
    const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    held?.focus();
    return done;
  }
}

/** Let the browser save `text` as a file. */
export function download(name, text, type = "application/json") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
