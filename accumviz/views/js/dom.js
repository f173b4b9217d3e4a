/** Elements: what a recording says becomes text nodes and attributes, never markup. */

/** @import { Attribute, Made } from "./types.d.ts" */

import { clamp } from "./numbers.js";

const SVG = "http://www.w3.org/2000/svg";
/** @type {Record<string, string>} */
const ICONS = {
  back: "M11 3v10L4 8z",
  play: "M4 2.5v11l9-5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  next: "M5 3v10l7-5z",
  link: "M6 5H4a3 3 0 0 0 0 6h2M10 5h2a3 3 0 0 1 0 6h-2M5.5 8h5",
};

/**
 * Make an element: "tag.class.class", attributes (a function listens), children.
 * @template {string} N
 * @param {N} name
 * @param {Record<string, Attribute>} [attributes]
 * @param {...(Node | string)} children
 * @returns {Made<N>}
 */
export function h(name, attributes = {}, ...children) {
  const [tag, classes] = split(name);
  return /** @type {Made<N>} */ (dress(document.createElement(tag), classes, attributes, children));
}

/** Make an element of a drawing. @param {string} name @param {...(Node | string)} children */
export function svg(name, /** @type {Record<string, Attribute>} */ attributes = {}, ...children) {
  const [tag, classes] = split(name);
  const made = /** @type {SVGElement} */ (document.createElementNS(SVG, tag));
  return dress(made, classes, attributes, children);
}

/** @param {string} name */
function split(name) {
  const [tag, ...classes] = name.split(".");
  return [tag, classes.join(" ")];
}

/**
 * @template {Element} E
 * @param {E} made @param {string} classes
 * @param {Record<string, Attribute>} attributes @param {(Node | string)[]} children
 */
function dress(made, classes, attributes, children) {
  put(made, classes ? { class: classes, ...attributes } : attributes).append(...children);
  return made;
}

/** @template {Element} E @param {E} made @param {Record<string, Attribute>} attributes */
export function put(made, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (made.getAttribute(key) !== `${value}`) made.setAttribute(key, `${value}`);
  }
  return made;
}

/** Write a text, if it is another one: what stands there already need not be laid out anew. @param {Element} el */
export function tell(el, /** @type {string} */ text) {
  if (el.textContent !== text) el.textContent = text;
}

/** @param {string} label */
export const group = (label) => ({ role: "group", "aria-label": label });

/** @param {string} label */
export const scrolls = (label) => ({ tabindex: 0, ...group(label) });

/** What has no text says what it is, to everybody. @param {string} label */
export const named = (label) => ({ "aria-label": label, title: label });

/** @param {string} name */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/**
 * @param {string} name @param {string} label @param {() => void} click
 * @param {Node | string} face
 */
export function button(name, label, click, face = icon(name)) {
  return h(`button.av-b.av-b-${name}`, { type: "button", ...named(label), click }, face);
}

/** Inputs keep their keys to themselves in hosts that have shortcuts. */
export const KEYS_ARE_MINE = { "data-lm-suppress-shortcuts": "true" };

/** @param {string} label @param {() => void} input */
export function range(label, input, name = "") {
  return h(`input.${name}`, { type: "range", min: 0, value: 0, "aria-label": label, ...KEYS_ARE_MINE, input });
}

/** Move a slider. @param {HTMLInputElement} slider @param {number} value @param {number} most */
export function slide(slider, value, most, text = "") {
  Object.assign(slider, { max: most, value });
  slider.setAttribute("aria-valuetext", text);
}

/** @type {Record<string, number>} */
const WAYS = { ArrowDown: 1, ArrowUp: -1 };

/** Which way an arrow key leads in a list; undefined for other keys. @param {KeyboardEvent} event */
export const vertical = ({ key }) => WAYS[key];

/** @param {Event} event */
export function own(event) {
  event.preventDefault();
  event.stopPropagation();
}

/** Scroll a box until a stretch of it is seen. @param {Element} box @param {number} top @param {number} height */
export function reveal(box, top, height, margin = 0) {
  box.scrollTop = clamp(box.scrollTop, top + height + margin - box.clientHeight, top - margin);
}

/** Bring a widget into the window, and of one that is taller its controls. @param {HTMLElement} frame */
export function arrive(frame) {
  for (const part of [frame, ...frame.querySelectorAll(".av-top")]) part.scrollIntoView({ block: "nearest" });
}

/** An entry of a legend: what it says, the look of its swatch, its colour. @param {string[]} key */
export const swatch = ([text, look, color]) =>
  h("span.av-key", {}, h(`i.av-swatch.av-${look}`, { style: `--av-c: ${color}` }), text);

/** @param {string} name @param {string} title @param {...(Node | string)} children */
export function pane(name, title, ...children) {
  const head = h("div.av-head", {}, h("span.av-name", {}, title));
  return { name, head, el: h(`div.av-pane.av-in-${name}`, group(title), head, ...children) };
}
