/**
 * Conversations, kept in this browser alone: one entry of localStorage each, the newest MOST of them and no more than
 * MOST_TEXT characters; the oldest go first. What is read is checked: an entry may be of another version, and a file
 * from anywhere.
 *
 *   conversation  { id, title, created, updated, system, private, from, messages }; messages before `from` are not sent
 *   message       { role: "user" | "assistant", content }, and of an answer
 *                 { state: "running" | "done" | "stopped" | "length" | "broken", problem: { kind, text }, runs, usage }
 */

import { local } from "./storage.js";

export const MOST = 200;
const MOST_TEXT = 4_000_000;
const PREFIX = "starsd.conversation.";
const STATES = ["running", "done", "stopped", "length", "broken"];

export class Store {
  /** `onchange(id)` hears of changes made in another tab, `onforget(titles)` of conversations that had to go. */
  constructor({ onchange = () => {}, onforget = () => {} } = {}) {
    this.held = new Map();
    this.onforget = onforget;
    for (const key of local.keys()) this.load(key);
    addEventListener("storage", ({ key }) => {
      if (!key?.startsWith(PREFIX)) return;
      this.held.delete(key.slice(PREFIX.length));
      this.load(key, true);
      onchange(key.slice(PREFIX.length));
    });
  }

  /** All of them, the newest first. */
  all() {
    return [...this.held.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.held.get(id) ?? null;
  }

  /** Write a conversation down; old ones make room. False when even so there is none: it lasts as long as this page. */
  save(conversation) {
    this.held.set(conversation.id, conversation);
    const forgotten = this.tooMany(conversation);
    for (;;) {
      try {
        local.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
        break;
      } catch {
        const oldest = this.all().findLast((other) => other !== conversation && !forgotten.includes(other));
        if (!oldest) return false;
        forgotten.push(oldest);
        this.remove(oldest.id);
      }
    }
    for (const { id } of forgotten) this.remove(id);
    if (forgotten.length) this.onforget(forgotten.map(({ title }) => title));
    return true;
  }

  remove(id) {
    this.held.delete(id);
    local.removeItem(PREFIX + id);
  }

  /** As a file: JSON, to be read by `take`. */
  export() {
    return JSON.stringify({ format: "starsd conversations", version: 1, conversations: this.all() }, null, 1);
  }

  /** Add what `export` wrote; how many there were. Throws an Error for a file that is something else. */
  take(text) {
    const { format, conversations } = JSON.parse(text) ?? {};
    if (format !== "starsd conversations" || !Array.isArray(conversations))
      throw new Error("the file has no conversations");
    const good = conversations.map((one) => checked(one)).filter(Boolean);
    for (const one of good.slice(0, MOST).reverse()) this.save(one);
    return Math.min(MOST, good.length);
  }

  load(key, running = false) {
    if (!key.startsWith(PREFIX)) return;
    try {
      const conversation = checked(JSON.parse(local.getItem(key)), running);
      if (conversation && key === PREFIX + conversation.id) this.held.set(conversation.id, conversation);
    } catch {
      // not ours, or cut off: left alone, and not shown
    }
  }

  tooMany(newest) {
    let text = 0;
    return this.all().filter((conversation, place) => {
      text += conversation.messages.reduce((sum, { content }) => sum + content.length, 0);
      return conversation !== newest && (place >= MOST || text > MOST_TEXT);
    });
  }
}

export function newConversation(system, isPrivate) {
  const now = Date.now();
  const id = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", created: now, updated: now, system, private: isPrivate, from: 0, messages: [] };
}

/** The first words of a conversation are its name. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replaceAll(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** What is right about something that claims to be a conversation; null if it is none. */
function checked(claimed, running = false) {
  if (typeof claimed?.id !== "string" || !/^[\w-]{1,64}$/.test(claimed.id) || !Array.isArray(claimed.messages))
    return null;
  const messages = claimed.messages.map((message) => checkedMessage(message, running));
  if (messages.includes(null)) return null;
  return {
    id: claimed.id,
    title: String(claimed.title ?? "").slice(0, 100),
    created: Number(claimed.created) || 0,
    updated: Number(claimed.updated) || 0,
    system: String(claimed.system ?? ""),
    private: claimed.private === true,
    from: Math.min(messages.length, Math.max(0, Math.trunc(Number(claimed.from)) || 0)),
    messages,
  };
}

function checkedMessage(claimed, running) {
  if (typeof claimed?.content !== "string") return null;
  if (claimed.role === "user") return { role: "user", content: claimed.content };
  if (claimed.role !== "assistant") return null;
  const state = STATES.includes(claimed.state) ? claimed.state : "done";
  const runs = Array.isArray(claimed.runs) && claimed.runs.every(Number.isInteger) ? claimed.runs : [];
  const usage = claimed.usage && typeof claimed.usage === "object" ? claimed.usage : null;
  const left = state === "running" && !running; // by a page that was closed meanwhile
  const kind = left ? "left" : String(claimed.problem?.kind ?? "");
  const problem = kind ? { kind, text: String(claimed.problem?.text ?? "") } : null;
  return { role: "assistant", content: claimed.content, state: left ? "broken" : state, problem, runs, usage };
}
