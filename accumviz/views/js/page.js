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
 * Start a view in each element of the page that carries its data, once: outputs may stand in a page twice.
 * @param {string} kind @param {(host: Host) => Promise<Dispose>} render @param {string} fallback
 */
export function startAll(kind, render, fallback) {
  for (const el of document.querySelectorAll(`div[data-accumviz-${kind}]:not([data-done])`)) {
    start(/** @type {HTMLElement} */ (el), el.getAttribute(`data-accumviz-${kind}`) ?? "", render, (error) => {
      const told = `The ${kind} could not start (${error.message}); below it stands ${fallback}.`;
      return h("p.av-note", {}, told);
    });
  }
}

/**
 * @param {HTMLElement} el @param {string} id @param {(host: Host) => Promise<Dispose>} render
 * @param {(error: Error) => Node} complain
 */
function start(el, id, render, complain) {
  const before = document.querySelectorAll(`[data-done="${CSS.escape(id)}"]`).length;
  const words = el.querySelector(".av-words");
  const data = el.querySelector('script[type="application/json"]')?.textContent;
  const mount = h("div");
  el.dataset.done = id;
  words?.before(mount);
  const model = still({ data, id: before ? `${id}-${before}` : id });
  const stands = () => el.setAttribute("data-stands", "");
  render({ model, el: mount }).then(() => words?.removeAttribute("open"), (error) => mount.append(complain(error)))
    .then(stands);
}
