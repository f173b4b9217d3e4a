/** What a browser remembers of a page. In a sandbox, to name the storage is an exception already: then it forgets. */

/** @template T @param {(storage: Storage) => T} use */
function stored(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}

/** What was said, of a question try by try: null, where the reader asked to be shown. */
/** @typedef {string | (string | null)[]} Said */
/** @typedef {{said: unknown}} Kept */

/** @param {string} key */
export const memory = (key) => ({
  keep: (/** @type {Said} */ said) => stored((storage) => storage.setItem(key, JSON.stringify({ said }))),
  forget: () => stored((storage) => storage.removeItem(key)),
  /** @returns {Kept | null} */
  kept: () => stored((storage) => JSON.parse(storage.getItem(key) ?? "null")),
});
