/** The controls of an explorer: each chooses among recorded values, and tells what it shows. */

/** @import { Control } from "./types.d.ts" */

import { h, KEYS_ARE_MINE, range, slide } from "../../views/js/dom.js";

/** So many letters stand beside each other; more become a list. */
const SEGMENTS = 24;

/**
 * @typedef {object} Offer  one control of one side
 * @property {string} key  a name that its radios share
 * @property {import("./types.d.ts").Runs["other"]} other  makes the field for another value, where a kernel records it
 * @property {(place: number | string) => void} choose
 */

/** @typedef {{el: HTMLElement, draw: (place: number | string) => void}} Offered */

/** @param {Control} control @param {Offer} offer @returns {Offered} */
export function choiceOf(control, offer) {
  const title = h("span.av-xname", {}, control.name);
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
function switchOf({ name, labels }, { choose }, title) {
  const input = () => choose(labels.indexOf(box.checked ? "yes" : "no"));
  const box = h("input", { type: "checkbox", role: "switch", "aria-label": name, ...KEYS_ARE_MINE, input });
  const el = h("label.av-control.av-switch", {}, box, title);
  return { el, draw(place) { box.checked = labels[Number(place)] === "yes"; } };
}

/** @param {Control} control @param {Offer} offer @param {HTMLElement} title @returns {Offered} */
function sliderOf({ name, labels }, { other, choose }, title) {
  const input = () => choose(Number(slider.value));
  const slider = range(name, input);
  const value = h("output.av-xvalue");
  const el = h("div.av-control", {}, title, slider, value);
  if (other) el.append(other(name, choose));

  /** @param {number | string} place */
  function draw(place) {
    const recorded = typeof place === "number";
    value.textContent = recorded ? labels[place] : place;
    slide(slider, recorded ? place : Number(slider.value), labels.length - 1, value.textContent);
  }
  return { el, draw };
}

/** @param {Control} control @param {Offer} offer @param {HTMLElement} title @returns {Offered} */
function listOf({ name, labels }, { choose }, title) {
  const input = () => choose(list.selectedIndex);
  const options = labels.map((label) => h("option", {}, label));
  const list = h("select", { "aria-label": name, ...KEYS_ARE_MINE, input }, ...options);
  return { el: h("div.av-control", {}, title, list), draw(place) { list.selectedIndex = Number(place); } };
}

/** @param {Control} control @param {Offer} offer @param {HTMLElement} title @returns {Offered} */
function segmentsOf({ name, labels }, { key, choose }, title) {
  const radios = labels.map((label, place) => {
    const input = () => choose(place);
    return h("input", { type: "radio", name: key, "aria-label": label, ...KEYS_ARE_MINE, input });
  });
  const segments = radios.map((radio, place) => h("label", {}, radio, h("span", {}, labels[place])));
  const box = h("div.av-segments", { role: "radiogroup", "aria-label": name }, ...segments);
  /** @param {number | string} place */
  const draw = (place) => radios.forEach((radio, k) => { radio.checked = k === place; });
  return { el: h("div.av-control", {}, title, box), draw };
}
