/** The line at the bottom: how fast, how well drafted, and over which link. Asks the device once a second. */

import { Problem, status } from "./api.js";

const EVERY = 1000; // ms
const AWAY = 2500; // ms between tries while the device is not reached

export class Strip {
  /** `onstatus(status or null, problem or null)` after every answer. */
  constructor(onstatus) {
    this.onstatus = onstatus;
    this.status = null;
    this.problem = null;
    this.parts = Object.fromEntries(["link", "speed", "tau", "device"].map((id) => [id, document.getElementById(id)]));
    document.addEventListener("visibilitychange", () => !document.hidden && this.wake());
    this.wake = () => {};
  }

  async run() {
    for (;;) {
      try {
        this.status = await status(AbortSignal.timeout(10_000));
        this.problem = null;
      } catch (error) {
        this.problem = error instanceof Problem ? error : new Problem("network", error.message);
      }
      this.onstatus(this.problem ? null : this.status, this.problem);
      await new Promise((resolve) => {
        this.wake = resolve;
        if (!document.hidden) setTimeout(resolve, this.problem ? AWAY : EVERY);
      });
    }
  }

  /** `speed` of the answer under way, null for none; `usage` of the last answer. */
  show(conversation, speed, usage) {
    const [state, words, why] = link(this.status, this.problem, conversation.private);
    const { link: place } = this.parts;
    place.dataset.state = state;
    place.title = why;
    write(place, words);
    const shown = speed ?? usage?.speed ?? null;
    write(this.parts.speed, shown === null ? "" : `${shown.toFixed(1)} tokens/s`);
    write(this.parts.tau, usage?.tau ? `tau ${usage.tau.toFixed(2)}` : "");
    write(this.parts.device, sensors(this.problem ? null : this.status?.device));
  }
}

/** A state for tests and styles, words, and a longer explanation. */
function link(told, problem, isPrivate) {
  if (problem?.kind === "key") return ["away", "API key needed", "The device asks for an API key"];
  if (problem) return ["away", "device not reached", "Trying again"];
  if (!told) return ["unknown", "connecting", ""];
  if (told.link === "off") return ["alone", "device only", "No server is set: all drafts are made on this device"];
  if (isPrivate)
    return ["private", "kept on this device", "Nothing of this conversation is sent to the cloud"];
  if (told.link === "connecting") return ["unknown", "device only · reaching the cloud", told.notice ?? ""];
  if (told.link === "lost")
    return ["away", "device only · cloud away", told.notice || "Answers go on without it, a little slower"];
  const far = told.rtt_ms == null ? "" : ` · ${Math.round(told.rtt_ms)} ms`;
  if (told.busy > 0 && told.regime === "device only")
    return ["alone", `device only · cloud linked${far}`, "No drafts of use lately"];
  const waits = told.busy > 0 && told.regime === "waits" ? " · waits for drafts" : "";
  return ["up", `cloud drafts${far}${waits}`, told.server || "Connected to the cloud"];
}

/** Of a reading, what is known. */
function sensors(told) {
  const watts = told?.power_w == null ? "" : `${told.power_w.toFixed(1)} W`;
  const degrees = told?.temperature_c == null ? "" : `${Math.round(told.temperature_c)} °C`;
  return [watts, degrees, told?.throttled ? "throttled" : ""].filter(Boolean).join(" · ");
}

function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}
