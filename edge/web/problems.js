/** What is said, kindly, when an answer did not come or broke off, and what can be done about it. */

import { element } from "./dom.js";

/** `index` is the message's; `actions` as in thread.js. */
export function problemPart(message, { kind, text = "", seconds = null }, actions, index) {
  const again = button("Try again", () => actions.retry(index));
  const part = (words, ...buttons) =>
    element("div", { class: "problem", role: seconds === null ? "alert" : null }, element("p", {}, words), ...buttons);
  switch (kind) {
    case "network":
      if (message.content) return part("The connection was lost before the answer ended.", again);
      return part("The device cannot be reached just now.", again);
    case "left":
      return part("The page was closed before this answer ended.", again);
    case "busy":
      if (seconds === null) return part("The device is busy with other conversations.", again);
      return part(
        `The device is busy with other conversations. Trying again in ${seconds} s.`,
        button("Try now", actions.hurry),
      );
    case "overflow":
      return part(
        "This conversation has become longer than the model can hold.",
        button("Leave out the oldest turns", () => actions.skip(index)),
      );
    case "key":
      return part(
        "The device asks for an API key.",
        button("Enter it", () => actions.key(index)),
      );
    case "refused":
      return part(`The device did not take this: ${text}.`, again);
    default:
      return part(`Something went wrong on the device: ${text}.`, again);
  }
}

function button(label, onclick) {
  return element("button", { type: "button", class: "text", onclick }, label);
}
