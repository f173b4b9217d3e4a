/** Turns each question on the page into a form that opens what answers it; without this, all stands open. */

import { lead } from "./gate.js";
import { mount } from "./question.js";

/** @typedef {HTMLElement & {accumvizAsks?: boolean}} Root */

const page = document.documentElement;
const opens = "avBook" in page.dataset && !("avPredicts" in page.dataset);

for (const root of /** @type {NodeListOf<Root>} */ (document.querySelectorAll(".accumviz[data-av-predict]"))) {
  if (opens || root.accumvizAsks) continue;
  root.accumvizAsks = true;
  try {
    mount(root);
  } catch (error) {
    delete root.dataset.avState; // the question stays a plain one
    page.classList.remove("av-asks"); // and nobody is left before a gate that cannot open
    console.warn(error);
  }
}
addEventListener("hashchange", lead);
lead();
