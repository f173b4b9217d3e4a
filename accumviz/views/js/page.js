/** A page without a kernel: models that only it reads, and the elements that wait for a view. */

/** @import { Dispose, Host, Model } from "./types.d.ts" */

import { h } from "./dom.js";

/** A model without a kernel. @param {Record<string, unknown>} state @returns {Model} */
export function still(state) {
  /** @type {[string, () => void][]} */
  const listeners = [];
  return {
    get: (key) => state[key],
    set(key, value) {
      state[key] = value;
      for (const [name, listener] of listeners) if (name === `change:${key}`) listener();
    },
    on(name, listener) { listeners.push([name, listener]); },
  };
}

/**
 * Start a view in each element of the page that carries its data, as this version writes it, once: outputs may stand in
 * a page twice, and beside those of another version.
 * @param {string} kind @param {(host: Host) => Promise<Dispose>} render @param {string} fallback
 */
export function startAll(kind, render, fallback) {
  for (const found of document.querySelectorAll(`[data-accumviz-${kind}][data-v="4"]:not([data-done])`)) {
    const el = /** @type {HTMLElement} */ (found);
    const id = el.getAttribute(`data-accumviz-${kind}`) ?? "";
    const before = document.querySelectorAll(`[data-done="${CSS.escape(id)}"]`).length;
    const words = el.querySelector(".av-words");
    const data = el.querySelector('script[type="application/json"]')?.textContent;
    const mount = h("div");
    el.dataset.done = id;
    words?.before(mount);
    /** @param {Error} error */
    const complain = ({ message }) =>
      mount.append(h("p.av-note", {}, `The ${kind} could not start (${message}); below it stands ${fallback}.`));
    render({ model: still({ data, id: before ? `${id}-${before}` : id }), el: mount })
      .then(() => words?.removeAttribute("open"), complain)
      .then(() => el.setAttribute("data-stands", ""));
  }
}
