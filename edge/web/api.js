/** The device's API, as the page uses it. Addresses are relative, so that it works behind any prefix. */

import { local, session } from "./storage.js";

const KEY = "starsd.key";
const OVERFLOW = "context_length_exceeded";

/**
 * Why there is no answer, or no more of it. `kind` is
 *   network   the device was not reached, or went away
 *   key       it wants an API key, or another one
 *   busy      too many are waiting; worth trying again in `seconds`
 *   overflow  the conversation is longer than the model's context
 *   refused   it does not take the request as it is
 *   failed    something broke there
 */
export class Problem extends Error {
  constructor(kind, message, seconds = null) {
    super(message);
    this.kind = kind;
    this.seconds = seconds;
  }
}

export function setKey(key, remember) {
  for (const storage of [session, local]) storage.removeItem(KEY);
  if (key) (remember ? local : session).setItem(KEY, key);
}

/** What the device says of itself: docs/api.md, /v1/starsd/status. */
export async function status(signal) {
  return (await ask("v1/starsd/status", { signal })).json();
}

/** The chunks of an answer, as they come. Ends without an error only where the answer has ended. */
export async function* chat(request, signal) {
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(request), signal });
  for await (const data of events(response, signal)) {
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    if (chunk.error) throw problemOf(500, chunk.error, null);
    yield chunk;
  }
  throw new Problem("network", "the answer broke off");
}

async function ask(address, { method = "GET", body, signal }) {
  const key = session.getItem(KEY) ?? local.getItem(KEY);
  const headers = {
    ...(body && { "Content-Type": "application/json" }),
    ...(key && { Authorization: `Bearer ${key}` }),
  };
  let response;
  try {
    response = await fetch(address, { method, body, headers, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    throw signal?.aborted ? error : new Problem("network", "the device was not reached");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw problemOf(response.status, told.error ?? {}, response.headers.get("Retry-After"));
}

function problemOf(code, { message, code: name }, after) {
  const text = typeof message === "string" && message ? message : `the device answered with status ${code}`;
  if (code === 401) return new Problem("key", text);
  if (code === 429 || code === 503) return new Problem("busy", text, Math.min(600, Math.max(1, Number(after) || 2)));
  if (name === OVERFLOW) return new Problem("overflow", text);
  return new Problem(code < 500 ? "refused" : "failed", text);
}

/** The data of a stream of server-sent events. */
async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await read(reader, signal);
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    throw signal?.aborted ? error : new Problem("network", "the connection was lost");
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Problem("failed", "the device sent something that is no answer");
  }
}
