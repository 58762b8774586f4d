/** The chat page: what the user does, and what the screen shows of it. */

import { Answering } from "./answering.js";
import { ask, askKey, notice } from "./asides.js";
import { download } from "./dom.js";
import { Settings } from "./settings.js";
import { closeMenu, openMenu, Sidebar } from "./sidebar.js";
import { MOST, newConversation, Store, titleOf } from "./store.js";
import { Strip } from "./strip.js";
import { Thread } from "./thread.js";

const NEAR = 80; // pixels from the end, within which the screen follows the text
const at = (id) => document.getElementById(id);
const prompt = at("prompt");
const touch = matchMedia("(pointer: coarse)");

const settings = new Settings(() => show());
const store = new Store({
  onchange: (id) => {
    if (answering.running.has(id)) return;
    if (id === current.id) open(store.get(id) ?? fresh());
    else show();
  },
  onforget: (titles) =>
    notice(`The browser keeps ${MOST} conversations, or less where they are long. Gone: ${titles.join(", ")}`),
});
const answering = new Answering(settings, {
  save: (conversation) => keep(conversation),
  began: (conversation) => conversation === current && open(conversation, { end: true }),
  grew: (conversation, message) => thread.grew(message),
  waits: (conversation, message, seconds) => thread.waits(message, seconds),
  ended: (conversation, message) => {
    thread.ended(message);
    show();
  },
  key: () => wantKey(),
});
const thread = new Thread(at("thread"), at("announcer"), {
  edit: (index, text) => again(index, text),
  retry: (index) => again(index - 1),
  hurry: () => answering.hurry(current.id),
  skip: (index) => leaveOut(index),
  key: async (index) => (await wantKey()) && again(index - 1),
  moved: () => follow(),
});
const sidebar = new Sidebar(at("conversations"), { open: (id) => open(store.get(id)), remove });
const strip = new Strip((told, problem) => {
  if (problem?.kind === "key" && !asked) wantKey();
  if (told && told.model !== at("model").textContent) {
    at("model").textContent = told.model;
    at("where").textContent = `${told.model} runs on this device, with or without a network.`;
  }
  show();
});

let current = store.get(location.hash.slice(1)) ?? fresh();
let following = true;
let asked = false; // for a key, since the page was opened
let unsaved = false; // it was said that there is no room

function fresh() {
  return newConversation(settings.now.system, settings.now.private);
}

function keep(conversation) {
  if (store.save(conversation)) return;
  if (!unsaved) notice("The browser has no room for this conversation: it will be gone with the page.");
  unsaved = true;
}

/** Put a conversation on the screen. */
function open(conversation, { end = false } = {}) {
  const same = conversation.id === current.id;
  current = conversation;
  history.replaceState(
    null,
    "",
    conversation.messages.length ? `#${conversation.id}` : location.pathname + location.search,
  );
  thread.tinted = settings.now.tinted;
  thread.show(conversation);
  if (!same) closeMenu();
  following = true;
  show();
  if (end || !same) follow();
}

/** Everything around the messages. */
function show() {
  const { messages, title } = current;
  const running = answering.running.has(current.id);
  const name = title || "New chat";
  if (at("title").textContent !== name) at("title").textContent = name;
  document.title = title ? `${title} · starsd` : "starsd";
  document.body.classList.toggle("empty", messages.length === 0);
  at("stop").hidden = !running;
  at("send").hidden = running;
  at("send").disabled = !prompt.value.trim();
  at("private").setAttribute("aria-checked", current.private);
  at("private").hidden = (strip.status?.link ?? "off") === "off"; // there is nobody to keep it from
  document.querySelector("[data-do=tint]").setAttribute("aria-pressed", settings.now.tinted);
  at("legend").hidden = !settings.now.tinted;
  const usage = messages.findLast((message) => message.usage)?.usage;
  strip.show(current, running ? answering.speed(current.id) : null, usage);
  sidebar.show(store.all(), current.id, answering.running);
}

function send() {
  const text = prompt.value.trim();
  if (!text || answering.running.has(current.id)) return;
  prompt.value = "";
  current.title ||= titleOf(text);
  current.messages.push({ role: "user", content: text });
  current.updated = Date.now();
  answering.start(current);
  if (touch.matches)
    prompt.blur(); // the keyboard on the screen goes, and the answer is seen
  else prompt.focus();
}

