/** Answers under way: one for each conversation at most, whichever of them is on the screen. */

import { chat, Problem } from "./api.js";
import { addTokens } from "./drafts.js";

const MOST_TRIES = 5; // while the device is busy
const SAVE_EVERY = 1000; // ms
const METER = 3000; // ms that the present speed is taken from

/**
 * `hooks`: began, grew, ended (conversation, message); waits(conversation, message, seconds), once a second while it
 * waits to try again; key() asks the user for an API key, a promise of whether there is one; save(conversation).
 */
export class Answering {
  constructor(settings, hooks) {
    this.settings = settings;
    this.hooks = hooks;
    this.running = new Map(); // by the conversation's id
    this.leaving = false; // the page goes away, and its connections with it
    addEventListener("pagehide", () => this.leave());
    addEventListener("pageshow", () => (this.leaving = false));
  }

  /** Answer the last user's turn of a conversation. */
  async start(conversation) {
    const message = { role: "assistant", content: "", state: "running", problem: null, runs: [], usage: null };
    const run = {
      conversation,
      message,
      control: new AbortController(),
      meter: [],
      saved: Date.now(),
      hurry: () => {},
    };
    const { promise, resolve } = Promise.withResolvers();
    run.over = promise;
    conversation.messages.push(message);
    this.running.set(conversation.id, run);
    this.hooks.save(conversation);
    this.hooks.began(conversation, message);
    try {
      await this.insist(run);
    } catch (error) {
      const stopped = run.control.signal.aborted;
      message.state = stopped ? "stopped" : "broken";
      if (!stopped) message.problem = { kind: this.leaving ? "left" : (error.kind ?? "failed"), text: error.message };
      if (!stopped && !(error instanceof Problem)) console.error(error);
    }
    this.running.delete(conversation.id);
    conversation.updated = Date.now();
    this.hooks.save(conversation);
    this.hooks.ended(conversation, message);
    resolve();
  }

  /** A promise that nothing runs any more for this conversation. */
  async stop(id) {
    this.running.get(id)?.control.abort();
    await this.running.get(id)?.over;
  }

  /** Try again at once, instead of when the device said. */
  hurry(id) {
    this.running.get(id)?.hurry();
  }

  /** Tokens per second just now; null where nothing runs, or nothing has come yet. */
  speed(id) {
    const meter = this.running.get(id)?.meter ?? [];
    const since = performance.now() - METER;
    while (meter.length && meter[0][0] < since) meter.shift();
    if (meter.length < 2) return null;
    const seconds = (meter[meter.length - 1][0] - meter[0][0]) / 1000;
    const tokens = meter.slice(1).reduce((sum, [, count]) => sum + count, 0);
    return seconds > 0.2 ? tokens / seconds : null;
  }

  leave() {
    this.leaving = true;
    for (const { conversation } of this.running.values()) this.hooks.save(conversation);
  }

  async insist(run) {
    const { conversation, message, control } = run;
    for (let tries = 1; ; tries += 1) {
      try {
        return await this.fill(run);
      } catch (problem) {
        if (control.signal.aborted || message.content || tries >= MOST_TRIES) throw problem;
        if (problem.kind === "busy") await this.wait(run, problem.seconds);
        else if (problem.kind !== "key" || !(await this.hooks.key())) throw problem;
        this.hooks.grew(conversation, message);
      }
    }
  }

  async fill(run) {
    const { conversation, message, control } = run;
    let finish = null;
    for await (const chunk of chat(this.request(conversation), control.signal)) {
      if (chunk.usage) message.usage = figures(chunk.usage);
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const text = choice.delta?.content ?? "";
      const tokens = choice.starsd?.tokens ?? (text ? [{ text, source: "target" }] : []);
      message.content += text;
      addTokens(message.runs, tokens);
      finish = choice.finish_reason ?? finish;
      if (tokens.length) run.meter.push([performance.now(), tokens.length]);
      if (text) this.hooks.grew(conversation, message);
      if (Date.now() > run.saved + SAVE_EVERY) {
        this.hooks.save(conversation);
        run.saved = Date.now();
      }
    }
    message.state = finish === "length" ? "length" : "done";
  }

  async wait(run, seconds) {
    const { conversation, message, control } = run;
    const { promise, resolve } = Promise.withResolvers();
    control.signal.addEventListener("abort", resolve, { once: true });
    run.hurry = resolve;
    let left = seconds;
    this.hooks.waits(conversation, message, left);
    const clock = setInterval(() => {
      left -= 1;
      if (left > 0) this.hooks.waits(conversation, message, left);
      else resolve();
    }, 1000);
    await promise;
    clearInterval(clock);
    if (control.signal.aborted) throw new Error("stopped");
  }

  request(conversation) {
    return {
      messages: history(conversation),
      stream: true,
      stream_options: { include_usage: true },
      starsd: { private: conversation.private, show_drafts: true },
      ...this.settings.sampling(),
    };
  }
}

/** The messages that are sent. Turns without an answer join the next one: some templates want them to alternate. */
function history({ system, from, messages }) {
  const sent = [];
  for (const { role, content } of messages.slice(from)) {
    const last = sent[sent.length - 1];
    if (!content) continue;
    if (last?.role === role) last.content += `\n\n${content}`;
    else sent.push({ role, content });
  }
  return system ? [{ role: "system", content: system }, ...sent] : sent;
}

function figures({ prompt_tokens: read, completion_tokens: written, starsd = {} }) {
  const {
    tau = null,
    tokens_per_second: speed = null,
    accepted_remote: remote = 0,
    accepted_ngram: ngram = 0,
  } = starsd ?? {};
  return { read, written, tau, speed, remote, ngram };
}
