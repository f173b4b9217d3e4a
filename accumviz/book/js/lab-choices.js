/** The choices of a lab that move no line: a group of radios each. */

/** @import { Offer } from "./lab-types.d.ts" */

import { h, KEYS_ARE_MINE } from "../../views/js/dom.js";

/** @param {Offer} offer @param {{key: string, choose: (place: number) => void}} to */
export function choiceOf({ title, labels }, { key, choose }) {
  const head = h("span.av-asks", { id: key }, title);
  const radios = labels.map((label, place) => {
    const input = () => choose(place);
    return h("input", { type: "radio", name: key, "aria-label": label, ...KEYS_ARE_MINE, input });
  });
  const faces = radios.map((radio, place) => h("label", {}, radio, h("span", {}, labels[place])));
  const box = h("div.av-radios", { role: "radiogroup", "aria-labelledby": key }, ...faces);
  const el = h("div.av-option", {}, head, box);

  /** @param {number} place */
  const draw = (place) => radios.forEach((radio, k) => { radio.checked = k === place; });
  return { el, draw };
}
