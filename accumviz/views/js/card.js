/** One card of a graph: what `graph.py` wrote on it, and the numbers so far. */

/** @import { Moment } from "./moment.js" */
/** @import { NodeData } from "./types.d.ts" */

import { svg, tell } from "./dom.js";
import { isGrad } from "./moment.js";

const LINE = 17;

/** @param {NodeData} node @param {string[]} numbers */
export function card(node, numbers) {
  const [x, y] = node.b;
  const classes = node.k.map((kind) => `av-${kind}`).join(".");
  const marks = node.m.map(([name, at, text = ""]) => svg(name, at, text));
  const el = svg(`g.av-node.${classes}`, { transform: `translate(${x} ${y})` }, ...marks);
  numbers.forEach((text, i) => {
    const base = node.y + LINE * i;
    const name = svg("text.av-quiet", { x: 11, y: base }, node.n[i]);
    el.append(svg(isGrad(node.n[i]) ? "g.av-late" : "g", {}, name, svg("text", { x: 59, y: base }, text)));
  });
  const saves = el.querySelector(".av-saves");
  const told = saves?.textContent ?? "";

  /** @param {Moment} moment @param {number} i @param {boolean} chosen */
  function draw({ now, ran, total, last, done, built, kept }, i, chosen) {
    const ready = done.has(i);
    const freed = ready && Boolean(node.s) && !kept;
    // A parameter is there before anything is computed with it.
    const unborn = !built.has(i) && node.leaf === undefined;
    const wrote = now && ready && node.leaf !== undefined;
    const looks = { unborn, done: ready, gone: freed, lit: ran < total && i === last, wrote, chosen };
    for (const [look, on] of Object.entries(looks)) el.classList.toggle(`av-${look}`, on);
    if (saves) tell(saves, freed ? "freed" : told);
  }
  return { el, draw };
}
