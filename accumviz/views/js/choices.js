/** The controls of an explorer: each chooses among recorded values, and tells what it shows. */

/** @import { Control } from "./types.d.ts" */

import { h, KEYS_ARE_MINE } from "./dom.js";

/** So many letters stand beside each other; more become a list. */
const SEGMENTS = 24;

/**
 * @typedef {object} Offer  one control of one side
 * @property {string} key  an id for its name
 * @property {import("./types.d.ts").Runs["other"]} other  makes the field for another value, where a kernel records it
 * @property {(place: number | string) => void} choose
 */

/** @typedef {{el: HTMLElement, draw: (place: number | string) => void}} Offered */

/** @param {Control} control @param {Offer} offer @returns {Offered} */
export function choiceOf(control, offer) {
  const title = h("span.av-xname", { id: offer.key }, control.name);
  const { kind, labels } = control;
  if (kind === "fixed") {
    return { el: h("div.av-control", {}, title, h("span.av-xvalue", {}, labels[0])), draw() {} };
  }
  if (kind === "switch") return switchOf(control, offer, title);
  if (kind === "slider") return sliderOf(control, offer, title);
  const isLong = kind !== "tabs" && labels.join("").length > SEGMENTS;
  return isLong ? listOf(control, offer, title) : segmentsOf(control, offer, title);
}

/** @param {Control} control @param {Offer} offer @param {HTMLElement} title @returns {Offered} */
function switchOf({ labels }, { key, choose }, title) {
  const input = () => choose(labels.indexOf(box.checked ? "yes" : "no"));
  const box = h("input", { type: "checkbox", role: "switch", "aria-labelledby": key, ...KEYS_ARE_MINE, input });
  const el = h("label.av-control.av-switch", {}, box, title);
  return { el, draw(place) { box.checked = labels[Number(place)] === "yes"; } };
}

/** @param {Control} control @param {Offer} offer @param {HTMLElement} title @returns {Offered} */
function sliderOf({ name, labels }, { key, other, choose }, title) {
  const most = labels.length - 1;
  const input = () => choose(Number(slider.value));
  const slider = h("input", { type: "range", min: 0, max: most, "aria-labelledby": key, ...KEYS_ARE_MINE, input });
  const value = h("output.av-xvalue");
  const el = h("div.av-control", {}, title, slider, value);
  if (other) el.append(other(name, choose));

  /** @param {number | string} place */
  function draw(place) {
    const recorded = typeof place === "number";
    value.textContent = recorded ? labels[place] : place;
    if (recorded) slider.value = String(place);
    slider.setAttribute("aria-valuetext", value.textContent);
  }
  return { el, draw };
}

/** @param {Control} control @param {Offer} offer @param {HTMLElement} title @returns {Offered} */
function listOf({ labels }, { key, choose }, title) {
  const input = () => choose(list.selectedIndex);
  const options = labels.map((label) => h("option", {}, label));
  const list = h("select", { "aria-labelledby": key, ...KEYS_ARE_MINE, input }, ...options);
  return { el: h("div.av-control", {}, title, list), draw(place) { list.selectedIndex = Number(place); } };
}

/** @param {Control} control @param {Offer} offer @param {HTMLElement} title @returns {Offered} */
function segmentsOf({ labels }, { key, choose }, title) {
  const radios = labels.map((label, place) => {
    const input = () => choose(place);
    return h("input", { type: "radio", name: key, "aria-label": label, ...KEYS_ARE_MINE, input });
  });
  const segments = radios.map((radio, place) => h("label", {}, radio, h("span", {}, labels[place])));
  const box = h("div.av-segments", { role: "radiogroup", "aria-labelledby": key }, ...segments);
  /** @param {number | string} place */
  const draw = (place) => radios.forEach((radio, k) => { radio.checked = k === place; });
  return { el: h("div.av-control", {}, title, box), draw };
}