/** Ask once more what message `index` asked, or `text` in its place; what came after it goes, and can come back. */
async function again(index, text = current.messages[index].content) {
  const conversation = current;
  await answering.stop(conversation.id);
  const before = structuredClone(conversation);
  conversation.messages.length = index;
  conversation.from = Math.min(conversation.from, index);
  conversation.messages.push({ role: "user", content: text });
  if (index === 0) conversation.title = titleOf(text);
  conversation.updated = Date.now();
  answering.start(conversation);
  if (before.messages.length <= index + 2) return;
  notice("The turns after it are gone.", "Undo", async () => {
    await answering.stop(conversation.id);
    keep(before);
    open(before, { end: true });
  });
}

/** Send a third of the turns less, the oldest; then ask again. */
function leaveOut(index) {
  const { messages, from } = current;
  const turns = messages.flatMap(({ role }, place) =>
    role === "user" && place >= from && place < index ? [place] : [],
  );
  if (turns.length < 2) {
    notice("There is one turn left: a shorter message, or shorter instructions, would fit.");
    return;
  }
  current.from = turns[Math.ceil(turns.length / 3)];
  again(index - 1);
}

async function remove(conversation) {
  await answering.stop(conversation.id);
  store.remove(conversation.id);
  notice(`“${conversation.title}” is deleted.`, "Undo", () => {
    keep(conversation);
    show();
  });
  if (conversation.id === current.id) startNew();
  else show();
}

function startNew() {
  open(fresh());
  prompt.focus();
}

async function switchPrivate() {
  const question = {
    title: "Keep it on this device no longer?",
    text: "With your next message the cloud is told this whole conversation, also what was kept on this device so far.",
    yes: "Tell the cloud",
  };
  if (current.private && current.messages.length && !(await ask(question))) return;
  current.private = !current.private;
  if (current.messages.length) keep(current);
  settings.change({ private: current.private });
}

async function wantKey() {
  asked = true;
  const given = await askKey();
  if (given) strip.wake();
  return given;
}

async function takeFile(file) {
  if (!file) return;
  try {
    notice(`${store.take(await file.text())} conversations are here now.`);
  } catch (error) {
    notice(`Nothing was read: ${error.message}`);
  }
  show();
}

async function deleteAll() {
  at("settings").close();
  const question = {
    title: "Delete all conversations?",
    text: "They are gone for good. Export them first to keep them.",
    yes: "Delete",
  };
  if (!(await ask(question))) return;
  for (const { id } of store.all()) {
    await answering.stop(id);
    store.remove(id);
  }
  startNew();
}

/** Keep the newest text in view, unless the user has gone elsewhere. */
function follow() {
  const scroll = at("scroll");
  if (following) scroll.scrollTop = scroll.scrollHeight;
  at("latest").hidden = following;
}

const DOES = {
  new: startNew,
  menu: openMenu,
  "close-menu": closeMenu,
  settings: () => at("settings").dispatchEvent(new Event("open-settings")),
  "close-settings": () => at("settings").close(),
  "close-key": () => at("key").close(),
  tint: () => {
    settings.change({ tinted: !settings.now.tinted });
    thread.tint(settings.now.tinted);
    follow();
  },
  private: switchPrivate,
  stop: () => {
    answering.stop(current.id);
    if (!touch.matches) prompt.focus();
  },
  latest: () => {
    following = true;
    follow();
  },
  export: () => download("starsd-conversations.json", store.export()),
  import: () => at("file").click(),
  "delete-all": deleteAll,
};

document.addEventListener("click", ({ target }) => DOES[target.closest("[data-do]")?.dataset.do]?.());
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") || event.isComposing) return;
  if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    startNew();
  } else if (event.key === "Escape") {
    if (document.body.classList.contains("menu")) closeMenu();
    else answering.stop(current.id);
  }
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !prompt.value && !answering.running.has(current.id)) {
    event.preventDefault();
    [...document.querySelectorAll("#thread article.user button")]
      .findLast((button) => button.title.startsWith("Edit"))
      ?.click();
  }
});
prompt.addEventListener("input", () => {
  at("send").disabled = !prompt.value.trim();
});
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("ideas").addEventListener("click", ({ target }) => {
  const idea = target.closest("button");
  if (!idea) return;
  prompt.value = idea.textContent;
  send();
});
at("scroll").addEventListener("scroll", ({ target }) => {
  following = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR;
  at("latest").hidden = following;
});
at("file").addEventListener("change", ({ target }) => takeFile(target.files[0]).then(() => (target.value = "")));
settings.bind(at("settings"), {
  conversation: () => current,
  status: () => strip.status,
  onsystem: (system) => {
    current.system = system;
    if (current.messages.length) keep(current);
  },
});
setInterval(() => answering.running.has(current.id) && show(), 500);

open(current, { end: true });
strip.run();
if (!touch.matches) prompt.focus();
