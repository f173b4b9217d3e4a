/** The runs of an explorer that a notebook's kernel records when they are asked for. */

/** @import { Choice, Model } from "../../views/js/types.d.ts" */
/** @import { Control, Run, Runs } from "./types.d.ts" */

import { h, KEYS_ARE_MINE } from "../../views/js/dom.js";
import { read } from "../../views/js/packed.js";

/** @type {Run} */
const WAITING = { waits: "The kernel is recording this run." };

/**
 * The runs of an explorer: those of the page, and others that the kernel is asked for, once each.
 * @param {Model} model @param {Control[]} controls @param {Runs} recorded @param {() => void} draw
 * @returns {Runs}
 */
export function recording(model, controls, recorded, draw) {
  /** @type {Map<string, Run>} */
  const others = new Map();
  const keyOf = (/** @type {Choice} */ choice) =>
    JSON.stringify(choice.map((place, i) => (typeof place === "number" ? controls[i].labels[place] : place)));

  /** @param {Choice} choice */
  function at(choice) {
    const key = keyOf(choice);
    const other = others.get(key);
    if (other) return other;
    if (choice.every((place) => typeof place === "number")) return recorded.at(choice);
    others.set(key, WAITING);
    model.set("ask", { choice, n: others.size });
    return WAITING;
  }
  model.on("change:told", async () => {
    const { choice, run } = model.get("told");
    const { data } = await read(run);
    others.set(keyOf(choice), data.data ? { ...data, data: undefined, whole: { data: data.data } } : data);
    draw();
  });
  return { ...recorded, at, other };
}

/**
 * Where a reader types a value that was not recorded.
 * @param {string} name @param {(value: string) => void} choose
 */
function other(name, choose) {
  const take = () => { if (field.value) choose(field.value); };
  /** @param {KeyboardEvent} event */
  function keydown(event) {
    if (event.key === "Enter") take();
    event.stopPropagation(); // notebooks take Enter for themselves
  }
  const about = { type: "number", step: "any", "aria-label": `${name}: another value`, placeholder: "other" };
  const field = h("input.av-other", { ...about, ...KEYS_ARE_MINE, change: take, keydown });
  return field;
}
