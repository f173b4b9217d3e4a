/** The choices of a lab that move no line: a group of radios each; with a kernel, a field for another value, too. */

/** @import { Offer } from "./lab-types.d.ts" */
/** @import { Choice } from "../../views/js/types.d.ts" */

import { h, KEYS_ARE_MINE } from "../../views/js/dom.js";

/** @param {Offer} offer @param {string} key @param {(place: number | string) => void} choose */
function typed({ title, example }, key, choose) {
  const take = () => { if (field.value.trim()) choose(field.value.trim().slice(0, 80)); };
  /** @param {KeyboardEvent} event */
  function keydown(event) {
    if (event.key === "Enter") take();
    event.stopPropagation(); // notebooks take Enter for themselves
  }
  const about = { type: "text", "aria-label": `${title}: another value`, placeholder: `e.g. ${example}` };
  const field = h("input.av-other", { id: key, ...about, ...KEYS_ARE_MINE, change: take, keydown });
  return field;
}

/** @param {Offer} offer @param {{key: string, live: boolean, choose: (place: number | string) => void}} to */
export function choiceOf(offer, { key, live, choose }) {
  const { title, labels, example } = offer;
  const head = h("span.av-asks", { id: key }, title);
  const radios = labels.map((label, place) => {
    const input = () => choose(place);
    return h("input", { type: "radio", name: key, "aria-label": label, ...KEYS_ARE_MINE, input });
  });
  const faces = radios.map((radio, place) => h("label", {}, radio, h("span", {}, labels[place])));
  const box = h("div.av-radios", { role: "radiogroup", "aria-labelledby": key }, ...faces);
  const other = live && example ? typed(offer, `${key}-other`, choose) : null;
  const el = h("div.av-option", {}, head, box, ...(other ? [other] : []));

  /** @param {Choice[number]} place */
  function draw(place) {
    radios.forEach((radio, k) => { radio.checked = k === place; });
    if (other && document.activeElement !== other) other.value = typeof place === "string" ? place : "";
  }
  return { el, draw };
}
