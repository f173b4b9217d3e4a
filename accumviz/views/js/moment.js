/** Where a backward stands: which nodes of its graph have run by a moment, and how that is told. */

/** @import { Ledger } from "./ledger.js" */
/** @import { At, Data, GraphData, Layout, NodeData } from "./types.d.ts" */

import { clamp, counted } from "./numbers.js";

/**
 * @typedef {object} Moment
 * @property {number} owner  the backward whose graph this is
 * @property {GraphData | undefined} graph
 * @property {Layout | undefined} layout
 * @property {NodeData[]} nodes
 * @property {boolean} now  whether the graph runs at this event
 * @property {number} total
 * @property {number} pos  how far it has come: below 0 nodes are still to be built, above 0 so many have run
 * @property {number} ran  how many nodes have run
 * @property {Set<number>} built  the nodes that the forward has made
 * @property {boolean} coming  whether this is the graph of a backward before which nothing has run
 * @property {number | undefined} last  the node that ran last
 * @property {Set<number>} done
 * @property {boolean} kept  whether what the nodes saved outlives the backward
 */

/** Below 0: how many nodes a forward has yet to build. @param {GraphData | undefined} graph */
const unmade = (graph) => (!graph || graph.made ? 0 : -graph.order.length);

/** @param {Ledger} ledger @param {Data} data @param {Pick<At, "e" | "n">} at @returns {Moment} */
export function moment(ledger, data, { e, n }) {
  const since = ledger.backward[e] ?? -1;
  const coming = since < 0;
  const owner = coming ? ledger.kinds.indexOf("backward") : since;
  const graph = data.graphs[data.of[owner]];
  const now = owner === e && Boolean(graph);
  const order = graph?.order ?? [];
  const total = order.length;
  const least = unmade(graph);
  const rest = coming ? least : total;
  const pos = now && n !== null ? clamp(n, least, total) : rest;
  const ran = Math.max(pos, 0);
  const layout = graph && data.layouts[graph.l];
  const nodes = layout?.n ?? [];
  const done = new Set(order.slice(0, ran));
  // The engine runs first what was made last.
  const built = new Set(order.slice(Math.max(-pos, 0)));
  const kept = ledger.retained.has(owner);
  return { owner, graph, layout, nodes, now, total, pos, ran, built, coming, last: order[ran - 1], done, kept };
}

/** What a leaf adds is its gradient. @param {string} name */
export const isGrad = (name) => name === "grad" || name === "adds";

/** A node and its numbers; its gradient is not known before it has run. @param {Moment} moment @param {number} i */
function about({ graph, nodes }, i, done = true) {
  const node = nodes[i];
  const values = graph?.v[i] ?? [];
  const told = values.map((text, k) => (isGrad(node.n[k]) && !done ? "" : `, ${node.n[k]} ${text}`));
  return node.t + (node.leaf === undefined ? "" : " (AccumulateGrad)") + told.join("");
}

/** How far the backward has come ("" when it is through). @param {Moment} moment */
export function progress(moment) {
  const { now, total, pos, ran, built, last } = moment;
  if (!now || ran === total) return "";
  if (pos < 0) return `The forward builds the graph: ${built.size} of ${counted(total, "node")}.`;
  if (last === undefined) return `The forward has built ${counted(total, "node")}; none has run backward yet.`;
  return `${ran} of ${total} nodes have run, the last is ${about(moment, last)}.`;
}

/** The selected node ("" when there is none). @param {Moment} moment @param {number} i */
export function selection(moment, i) {
  const { nodes, now, done, built, kept } = moment;
  if (!now || !nodes[i] || !built.has(i)) return "";
  const holding = done.has(i) && !kept ? ", freed" : ", holding what it saved";
  return `Selected: ${about(moment, i, done.has(i))}${product(moment, i)}${nodes[i].s ? holding : ""}.`;
}

/**
 * The gradient of a node as what came along its edge times that edge's factor.
 * @param {Moment} moment @param {number} i
 */
function product({ graph, layout, nodes, done }, i) {
  const edge = layout?.e.findIndex(([, target]) => target === i) ?? -1;
  const by = graph?.x?.[edge];
  if (!layout || !by || !done.has(i)) return "";
  const grad = (/** @type {number} */ k) => graph.v[k][nodes[k].n.findIndex(isGrad)]?.replace(/[[\]]/g, "");
  return `: ${grad(layout.e[edge][0])} ${by} = ${grad(i)}`;
}

/** What stands below the graph. @param {Ledger} ledger @param {Data} data @param {Moment} moment */
export function remark(ledger, data, { owner, graph, now, coming, kept }) {
  if (coming) return data.before[1];
  if (!graph) return data.missing;
  const past = `The graph of event ${ledger.index(owner)}, ${kept ? "retained" : "freed by its backward"}.`;
  return [now ? "" : past, data.layouts[graph.l].notes.join("; ")].join(" ").trim();
}
