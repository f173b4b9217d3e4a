/** The pane of the graph of the moment: nodes light up in the engine's order and are then freed. */

/** @import { App } from "./player.js" */
/** @import { Moment } from "./moment.js" */
/** @import { At, GraphData, Layout } from "./types.d.ts" */

import { card } from "./card.js";
import { svg, h, own, pane, put, range, reveal, scrolls, slide, tell, vertical } from "./dom.js";
import { pointedAt } from "./light.js";
import { clamp } from "./numbers.js";
import { moment, remark } from "./moment.js";
import { zooming } from "./zoom.js";

/** @param {Layout} layout @param {GraphData} graph @param {(node: number) => void} click */
function drawing(layout, graph, click) {
  const cards = layout.n.map((node, i) => card(node, graph.v[i]));
  const edges = layout.e.map(([, , curve, tip], i) => {
    const by = svg("text.av-by", middle(curve, tip), graph.x?.[i] ?? "");
    return svg("g", {}, svg("path.av-curve", { d: curve }), svg("path.av-tip", { d: tip }), by);
  });
  const at = (/** @type {Element | null} */ hit) => cards.findIndex(({ el }) => el === hit);
  const frame = { viewBox: `0 0 ${layout.w} ${layout.h}`, "aria-hidden": "true" };
  const el = svg("svg", frame, ...edges, ...cards.map(({ el }) => el));
  el.addEventListener("click", (event) => {
    click(at(/** @type {Element} */ (event.target).closest(".av-node")));
  });

  /** @param {Moment} at @param {number} chosen */
  function draw(at, chosen) {
    cards.forEach((one, i) => one.draw(at, i, i === chosen));
    edges.forEach((edge, i) => {
      const [source] = layout.e[i];
      edge.classList.toggle("av-flown", at.now && at.done.has(source));
      edge.classList.toggle("av-unborn", !at.built.has(source));
    });
  }
  return { el, graph, layout, draw, cards, at };
}


/** Where the number of an edge stands: beside the middle of its curve. @param {string} curve @param {string} tip */
function middle(curve, tip) {
  const [[x0, y0], [x1, y1]] = [curve, tip].map((path) => path.slice(1).split(/[ C]/).map(parseFloat));
  return { x: (x0 + x1) / 2 + 9, y: (y0 + y1) / 2 + 4 };
}

/** @param {App} app */
export function graphPane(app) {
  const { ledger, data, go, at } = app;
  // As tall as the tallest graph asks, within reason, whichever is shown.
  const tall = clamp(0.89 * Math.max(0, ...data.layouts.map(({ h: height }) => height)), 224, 400);
  const about = scrolls("Graph; up and down select a node");
  const box = h("div.av-win", { ...about, style: `--av-tall: ${tall}px` });
  const note = h("p.av-note");
  const told = h("span.av-told");
  const steps = range("node by node", () => go({ n: Number(steps.value) - total() }));
  const sub = h("label.av-sub", {}, steps, told);
  const made = pane("graph", "Graph", box, h("div.av-below", {}, sub, note));
  const view = zooming(box);
  const total = () => shown?.graph.order.length ?? 0;
  const tools = h("span.av-tools", {}, ...view.tools);
  made.head.append(tools);
  /** @type {ReturnType<typeof drawing> | undefined} */
  let shown;
  // The node that is in view (NaN: look again), and the one that is to be.
  let [lit, target] = [NaN, -1];
  /** @type {Set<number>} */
  let warm = new Set();

  /** @param {number} node */
  function choose(node) {
    const leaf = shown?.layout.n[node]?.leaf;
    const p = ledger.rows.findIndex(({ n }) => n === leaf);
    go({ node: node === at().node ? -1 : node, ...(p < 0 ? {} : { p }) });
    if (node >= 0) app.light?.([momentAt(at()).owner]);
  }
  pointedAt(app, box, ({ target }) =>
    (shown?.at(target.closest(".av-node")) ?? -1) < 0 ? undefined : [momentAt(at()).owner]);
  /** A backward begins at its root; what else happens to `.grad` happens at the leaves. @param {Set<number>} lit */
  function light(lit) {
    warm = lit;
    const mine = lit.has(momentAt(at()).owner);
    const others = [...lit].some((e) => ledger.kinds[e] !== "backward");
    if (!shown) return;
    const { cards, layout } = shown;
    cards.forEach(({ el }, i) => {
      const { k, leaf } = layout.n[i];
      el.classList.toggle("av-warm", (others && leaf !== undefined) || (mine && k.includes("root")));
    });
  }
  box.addEventListener("keydown", (event) => {
    const by = vertical(event);
    if (!shown || !by) return;
    own(event);
    const { order } = shown.graph;
    const here = order.indexOf(at().node);
    choose(order.at(here < 0 && by < 0 ? by : (here + by) % order.length) ?? -1);
  });

  /** @param {GraphData | undefined} graph */
  function show(graph) {
    lit = NaN;
    shown = graph && drawing(data.layouts[graph.l], graph, (node) => view.isStill() && choose(node));
    view.resize(shown?.layout);
    box.replaceChildren(...(shown ? [shown.el] : []));
    view.fit();
    follow(graph?.order[0] ?? -1); // the root, where both ways begin or end
  }
  /** Bring a node into view, once. @param {number} node */
  function follow(node) {
    if (node >= 0 && node !== lit && shown?.layout.n[node]) {
      const [x, y, width, height] = shown.layout.n[node].b.map((side) => side * view.scale());
      reveal(box, y, height, 40);
      const seen = x >= box.scrollLeft && x + width <= box.scrollLeft + box.clientWidth;
      if (!seen) box.scrollLeft = x + (width - box.clientWidth) / 2;
    }
    lit = node;
  }
  /** Into another width or height, with what was in view. */
  function fit() {
    view.fit();
    const node = lit;
    lit = NaN;
    follow(node);
  }
  const momentAt = (/** @type {Pick<At, "e" | "n">} */ state) => moment(ledger, data, state);
  /** @param {At} state */
  function draw(state) {
    const now = momentAt(state);
    const { graph, pos, ran, built, total } = now;
    sub.hidden = !now.now;
    tools.hidden = !graph;
    tell(note, remark(ledger, data, now));
    if (graph !== shown?.graph) show(graph);
    if (!graph) return;
    const some = pos < 0 ? `${built.size} of ${total} built` : `${ran} of ${total} run`;
    tell(told, ran === total ? `all ${total} run` : some);
    slide(steps, pos + total, 2 * total, told.textContent);
    const [color, ink] = ledger.color(now.owner);
    put(box, { style: `--av-tall: ${tall}px; --av-now: ${color}; --av-on-now: ${ink}` });
    shown?.draw(now, state.node);
    if (warm.size) light(warm); // the drawing may be another one
    const front = pos < 0 ? graph.order[Math.min(-pos, total - 1)] : now.last ?? graph.order[0];
    target = now.coming ? graph.order[0] : ran < total ? front : state.node;
  }
  /** The nodes that a backward being stepped through has run; null: all. @param {At} state */
  function wrote(state) {
    const { nodes, total, ran, done } = momentAt(state);
    return ran < total ? [...done].map((i) => nodes[i]) : null;
  }
  /** Where a node is on the page. @param {number} i */
  const boxOf = (i) => shown?.cards[i].el.getBoundingClientRect();
  return { ...made, moment: momentAt, wrote, fit, boxOf, light, draw, settle: () => follow(target) };
}
