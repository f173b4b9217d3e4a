/** Turns each question on the page into a form that opens its fold; without this, a fold is a fold. */

import { mount } from "./question.js";

/** @typedef {HTMLElement & {accumvizAsks?: boolean}} Root */

for (const root of /** @type {NodeListOf<Root>} */ (document.querySelectorAll(".accumviz[data-av-predict]"))) {
  if (root.accumvizAsks) continue;
  root.accumvizAsks = true;
  try {
    mount(root);
  } catch (error) {
    delete root.dataset.avState; // the question stays a plain one
    console.warn(error);
  }
}
