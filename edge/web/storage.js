/** The browser's storage; where it is not allowed, something that lasts as long as the page. */

class Fleeting {
  #held = new Map();

  getItem(key) {
    return this.#held.get(key) ?? null;
  }

  setItem(key, value) {
    this.#held.set(key, String(value));
  }

  removeItem(key) {
    this.#held.delete(key);
  }

  keys() {
    return [...this.#held.keys()];
  }
}

class Lasting {
  #storage;

  constructor(storage) {
    this.#storage = storage;
  }

  getItem(key) {
    return this.#storage.getItem(key);
  }

  /** Throws where there is no room. */
  setItem(key, value) {
    this.#storage.setItem(key, value);
  }

  removeItem(key) {
    this.#storage.removeItem(key);
  }

  keys() {
    return Object.keys(this.#storage);
  }
}

function usable(name) {
  try {
    return new Lasting(globalThis[name]);
  } catch {
    return new Fleeting();
  }
}

export const local = usable("localStorage");
export const session = usable("sessionStorage");
