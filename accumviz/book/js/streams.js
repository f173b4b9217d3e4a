/** The chain rule: streams as wide as their gradients are large, for each recorded value of w and x. */

/** @import { Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { StreamsData } from "./types.d.ts" */

import { group, h, put, range, slide, tell } from "../../views/js/dom.js";
import { clamp, number } from "../../views/js/numbers.js";
import { read } from "../../views/js/packed.js";
import { startAll } from "../../views/js/page.js";

/** So far a finger moves from one recorded value to the next. */
const STEP = 14;

/** @param {Host} host @returns {Promise<Dispose>} */
async function streams({ model, el }) {
  const { names, axes, start, rows } = /** @type {StreamsData} */ ((await read(model.get("data"))).data);
  const root = /** @type {HTMLElement} */ (el.parentElement);
  /** @param {string} which */
  const all = (which) => /** @type {SVGElement[]} */ ([...root.querySelectorAll(which)]);
  const [texts, flowing, joining] = [all("[data-number]"), all("[data-width]"), all("[data-way]")];
  const at = [...start];
  const sliders = axes.map(([name, title], axis) => {
    const slider = range(title, () => move(axis, Number(slider.value)));
    const shown = h("output");
    el.append(h("label", {}, `${title} `, slider, shown));
    return { slider, shown, name, title };
  });
  put(el, { class: "av-keys", ...group("The values of w and x₁") });

  /** @param {number} axis @param {number} to */
  function move(axis, to) {
    at[axis] = clamp(to, 0, axes[axis][2] - 1);
    draw();
  }

  function draw() {
    const row = rows[at[0] * axes[1][2] + at[1]];
    const value = (name = "") => row[names.indexOf(name)];
    for (const text of texts) tell(text, number(value(text.dataset.number)));
    /** @param {SVGElement} path @param {string} [name] */
    const width = ({ ownerSVGElement: drawing }, name) => Number(drawing?.dataset.scale) * Math.abs(value(name));
    for (const path of flowing) put(path, { "stroke-width": width(path, path.dataset.width) });
    for (const path of joining) {
      // The streams meet side by side: each is moved by half the width of the other one.
      const { way = "", beside, side } = path.dataset;
      const across = Number(path.ownerSVGElement?.dataset.middle) + Number(side) * width(path, beside) / 2;
      put(path, { d: way.replaceAll("#", `${across}`) });
    }
    sliders.forEach(({ slider, shown, name, title }, axis) => {
      const text = number(value(name));
      slide(slider, at[axis], axes[axis][2] - 1, `${title} = ${text}`);
      tell(shown, text);
    });
  }

  for (const box of all("[data-drag]")) {
    const axis = axes.findIndex(([name]) => name === box.dataset.drag);
    /** @type {[number, number] | undefined} */
    let from;
    put(box, {
      pointerdown: (/** @type {PointerEvent} */ event) => {
        from = [event.clientX, at[axis]];
        box.setPointerCapture(event.pointerId);
      },
      pointermove: (/** @type {PointerEvent} */ { clientX }) => {
        if (from) move(axis, from[1] + Math.round((clientX - from[0]) / STEP));
      },
      lostpointercapture: () => { from = undefined; },
    });
  }
  draw();
  return () => {};
}

startAll("streams", streams, "the picture, and what it shows in words");
