/** The loop's code, whose lines can be moved: dragged by a mouse, tapped by a finger, by arrow keys. */

/** @import { App } from "./player.js" */
/** @import { Choice, LabRow, Offer } from "./types.d.ts" */

import { codePane } from "./code.js";
import { h, KEYS_ARE_MINE, own, put, vertical } from "./dom.js";

const NOWHERE = "nowhere";
/** A mouse that moves less was a click. */
const STILL = 4;

/**
 * @typedef {object} Movable  what can be moved, and how
 * @property {Offer[]} offers
 * @property {Choice} choice
 * @property {LabRow[]} rows
 * @property {(role: string, value: string) => void} put
 */

/** Where a line stands and could stand, from top to bottom; taken out last. @param {LabRow[]} rows @param {Offer} offer */
function placesOf(rows, { name, values }) {
  const places = rows.filter(([, , role]) => role === name).map(([n, , , value]) => ({ value, here: n > 0 }));
  const out = !places.some(({ here }) => here);
  return values.includes(NOWHERE) ? [...places, { value: NOWHERE, here: out }] : places;
}

/** @param {Offer} offer @param {string} value */
const called = ({ values, labels }, value) => labels[values.indexOf(value)];

/** @param {App} app @param {Movable} movable */
export function movingPane(app, { offers, rows, put: move }) {
  const code = codePane(app);
  const lines = [...code.el.querySelectorAll("li.av-line")];
  const shelf = h("div.av-shelf", {});
  /** @type {{role: string, value: string, el: HTMLElement}[]} */
  const slots = [];
  /** @type {Map<string, HTMLElement>} */
  const grips = new Map();
  let lifted = "";

  /** Show where a line could stand, or none ("") of it. @param {string} role */
  function lift(role) {
    lifted = role;
    for (const slot of slots) slot.el.hidden = slot.role !== role;
    for (const [name, grip] of grips) {
      put(grip, { "aria-pressed": name === role });
      grip.closest("li, div")?.classList.toggle("av-lifted", name === role);
    }
    code.el.classList.toggle("av-lifting", role !== "");
  }
  /** @param {Offer} offer @param {string} value @param {number} depth @param {string} tag */
  function slotOf(offer, value, depth, tag) {
    const label = `put ${offer.line} ${called(offer, value)}`;
    const face = h("button.av-here", { type: "button", "aria-label": label, click: () => move(offer.name, value) },
      value === NOWHERE ? "take it out" : called(offer, value));
    const el = h(tag, { style: `--av-depth: ${depth}` }, face);
    el.hidden = true;
    slots.push({ role: offer.name, value, el });
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
      if (!dragged) lift(lifted === offer.name ? "" : offer.name);
      dragged = false;
    });
    grip.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && lifted) {
        own(event);
        return lift("");
      }
      const next = places[at + (vertical(event) ?? NaN)];
      if (vertical(event)) own(event);
      if (next) move(offer.name, next.value);
    });
    grip.addEventListener("pointerdown", (event) => drag(event, offer, grip));
    grips.set(offer.name, grip);
    return grip;
  }
  let dragged = false;
  /** A mouse carries the line along; a finger taps, since what it drags is the page. */
  function drag(/** @type {PointerEvent} */ { pointerType, button, clientX, clientY }, /** @type {Offer} */ offer,
    /** @type {HTMLElement} */ grip) {
    dragged = false;
    if (pointerType === "touch" || button) return;
    const ended = new AbortController();
    const { signal } = ended;
    /** @type {typeof slots[number] | undefined} */
    let near;
    /** @param {PointerEvent} event */
    function follow(event) {
      if (!dragged && Math.hypot(event.clientX - clientX, event.clientY - clientY) < STILL) return;
      if (!dragged) lift(offer.name);
      dragged = true;
      near = nearest(event.clientY, grip);
      for (const slot of slots) slot.el.classList.toggle("av-near", slot === near);
    }
    function drop() {
      ended.abort();
      if (!dragged) return;
      lift("");
      if (near) move(offer.name, near.value);
    }
    addEventListener("pointermove", follow, { signal });
    addEventListener("pointerup", drop, { signal });
    addEventListener("pointercancel", () => {
      ended.abort();
      lift("");
    }, { signal });
  }
  /** The place of the lifted line that is nearest to a height; none where the line itself is nearer. */
  function nearest(/** @type {number} */ y, /** @type {HTMLElement} */ grip) {
    const away = (/** @type {Element} */ el) => {
      const { top, bottom } = el.getBoundingClientRect();
      return Math.abs((top + bottom) / 2 - y);
    };
    const [first] = slots.filter(({ role }) => role === lifted).sort((a, b) => away(a.el) - away(b.el));
    return first && away(first.el) < away(grip) ? first : undefined;
  }

  let last = /** @type {Element | null} */ (null);
  const list = /** @type {Element} */ (lines[0].parentElement);
  for (const [n, depth, role, value] of rows) {
    const offer = offers.find(({ name, line }) => name === role && line);
    const line = n ? lines[n - 1] : null;
    if (line && offer) {
      const text = /** @type {HTMLElement} */ (line.querySelector("code"));
      text.replaceChildren(gripOf(offer, [...text.childNodes]));
      line.classList.add("av-movable");
    }
    const made = line ?? (offer && slotOf(offer, value, depth, "li.av-slot"));
    if (!line && made) list.insertBefore(made, last ? last.nextSibling : list.firstChild);
    last = made ?? last;
  }
  for (const offer of offers) {
    const places = offer.line ? placesOf(rows, offer) : [];
    const out = places.find(({ value }) => value === NOWHERE);
    if (out?.here) shelf.append(h("div.av-out.av-movable", {}, gripOf(offer, [h("code", {}, offer.line)])));
    else if (out) shelf.append(slotOf(offer, NOWHERE, 0, "div.av-slot"));
  }
  shelf.prepend(h("span.av-quiet", {}, "Taken out: "));
  code.el.append(shelf);
  const hint = "Drag a marked line, or tap it and then a place for it; with keys, ↑ and ↓ move it.";
  code.el.append(h("p.av-note", {}, hint));
  return { ...code, focus: (/** @type {string} */ role) => grips.get(role)?.focus({ preventScroll: true }) };
}
