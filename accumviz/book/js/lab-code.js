/** The loop's code, whose lines can be moved: dragged by a mouse, tapped by a finger, by arrow keys. */

/** @import { App } from "../../views/js/player.js" */
/** @import { LabRow, Offer } from "./lab-types.d.ts" */

import { codePane } from "../../views/js/code.js";
import { carrying, hold } from "./lab-drag.js";
import { h, KEYS_ARE_MINE, own, put, vertical } from "../../views/js/dom.js";

const NOWHERE = "nowhere";
/**
 * @typedef {object} Movable  what can be moved, and how
 * @property {Offer[]} offers
 * @property {LabRow[]} rows
 * @property {(role: string, value: string, top?: number) => void} put  where it is seen, if it was put there by hand
 */

/**
 * Where a line stands and could stand, from top to bottom; taken out last.
 * @param {LabRow[]} rows @param {Offer} offer
 */
function placesOf(rows, { name, values }) {
  const places = rows.filter(([, , role]) => role === name).map(([n, , , value]) => ({ value, here: n > 0 }));
  const out = !places.some(({ here }) => here);
  return values.includes(NOWHERE) ? [...places, { value: NOWHERE, here: out }] : places;
}

/** @param {Offer} offer @param {string} value */
const called = ({ values, labels }, value) => labels[values.indexOf(value)];

/**
 * A line takes the focus, and is seen where a hand has put it.
 * @param {Map<string, HTMLElement>} grips @returns {(role: string, top?: number) => void}
 */
const coming = (grips) => (role, top) => {
  const grip = grips.get(role);
  grip?.focus({ preventScroll: true });
  hold(grip, top);
};

/** @param {App} app @param {Movable} movable */
export function movingPane(app, { offers, rows, put: move }) {
  const code = codePane(app);
  const lines = [...code.el.querySelectorAll("li.av-line")];
  const shelf = h("div.av-shelf", {});
  /** @type {import("./lab-drag.js").Slot[]} */
  const slots = [];
  /** @type {Map<string, HTMLElement>} */
  const grips = new Map();
  let lifted = "";

  /** Show where a line could stand, or none ("") of it. @param {string} role */
  function lift(role) {
    const held = grips.get(role || lifted);
    const top = held?.getBoundingClientRect().top;
    lifted = role;
    for (const slot of slots) slot.el.hidden = slot.role !== role;
    for (const [name, grip] of grips) {
      put(grip, { "aria-pressed": name === role });
      grip.closest("li, div")?.classList.toggle("av-lifted", name === role);
    }
    code.el.classList.toggle("av-lifting", role !== "");
    hold(held, top);
  }
  /** @param {Offer} offer @param {string} value @param {number} depth @param {string} tag */
  function slotOf(offer, value, depth, tag) {
    const label = `put ${offer.line} ${called(offer, value)}`;
    const drop = () => move(offer.name, value, el.getBoundingClientRect().top);
    const face = h("button.av-here", { type: "button", "aria-label": label, click: drop }, called(offer, value));
    const el = h(tag, { style: `--av-depth: ${depth}` }, face);
    el.hidden = true;
    slots.push({ role: offer.name, el, drop });
    return el;
  }
  /** @param {Offer} offer @param {(Node | string)[]} content */
  function gripOf(offer, content) {
    const places = placesOf(rows, offer);
    const at = places.findIndex(({ here }) => here);
    const where = called(offer, places[at].value);
    const about = `${offer.line}, ${where}; arrow keys move it`;
    const grip = h("button.av-grip", { type: "button", "aria-label": about, "aria-pressed": false, ...KEYS_ARE_MINE },
      ...content);
    grip.addEventListener("click", (event) => {
      own(event);
      if (!carried.ended()) lift(lifted === offer.name ? "" : offer.name);
    });
    grip.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && lifted) {
        own(event);
        return lift("");
      }
      const by = vertical(event);
      if (!by) return;
      own(event);
      shift(offer, by);
    });
    grip.addEventListener("pointerdown", (event) => carried.begin(event, offer.name, grip));
    grips.set(offer.name, grip);
    return grip;
  }
  /** Move a line to the place below or above its own. @param {Offer} offer @param {number} by */
  function shift(offer, by) {
    const places = placesOf(rows, offer);
    const next = places[places.findIndex(({ here }) => here) + by];
    if (next) move(offer.name, next.value);
  }
  const carried = carrying(slots, lift);
  /** Each line of the loop as it can be moved, and the places between. */
  function arrange() {
    const list = /** @type {Element} */ (lines[0].parentElement);
    let last = /** @type {Element | null} */ (null);
    for (const [n, depth, role, value] of rows) {
      const offer = offers.find(({ name, line }) => name === role && line);
      if (n) last = offer ? graspable(lines[n - 1], offer) : lines[n - 1];
      else if (offer) {
        const slot = slotOf(offer, value, depth, "li.av-slot");
        list.insertBefore(slot, last ? last.nextSibling : list.firstChild);
        last = slot;
      }
    }
  }
  /** @param {Element} line @param {Offer} offer */
  function graspable(line, offer) {
    const text = /** @type {HTMLElement} */ (line.querySelector("code"));
    const first = /** @type {Text} */ (text.firstChild);
    const [margin] = first.data.match(/^ */) ?? [""];
    first.data = first.data.slice(margin.length);
    const grip = gripOf(offer, [...text.childNodes]);
    grip.style.setProperty("--av-margin", `${margin.length}ch`);
    text.replaceChildren(margin, grip);
    line.classList.add("av-movable");
    return line;
  }
  /** Lines that were taken out, and where a lifted one is taken out. */
  function stow() {
    for (const offer of offers) {
      const out = offer.line && placesOf(rows, offer).find(({ value }) => value === NOWHERE);
      if (!out) continue;
      shelf.append(out.here ? h("div.av-out.av-movable", {}, gripOf(offer, [h("code", {}, offer.line)]))
        : slotOf(offer, NOWHERE, 0, "div.av-slot"));
    }
  }
  arrange();
  stow();
  shelf.prepend(h("span.av-quiet", {}, `Taken out: ${shelf.querySelector(".av-out") ? "" : "nothing"}`));
  shelf.append(.../** @type {NodeListOf<Element>} */ (code.el.querySelectorAll(".av-note")));
  code.el.append(shelf);
  code.head.append(h("span.av-quiet", {}, "Drag or tap a marked line; ↑ and ↓ move it."));
  return { ...code, focus: coming(grips) };
}
