/** When two ranks compute and when they communicate: lanes of boxes on one axis of time, a switch and a slider. */

/** @import { Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { OverlapData } from "./types.d.ts" */

import { group, h, KEYS_ARE_MINE, range, slide, tell } from "../../views/js/dom.js";
import { read } from "../../views/js/packed.js";
import { startAll } from "../../views/js/page.js";

const HINT = "Point at a box to read what it is.";

/** The lanes; a box that two settings share moves from one place to the other. @param {OverlapData["lanes"]} names */
function lanesOf(names) {
  const tracks = names.map(() => h("div"));
  const rows = names.map(([who, kind], i) =>
    h(`div.av-lane.av-${kind}`, {}, h("p", {}, h("b", {}, who), ` ${kind}`), tracks[i]));
  const el = h("div.av-lanes", { role: "img" }, ...rows);
  /** @type {Map<string, HTMLElement>} */
  const boxes = new Map();
  /** @param {OverlapData["runs"][0][0]} run */
  function draw({ says, marks }) {
    const gone = new Set(boxes.keys());
    for (const [lane, name, look, left, width, top, height, label, told] of marks) {
      const box = boxes.get(name) ?? h("span", {}, h("b"));
      if (gone.delete(name) === false) {
        boxes.set(name, box);
        tracks[lane].append(box);
      }
      box.className = look.split(" ").map((one) => `av-${one}`).join(" ");
      Object.assign(box.style, { left: `${left}%`, width: `${width}%`, top: `${top}%`, height: `${height}%` });
      box.dataset.says = told;
      tell(/** @type {Element} */ (box.firstChild), label);
    }
    for (const name of gone) {
      boxes.get(name)?.remove();
      boxes.delete(name);
    }
    el.setAttribute("aria-label", says);
  }
  return { el, draw };
}

/** @param {Host} host @returns {Promise<Dispose>} */
async function overlap({ model, el }) {
  const data = /** @type {OverlapData} */ ((await read(model.get("data"))).data);
  let [cap, quiet] = data.start;
  const lanes = lanesOf(data.lanes);
  const toggle = h("input", { type: "checkbox", role: "switch", ...KEYS_ARE_MINE, input: () => {
    quiet = Number(toggle.checked);
    draw();
  } });
  const caps = range("bucket_cap_mb", () => {
    cap = Number(caps.value);
    draw();
  }, "av-caps");
  const shown = h("output");
  const says = h("p.av-says", { "aria-live": "polite" });
  const points = h("p.av-points", {}, HINT);
  const legend = h("p.av-legend", {}, ...data.legend.map(([look, text]) =>
    h("span", {}, h(`i.av-${look}.av-even`), h(`i.av-${look}.av-odd`), ` ${text}`)));
  /** @param {Event} event */
  const point = ({ target }) =>
    tell(points, /** @type {HTMLElement} */ (target).closest("span")?.dataset.says || HINT);
  for (const kind of ["pointerover", "click"]) lanes.el.addEventListener(kind, point);
  el.append(h("div.av-hero", group("One window of two ranks"),
    h("div.av-keys", {},
      h("label.av-quiet", {}, toggle, h("code", {}, "no_sync"), " for all but the last micro-batch"),
      h("label", {}, h("code", {}, "bucket_cap_mb"), caps, shown)),
    says, lanes.el, points), legend);

  function draw() {
    const run = data.runs[cap][quiet];
    toggle.checked = quiet === 1;
    slide(caps, cap, data.caps.length - 1, `${data.caps[cap]} MiB`);
    tell(shown, `${data.caps[cap]} MiB`);
    tell(says, run.says);
    tell(points, HINT);
    lanes.draw(run);
  }
  draw();
  return () => {};
}

startAll("overlap", overlap, "what it shows in words");
