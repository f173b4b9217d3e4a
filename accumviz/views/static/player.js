/**
 * The player: one ES module for static pages and for anywidget, with no import.
 * What a recording says becomes text nodes and attributes, never markup.
 *
 * @typedef {{e: number, n: number | null, p: number, node: number}} At  the one state: event, nodes that have run
 *   (null: all), selected parameter and selected node (-1: none)
 * @typedef {{born: number, amount: number, fresh: boolean, used: boolean}} Part
 * @typedef {{get: (key: string) => any, set: (key: string, value: any) => void, save_changes: () => void, on: Function}} Model
 */

const DASH = { step: [], zero_grad: [6, 4] };
const ICONS = { back: "M11 3v10L4 8z", play: "M4 2.5v11l9-5.5z", pause: "M4 3h3v10H4zM9 3h3v10H9z", next: "M5 3v10l7-5z" };

function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElementNS(/^(svg|g|path|rect|text|line|title)$/.test(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
  put(made, classes.length ? { class: classes.join(" "), ...attributes } : attributes).append(...children);
  return made;
}

function put(made, attributes) {
  for (const [key, value] of Object.entries(attributes)) typeof value === "function" ? made.addEventListener(key, value) : made.setAttribute(key, value);
  return made;
}

const group = (label) => ({ role: "group", "aria-label": label });
const scrolls = (label) => ({ tabindex: 0, ...group(label) });
const icon = (name) => h("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, h("path", { d: ICONS[name] }));
const button = (name, label, click, face = icon(name)) => h(`button.av-b.av-b-${name}`, { type: "button", "aria-label": label, title: label, click }, face);
/** Inputs keep their keys to themselves in hosts that have shortcuts. */
const input = (name, type, label, listen) => h(name, { type, min: 0, value: type === "range" ? 0 : "", "aria-label": label, "data-lm-suppress-shortcuts": "true", input: listen });
const vertical = ({ key }) => ({ ArrowDown: 1, ArrowUp: -1 })[key];
const own = (event) => { event.preventDefault(); event.stopPropagation(); };
/** Move a slider and its track. */
function slide(slider, value, most, text) {
  Object.assign(slider, { max: most, value });
  slider.style.setProperty("--av-at", `${(100 * value) / (most || 1)}%`);
  slider.setAttribute("aria-valuetext", text);
}
const sum = (parts) => parts.reduce((whole, { amount }) => whole + amount, 0);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Write a number as `style.number` does. */
function number(x, digits = 4) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  let text = size.toPrecision(digits);
  if (size >= 1e-3 && size < 1e5) text = text.includes("e") ? size.toFixed(0) : String(Number(text));
  else {
    const [mantissa, exponent] = size.toExponential(digits - 1).split("e");
    text = `${Number(mantissa)}e${Number(exponent)}`.replace("e-", "e−");
  }
  return (x < 0 ? "−" : "") + text;
}

/** Cut a long name in the middle: both ends tell it apart. */
const shorten = (text, limit) => (text.length <= limit ? text : `${text.slice(0, (limit - 1) >> 1)}…${text.slice(-(limit >> 1))}`);

/** Read a payload: JSON as it stands, or compressed with columns of bytes. */
async function read(json) {
  if (json.data) return json;
  const data = JSON.parse(json);
  if (!data.z) return { data };
  const text = atob(data.z), packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const whole = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(whole).arrayBuffer()), end = 4 + new DataView(raw.buffer).getUint32(0, true);
  return { data: JSON.parse(new TextDecoder().decode(raw.subarray(4, end))), bytes: raw.subarray(end) };
}

/** A column of norms, -1 for None: plain, or 16-bit logarithms with the high bytes first. */
function column(packed, bytes) {
  if (Array.isArray(packed)) return Float64Array.from(packed, Number);
  const { at, size: count, low, step } = packed;
  const table = new Float32Array(65536).map((_, code) => Math.exp(low + (code - 2) * step));
  [table[0], table[1], table[65534], table[65535]] = [-1, 0, NaN, Infinity];
  const found = new Float32Array(count);
  for (let i = 0; i < count; i++) found[i] = table[bytes[at + i] * 256 + bytes[at + count + i]];
  return found;
}

/** A ledger as the page has it: what was live in each `.grad` after each event. */
class Recording {
  constructor(data, bytes) {
    const e = data.e || { k: [], by: [] }, n = e.k.length;
    Object.assign(this, { data, bytes, e, length: n, count: data.count || 0, kinds: e.k.map((k) => data.kinds[k][0]), by: new Map(e.by) });
    [this.skipped, this.inside, this.retained] = [e.skipped, e.inside, e.retained].map((list) => new Set(list));
    this.colors = new Map((data.colors || []).map(([label, ...color]) => [label, color]));
    const [c, g] = [data.c, data.g].map((packed) => column(packed || [], bytes));
    /** Parameters, then groups of them. */
    this.rows = (data.p || []).map((row, p) => {
      const x = data.x[p]?.map((side) => side.map((values) => values && values.map(Number))), at = p * n;
      return { ...row, p, x, y: new Map(row.y), r: row.r.map(Number), c: c.subarray(at, at + n), g: g.subarray(at, at + n), signed: Boolean(x) && row.d.every((side) => side === 1) };
    });
    [this.scales, this.wipes] = [/clip|unscale/, /zero_grad|edit/].map((some) => this.kinds.map((kind) => some.test(kind)));
    let last = -1;
    this.backward = this.kinds.map((kind, i) => (last = kind === "backward" ? i : last));
  }

  index(e) { return this.e.i ? this.e.i[e] : e; }
  label(e) { return this.data.strings[this.e.l[e]]; }
  head(e) { return `Event ${this.index(e)}, ${this.e.h[e]}`; }
  color(e) { return this.colors.get(this.e.l?.[e]) || ["#0072B2", "#fff"]; }
  kindColor(e) { return this.data.kinds[this.e.k[e]][1]; }

  /** What was added, and `.grad` (null: none): signed where the sign is known. */
  added(e, row) { return row.c[e] < 0 ? null : row.signed ? row.x[0][e][0] : row.c[e]; }
  grad(e, row) { return e < 0 || row.g[e] < 0 ? null : row.signed ? row.x[1][e][0] : row.g[e]; }
  gone(e, row) { return row.g[e] < 0 || (row.g[e] === 0 && this.wipes[e]); }
  steps(e, row) { return this.by.has(e) && !this.skipped.has(e) && row.o.includes(this.by.get(e)); }

  /** The contributions live in `.grad` after an event, the oldest first. @returns {Part[]} */
  stack(e, row, now = e) {
    const parts = [];
    for (let i = e, scale = 1, mean = 1, used = false; i >= 0; i--) {
      const added = this.added(i, row), had = this.grad(i, row);
      if (added !== null) parts.push({ born: i, amount: added * scale * mean, fresh: i === now, used });
      if (this.gone(i, row)) break;
      mean = row.y.get(i) ?? mean;
      const factor = i && this.scales[i] ? had / this.grad(i - 1, row) : 1;
      if (factor && Number.isFinite(factor)) scale *= factor;
      used ||= this.steps(i, row);
    }
    parts.reverse();
    if (row.signed && row.g[e] >= 0) {
      const rest = this.grad(e, row) - sum(parts), most = parts.reduce((most, { amount }) => Math.max(most, Math.abs(amount)), Math.abs(this.grad(e, row)));
      if (Math.abs(rest) > 1e-4 * most) parts.unshift({ born: -1, amount: rest });
    }
    return parts;
  }

  /** As it is drawn: norms do not add up, so parts share the height of `‖.grad‖`. */
  drawn(e, row, now) {
    const grad = this.grad(e, row), parts = this.stack(e, row, now), whole = sum(parts);
    const share = row.signed || !whole ? 1 : grad / whole;
    parts.forEach((part) => { part.height = part.amount * share; });
    return { grad, parts, absent: grad === null, broken: grad !== null && !Number.isFinite(grad + whole) };
  }

  /** The contributions erased before any step used them. */
  lost(e, row) {
    if (!e || !this.gone(e, row) || this.gone(e - 1, row)) return [];
    return this.stack(e - 1, row).filter(({ born, used }) => born >= 0 && !used && !this.inside.has(born)).map(({ born }) => born);
  }

  /** A contribution or a `.grad`, as `words.value`. */
  value(e, row, of) {
    const norm = (of ? row.g : row.c)[e], exact = row.x?.[of][e];
    if (e < 0 || norm < 0) return of ? "None" : "";
    if (!exact) return `‖·‖ ${number(norm, this.data.digits)}`;
    return exact.length > 1 ? `(${exact.map((x) => number(x)).join(", ")})` : (!of && exact[0] > 0 ? "+" : "") + number(exact[0]);
  }

  /** An event in one sentence, as `words.sentence`; of many parameters only the selected one. */
  sentence(e, chosen = -1) {
    const P = this.count, few = P <= 4, parts = [];
    for (const p of few ? Array(P).keys() : chosen < 0 ? [] : [chosen]) {
      const row = this.rows[p], added = this.value(e, row, 0), lost = this.lost(e, row).map((b) => this.value(b, row, 0));
      parts.push(row.s + (added ? ` receives ${added},` : "") + ` .grad ${this.value(e, row, 1)}` +
        (lost.length ? ` (erased ${lost.join(", ")} before any step used it)` : ""));
    }
    if (!few) {
      const [adds, holds] = ["c", "g"].map((key) => this.rows.slice(0, P).filter((row) => !(row[key][e] < 0)).length);
      parts.push(`${adds || holds} of ${counted(P, "parameter")} ${adds ? "receive a contribution" : "have a .grad"}`);
    }
    if (this.e.t?.[e]) parts.push(this.e.t[e]);
    return `${this.head(e)}${parts.length ? ": " : ""}${parts.join("; ")}.`;
  }
}

function pane(name, title, ...children) {
  const head = h("div.av-head", {}, h("span.av-name", {}, title));
  return { name, head, el: h(`div.av-pane.av-in-${name}`, group(title), head, ...children) };
}

function reveal(box, top, height, margin = 0) {
  box.scrollTop = clamp(box.scrollTop, top + height + margin - box.clientHeight, top - margin);
}

/** The user's code: the current line is marked, and a line leads to its next event. */
function codePane({ run, data, go, at }) {
  const box = h("div.av-win", scrolls("Code, scrollable")), lines = [], events = [];
  run.e.c.forEach((line, e) => (events[line] ||= []).push(e));
  for (const { name, lines: texts } of data.code) {
    const list = h("ol.av-lines");
    for (const [n, ...parts] of texts) {
      const mine = events[lines.length], next = () => go({ e: mine.find((e) => e > at().e) ?? mine[0] });
      const line = h(`li.av-line${mine ? ".av-has" : ""}`, mine ? { click: next, style: `--av-kind: ${run.kindColor(mine[0])}` } : {},
        h(`${mine ? "button" : "span"}.av-no`, mine ? { type: "button", "aria-label": `line ${n}: next of ${counted(mine.length, "event")}` } : {}, String(n || "⋯")),
        h("code", {}, ...parts.map((part) => (typeof part === "string" ? part : h(`span.av-${part[0]}`, {}, part[1])))));
      lines.push(line);
      list.append(line);
    }
    box.append(h("div", {}, data.code.length > 1 ? h("p.av-note", {}, name) : "", list));
  }
  return {
    ...pane("code", "Code", box),
    draw({ e }) {
      const line = lines[run.e.c[e]], on = box.querySelector("[aria-current]");
      line?.style.setProperty("--av-kind", run.kindColor(e));
      if (line === on) return;
      on?.removeAttribute("aria-current");
      line?.setAttribute("aria-current", "true");
      if (line) reveal(box, line.offsetTop, line.offsetHeight, 24);
    },
  };
}

/** One card of a graph: what `scene.py` wrote on it, and the numbers so far. */
function card({ b: [x, y], k, m, n, y: under }, numbers) {
  const made = h(`g.av-node.${k.map((kind) => `av-${kind}`).join(".")}`, { transform: `translate(${x} ${y})` }, ...m.map(([name, at, text = ""]) => h(name, at, text)));
  numbers.forEach((text, i) => {
    const grad = n.slice(0, i + 1).findLast(Boolean) === "grad", y = under + 19 * i;
    made.append(h(grad ? "g.av-late" : "g", {}, h("text.av-quiet", { x: 11, y }, n[i]), h("text", { x: 59, y }, text)));
  });
  made.saves = made.querySelector(".av-saves");
  made.told = made.saves?.textContent;
  return made;
}

/** The graph of the moment: nodes light up in the engine's order and are then freed. */
function graphPane({ run, data, go, at }) {
  const box = h("div.av-win", scrolls("Autograd graph, scrollable; up and down select a node"));
  const note = h("p.av-note"), told = h("span.av-told"), steps = input("input", "range", "nodes that have run", () => go({ n: Number(steps.value) }));
  const sub = h("label.av-sub", {}, steps, told), made = pane("graph", "Graph", box, sub, note);
  const tools = h("span.av-tools", {}, ...[["−", "zoom out", 0.8], ["+", "zoom in", 1.25], ["fit", "fit the whole graph", 0]].map(
    ([face, label, factor]) => button("zoom", label, () => zoom(factor), face)));
  made.head.append(tools);
  let shown, layout, order, scale = 1, cards, edges, lit, moved;

  /** Zoom by a factor (0: until all is in view) around the middle. */
  function zoom(factor, least = 0.1, most = 3) {
    if (!layout) return;
    const { clientWidth: width, clientHeight: height } = box, middle = [(box.scrollLeft + width / 2) / scale, (box.scrollTop + height / 2) / scale];
    scale = clamp(factor ? scale * factor : Math.min((width - 4) / layout.w, (height - 4) / layout.h), least, most);
    box.firstChild.style.cssText = `width: ${layout.w * scale}px; height: ${layout.h * scale}px`;
    [box.scrollLeft, box.scrollTop] = [middle[0] * scale - width / 2, middle[1] * scale - height / 2];
  }
  /** As large as fits, but never too small to read. */
  function fit() {
    zoom(0, 0.88, 1.15);
    box.scrollLeft = (box.scrollWidth - box.clientWidth) / 2;
  }
  function build(graph) {
    ({ order } = graph);
    layout = data.layouts[graph.l];
    cards = layout.n.map((node, i) => card(node, graph.v[i]));
    edges = layout.e.map(([, , curve, tip]) => h("g", {}, h("path.av-curve", { d: curve }), h("path.av-tip", { d: tip })));
    const svg = h("svg", { viewBox: `0 0 ${layout.w} ${layout.h}`, "aria-hidden": "true" }, ...edges, ...cards);
    svg.addEventListener("click", (event) => moved < 4 && choose(cards.indexOf(event.target.closest(".av-node"))));
    box.replaceChildren(svg);
    fit();
  }
  function choose(node) {
    const p = run.rows.findIndex(({ n }) => n === layout.n[node]?.leaf);
    go({ node: node === at().node ? -1 : node, ...(p < 0 ? {} : { p }) });
  }
  box.addEventListener("pointerdown", () => { moved = 0; });
  box.addEventListener("pointermove", ({ pointerType, buttons, movementX: x, movementY: y }) => {
    if (pointerType !== "mouse" || !buttons) return;
    moved += Math.abs(x) + Math.abs(y);
    if (moved >= 4) box.scrollBy(-x, -y);
  });
  box.addEventListener("keydown", (event) => {
    const by = vertical(event);
    if (!layout || !by) return;
    own(event);
    const here = order.indexOf(at().node);
    choose(order.at(here < 0 && by < 0 ? by : (here + by) % order.length));
  });

  /** The graph of a state, whether it runs then, and which of its nodes have. */
  function moment({ e, n }) {
    const owner = run.length ? run.backward[e] : 0, graph = data.graphs[data.of[owner]], now = owner === e && Boolean(graph);
    const { order = [], l } = graph || {}, total = order.length, ran = now && n !== null ? clamp(n, 0, total) : total;
    return { owner, graph, nodes: data.layouts[l]?.n, now, total, ran, last: order[ran - 1], done: new Set(order.slice(0, ran)), kept: run.retained.has(owner) };
  }
  function describe(state) {
    const { graph, nodes, now, total, ran, last, done, kept } = moment(state), { node } = state;
    if (!now) return ["", ""];
    const about = (i, done) => nodes[i].t + (nodes[i].leaf === undefined ? "" : " (AccumulateGrad)") +
      graph.v[i].map((text, k) => (nodes[i].n[k] === "grad" && !done ? "" : `, ${nodes[i].n[k]} ${text}`)).join("");
    const told = ran === total ? "" : !ran ? `The forward has built ${counted(total, "node")}; none has run backward yet.`
      : `${ran} of ${total} nodes have run, the last is ${about(last, true)}.`;
    return [told, nodes[node] ? `Selected: ${about(node, done.has(node))}${!nodes[node].s ? "" : done.has(node) && !kept ? ", freed" : ", holding what it saved"}.` : ""];
  }
  function draw(state) {
    const { owner, graph, now, total, ran, last, done, kept } = moment(state);
    sub.hidden = !now;
    tools.hidden = !graph;
    const about = graph ? (now ? data.remark : `The graph of event ${run.index(owner)}, ${kept ? "retained" : "freed by its backward"}.`)
      : data.undrawn[owner] || (owner < 0 ? "No graph yet: a forward builds it." : "The graph of this backward was not kept.");
    note.textContent = [about, ...(graph ? data.layouts[graph.l].notes : [])].join(" ").trim();
    if (graph !== shown) {
      shown = graph;
      layout = lit = undefined;
      if (graph) build(graph); else box.replaceChildren();
    }
    if (!graph) return;
    told.textContent = ran === total ? `all ${total} run` : `${ran} of ${total} run`;
    slide(steps, ran, total, told.textContent);
    const [color, ink] = run.color(owner);
    made.el.style.cssText = `--av-now: ${color}; --av-on-now: ${ink}`;
    layout.n.forEach((node, i) => {
      const ready = done.has(i), freed = ready && node.s && !kept, { classList, saves, told } = cards[i];
      const looks = { done: ready, gone: freed, lit: ran < total && i === last, wrote: now && ready && node.leaf !== undefined, chosen: i === state.node };
      for (const name in looks) classList.toggle(`av-${name}`, looks[name]);
      if (saves) saves.textContent = freed ? "freed" : told;
    });
    edges.forEach((edge, i) => edge.setAttribute("class", now && done.has(layout.e[i][0]) ? "av-flown" : ""));
    const follow = ran < total ? last ?? order[0] : state.node;
    if (follow >= 0 && follow !== lit && cards[follow]) {
      const [x, y, width, height] = layout.n[follow].b.map((side) => side * scale);
      reveal(box, y, height, 40);
      if (x < box.scrollLeft || x + width > box.scrollLeft + box.clientWidth) box.scrollLeft = x + (width - box.clientWidth) / 2;
    }
    lit = follow;
  }
  /** The nodes that a backward being stepped through has run; null: all. */
  function wrote(state) {
    const { nodes, total, ran, done } = moment(state);
    return ran < total ? [...done].map((i) => nodes[i]) : null;
  }
  return { ...made, moment, describe, wrote, fit, draw };
}

const look = (part) => (part.born < 0 ? "unseen" : part.fresh ? "new" : part.used ? "used" : "live");

/** One row per parameter or group: a bar of the contributions live in its `.grad`. */
function gradPane({ run, data, go, at, uid, graph }) {
  const P = run.count, groups = run.rows.slice(P), many = groups.length, tall = many ? 30 : 42, open = new Set(), pool = [];
  const list = h("div.av-rows"), equation = h("p.av-note");
  const box = h("div.av-win", { tabindex: 0, role: "tree", "aria-label": "Parameters and their .grad", scroll: () => draw(at()) }, list);
  const made = pane("grad", ".grad", box, equation);
  const search = input("input.av-search", "search", "search parameters by name", () => { arrange(); draw(at()); });
  search.placeholder = `search ${P} names`;
  if (many) made.head.append(search);
  let rows, cursor = -1, chosen = -1;

  function arrange() {
    const wanted = search.value.trim().toLowerCase(), every = run.rows.slice(0, P);
    rows = every.filter(({ n }) => n.toLowerCase().includes(wanted));
    if (many && !wanted) rows = groups.flatMap((group) => {
      const inside = every.slice(...group.in);
      return inside.length === 1 ? inside : open.has(group) ? [group, ...inside] : [group];
    });
    list.style.height = `${rows.length * tall}px`;
    box.style.setProperty("--av-tall", list.style.height);
    made.el.classList.toggle("av-empty", !rows.length);
  }
  function choose(row) {
    if (!row.in) return go({ p: at().p === row.p ? -1 : row.p });
    if (!open.delete(row)) open.add(row);
    arrange();
    draw(at());
  }
  function make() {
    const row = { name: h("span.av-of"), zero: h("i.av-zero"), end: h("i.av-end"), total: h("span.av-total"), parts: [] };
    row.bar = h("span.av-bar", { "aria-hidden": "true" }, row.zero, row.end);
    row.el = h("div.av-row", { role: "treeitem", style: `height: ${tall}px`, click: () => choose(row.row) }, row.name, row.bar, row.total);
    list.append(row.el);
    return row;
  }
  /** A `.grad` is as it was until its AccumulateGrad or module has run. */
  function seen({ e }, wrote, row) {
    const waits = ({ n, c }) => !(c[e] < 0 || wrote.some((node) => n === node.leaf || n.startsWith(`${node.in}.`))), known = e || Math.abs(row.g[0] - row.c[0]) <= 1e-3 * row.c[0];
    return wrote && known && (row.in ? run.rows.slice(...row.in) : [row]).some(waits) ? e - 1 : e;
  }
  function fill(one, row, e, now, width, letters) {
    const group = row.in, [low, high] = row.r, { grad, parts: all, absent, broken } = run.drawn(e, row, now);
    const span = high - low || 1, x = (value) => `${(100 * (value - low)) / span}%`, text = run.value(e, row, 1), lost = group ? [] : run.lost(e, row);
    let parts = broken || absent ? [] : all, [under, over] = [0, 0];
    if (parts.length > 24) {
      const early = parts.slice(0, -23), height = early.reduce((sum, part) => sum + part.height, 0);
      parts = [{ ...early.at(-1), height, told: `${early.length} earlier` }, ...parts.slice(-23)];
    }
    one.row = row;
    one.name.textContent = (group ? (open.has(row) ? "▾ " : "▸ ") : "") + shorten(row.n.slice(data.cut), letters);
    one.name.title = row.n + (group ? `: ${counted(group[1] - group[0], "parameter")}` : `, shape (${row.d.join(", ")})`);
    one.total.textContent = text;
    one.bar.classList.toggle("av-broken", broken);
    one.el.className = `av-row${group ? " av-group" : ""}${absent ? " av-none" : ""}`;
    one.zero.style.left = x(0);
    one.end.hidden = absent || broken;
    one.end.style.left = x(grad || 0);
    while (one.parts.length < parts.length) one.end.before(one.parts[one.parts.push(h("b")) - 1]);
    one.parts.forEach((made, i) => {
      const part = parts[i];
      made.hidden = !part;
      if (!part) return;
      const { height } = part, start = height < 0 ? (under += height) : over, color = part.born < 0 ? "var(--av-muted)" : run.color(part.born)[0];
      if (height > 0) over += height;
      const told = part.told || number(part.amount, row.signed ? 4 : 3), wide = Math.abs(height) / span;
      made.className = `av-part av-${look(part)}`;
      made.style.cssText = `left: ${x(start)}; width: ${100 * wide}%; --av-c: ${color}; color: ${part.fresh ? run.color(now)[1] : "inherit"}`;
      made.textContent = wide * width > told.length * 7 + 6 ? told : "";
    });
    one.bar.dataset.lost = lost.length ? `× ${lost.length === 1 ? run.value(lost[0], row, 0) : counted(lost.length, "part")} unused` : "";
    put(one.el, { "aria-selected": at().p === row.p, "aria-expanded": group ? open.has(row) : "undefined" });
  }
  box.addEventListener("keydown", (event) => {
    const by = vertical(event), enter = event.key === "Enter" && rows[cursor]?.in;
    if (!rows.length || (!by && !enter)) return;
    own(event);
    if (enter) return choose(rows[cursor]);
    cursor = clamp(cursor + by, 0, rows.length - 1);
    reveal(box, cursor * tall, tall);
    if (rows[cursor].in) draw(at()); else go({ p: rows[cursor].p });
  });

  /** What the selected parameter's `.grad` is made of, as a sum. */
  function explain({ p }, when) {
    if (p < 0 && P > 1) return many ? "" : "Select a parameter to see what its .grad is made of.";
    const row = run.rows[Math.max(p, 0)], e = when(row), name = `${row.s}.grad`, parts = run.stack(e, row), total = run.value(e, row, 1);
    if (run.grad(e, row) === null) return `${name} is None: there is no tensor, which is not zero.`;
    if (!parts.length) return `${name} = ${total}: no contribution is live in it.`;
    const terms = parts.slice(-5).map(({ born, amount }) => {
      const all = row.x?.[0][born]?.map((x) => number(row.signed ? amount : (x * amount) / row.c[born] || 0)) || [number(amount)];
      return `${all[1] ? `(${all.join(", ")})` : all[0]} (${born < 0 ? (row.y.size ? "other ranks" : "not recorded") : `event ${run.index(born)}`})`;
    });
    if (parts.length > 5) terms.unshift(`${parts.length - 5} earlier`);
    return row.x ? `${name} = ${terms.join(" + ").replaceAll("+ −", "− ")} = ${total}` : `${name}: ${total}, from contributions of norms ${terms.join(", ")}`;
  }
  function draw(state) {
    if (state.p !== chosen) {
      chosen = state.p;
      const row = run.rows[chosen], group = groups.find(({ in: [start, stop] }) => start <= chosen && chosen < stop);
      if (group && !rows.includes(row) && !search.value) { open.add(group); arrange(); }
      if (rows.includes(row)) reveal(box, (cursor = rows.indexOf(row)) * tall, tall);
    }
    const wrote = graph?.wrote(state), when = (row) => seen(state, wrote, row), room = [pool[0].bar.clientWidth, pool[0].name.clientWidth / 7.6];
    const first = Math.floor(box.scrollTop / tall), count = Math.min(Math.ceil((box.clientHeight || 300) / tall) + 1, rows.length - first);
    for (let i = 0; i < Math.max(pool.length, count); i++) {
      const one = (pool[i] ||= make()), at = first + i, { el } = one;
      if ((el.hidden = i >= count)) continue;
      fill(one, rows[at], when(rows[at]), state.e, ...room);
      el.style.top = `${at * tall}px`;
      el.classList.toggle("av-cursor", at === cursor);
      put(el, { id: `${uid}-${at}`, "aria-setsize": rows.length, "aria-posinset": at + 1 });
    }
    box.setAttribute("aria-activedescendant", cursor < 0 ? "" : `${uid}-${cursor}`);
    equation.textContent = explain(state, when);
  }
  pool.push(make());
  arrange();
  return { ...made, draw };
}

/** Parameters × events: bars while there is room, else a heat map. */
function timePane({ run, data, go, at }) {
  const P = run.count, N = run.length, { b: before, a: after } = run.e, few = P <= 8;
  const names = (run.rows.length > P ? run.rows.slice(P) : run.rows).map(({ n, p, in: inside = [p, p + 1] }) => [n, ...inside]);
  const canvas = h("canvas", { role: "img", "aria-label": `Timeline: ${data.about}` }), head = h("i.av-playhead"), band = h("i.av-band");
  const plot = h("div.av-plot", {}, canvas, band, head), legend = h("p.av-note"), pen = canvas.getContext("2d");
  let width, left, column, bars, top, lane, bottom, inks, font, mono;

  const x = (e) => left + e * column;
  const fill = (ink, ...box) => { pen.fillStyle = ink; pen.fillRect(...box); };
  function write(text, px, py, align = "left", look = "", ink = inks[0], family = font) {
    Object.assign(pen, { font: `${look} 11px ${family}`, textAlign: align, textBaseline: "middle", fillStyle: ink });
    pen.fillText(text, px, py);
  }
  function paint() {
    width = plot.clientWidth;
    if (!width) return;
    left = clamp(14 + 6.8 * Math.max(5, ...names.map(([name]) => name.length - data.cut)), 52, width < 480 ? 92 : 172);
    column = Math.min((width - left - 2) / N, 112);
    bars = few && column >= 18;
    top = !bars ? 6 : column >= 74 ? 38 : 76;
    lane = bars ? (P === 1 ? 84 : 60) : clamp(Math.floor(260 / (P || 1)), 2, 22);
    bottom = top + lane * P;
    const height = bottom + (before ? 38 : 4), ratio = Math.min(devicePixelRatio || 1, 2);
    Object.assign(canvas, { width: width * ratio, height: height * ratio }).style.height = `${height}px`;
    pen.scale(ratio, ratio);
    inks = ["text", "muted", "line"].map((name) => { head.style.color = `var(--av-${name})`; return getComputedStyle(head).color; });
    font = getComputedStyle(plot).fontFamily;
    mono = getComputedStyle(plot).getPropertyValue("--av-mono");
    if (bars) drawBars(); else if (P) drawHeat();
    let taken = -99;
    for (const [name, start, stop] of names) {
      const middle = top + (lane * (start + stop)) / 2;
      if (start) fill(inks[2], left, top + lane * start, width, 0.7);
      if (middle - taken < 13) continue;
      taken = middle;
      write(shorten(name.slice(data.cut), Math.floor((left - 12) / 6.7)), left - 8, middle, "right", "", inks[0], mono);
    }
    const ruled = column >= 3;
    if (ruled) run.kinds.forEach(rule);
    if (before) drawSaved(height - 3);
    explain(ruled);
    place(at());
  }
  /** An event's heading and, unless it is a backward, its line across all rows. */
  function rule(kind, e) {
    const backward = kind === "backward";
    if (!backward) {
      Object.assign(pen, { strokeStyle: run.kindColor(e), lineWidth: column > 12 ? 1.8 : 1 });
      pen.setLineDash(DASH[kind] || [2, 3]);
      pen.beginPath();
      pen.moveTo(x(e) + 0.5, bars ? 2 : top);
      pen.lineTo(x(e) + 0.5, bottom);
      pen.stroke();
      pen.setLineDash([]);
    }
    if (top === 38) {
      write(kind + (run.skipped.has(e) ? " skipped" : ""), x(e) + 6, 11, "left", "600");
      write(shorten(run.label(e), Math.floor((column - 8) / 6.8)), x(e) + 6, 26, "left", "", inks[1], mono);
    } else if (bars) {
      pen.save();
      pen.translate(x(e) + column / 2 + 1, top - 5);
      pen.rotate(-Math.PI / 2);
      write(shorten((backward && run.label(e)) || kind, 10), 0, 0);
      pen.restore();
    }
  }
  function drawBars() {
    const wide = Math.min(column * 0.62, 46);
    for (let p = 0; p < P; p++) {
      const row = run.rows[p], [low, high] = row.r, over = high > 0 ? 17 : 8;
      const scale = (lane - over - (low < 0 ? 17 : 8)) / (high - low || 1), zero = top + lane * p + over + high * scale;
      fill(inks[1], left, zero, column * N, 0.8);
      for (let e = 0; e < N; e++) {
        const { grad, parts, absent, broken } = run.drawn(e, row), odd = absent || broken, start = x(e) + (column - wide) / 2, middle = start + wide / 2, end = zero - grad * scale;
        let [down, up] = [zero, zero];
        for (const part of odd ? [] : parts) {
          const tall = Math.abs(part.height) * scale, y = part.height < 0 ? down : (up -= tall), box = [start, y + 0.5, wide, Math.max(tall - 1, 0.8)];
          if (part.height < 0) down += tall;
          pen.strokeStyle = part.born < 0 ? inks[1] : run.color(part.born)[0];
          pen.globalAlpha = { new: 1, used: 0, live: 0.36, unseen: 0.2 }[look(part)];
          fill(pen.strokeStyle, ...box);
          Object.assign(pen, { globalAlpha: 1, lineWidth: 1.2 }).strokeRect(...box);
        }
        const text = absent ? (column >= 36 ? "None" : "∅") : [4, 3, 2].map((digits) => number(grad, digits)).find((told) => told.length * 7.7 <= column - 2) || "";
        if (!odd) fill(inks[0], start - 4, end - 1.2, wide + 8, 2.4);
        const above = odd ? high > 0 || broken : grad >= 0, at = odd ? zero : above ? Math.min(up, end) : Math.max(down, end);
        write(text, middle, at + (above ? -9 : 10), "center", absent ? "italic" : "600", inks[Number(absent)]);
      }
    }
  }
  function drawSaved(base) {
    const most = Math.max(data.most || 1, ...before), wide = Math.max(Math.min(column * 0.62, 46), 0.8) / 2;
    write("saved", left - 8, bottom + 20, "right", "", inks[1]);
    fill(inks[2], 0, bottom + 3, width, 0.7);
    [before, after].forEach((bytes, k) => bytes.forEach((count, e) => {
      const tall = (24 * count) / most;
      fill(inks[1], x(e) + column / 2 + (k - 1) * wide, base - tall, wide, tall);
    }));
    fill(inks[1], left, base, column * N, 0.8);
  }
  /** As `pixels.py` codes it. */
  function drawHeat() {
    const { w, at, px = run.bytes.subarray(at) } = data.heat, pixels = new ImageData(w, P), fixed = [[0, 0, 0], [127, 127, 127], inks[0].match(/[\d.]+/g)];
    const colors = [...run.colors.values(), ["#0072B2"]].map(([color]) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16)));
    for (let i = 0; i < w * P; i++) {
      const code = px[i], [r, g, b] = fixed[code] || colors[Math.floor((code - 3) / 30)];
      pixels.data.set([r, g, b, [0, 33, 255][code] ?? 36 + ((code - 3) % 30) * 7.5], 4 * i);
    }
    const small = new OffscreenCanvas(w, P);
    small.getContext("2d").putImageData(pixels, 0, 0);
    pen.imageSmoothingEnabled = column * N < w;
    pen.drawImage(small, left, top, column * N, lane * P);
  }
  function explain(ruled) {
    const keys = data.keys.filter(([, name]) => ruled || !name.startsWith("rule"));
    const notes = [keys.length < data.keys.length ? "Lines of events less than 3 px apart are left out." : "", bars ? "" : "Darker: a larger contribution; grey: .grad without one; ink: not finite.",
      !bars && data.heat?.w < N ? `A pixel shows the largest of ${Math.ceil(N / data.heat.w)} events.` : "", data.note];
    legend.replaceChildren(...keys.map(([text, name, color]) =>
      h("span.av-key", {}, h(`i.av-swatch.av-${name}`, { style: `--av-c: ${color}` }), text)), notes.join(" "));
  }
  function place({ e, p }) {
    if (!column) return;
    head.style.cssText = `width: ${Math.max(column, 2)}px; transform: translateX(${clamp(x(e), left, width - 2)}px)`;
    band.style.cssText = `top: ${top + lane * p}px; height: ${p < 0 ? 0 : Math.max(lane, 3)}px`;
  }
  const point = (event) => {
    const box = canvas.getBoundingClientRect(), p = Math.floor((event.clientY - box.top - top) / lane);
    go({ e: Math.floor((event.clientX - box.left - left) / column), ...(event.type !== "pointermove" && p >= 0 && p < P ? { p } : {}) });
  };
  /** A finger points once it is lifted or moves sideways: one that swipes up or down scrolls the page. */
  let from = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = event.pointerType === "mouse" ? null : event.clientX;
    plot.setPointerCapture(event.pointerId);
    if (from === null) point(event);
  });
  plot.addEventListener("pointermove", (event) => {
    if (from !== null && Math.abs(event.clientX - from) > 8) from = null;
    if (from === null && plot.hasPointerCapture(event.pointerId)) point(event);
  });
  plot.addEventListener("pointerup", (event) => from !== null && point(event));
  return { ...pane("time", "Timeline", plot, legend), paint, draw: place };
}

/** Put in a player. @param {{model: Model, el: HTMLElement}} host */
async function render({ model, el }) {
  const { data, bytes } = await read(model.get("data")), uid = `av${Math.random().toString(36).slice(2, 8)}`, id = model.get("id") || uid;
  const run = new Recording(data, bytes), N = run.length;
  /** @returns {At} */
  const at = () => ({ e: 0, n: null, p: -1, node: -1, ...model.get("at") });
  const go = (change) => {
    const next = { ...at(), ...("e" in change ? { n: null, node: -1 } : {}), ...change };
    next.e = clamp(Math.trunc(next.e) || 0, 0, Math.max(N - 1, 0));
    model.set("at", next);
    model.save_changes();
  };
  const app = { run, data, go, at, uid };
  const graph = app.graph = data.graphs.length || Object.keys(data.undrawn).length ? graphPane(app) : null;
  const time = N ? timePane(app) : null;
  const parts = [N && data.code.length && codePane(app), graph, N && run.count && gradPane(app), time].filter(Boolean);

  const move = (by) => { pause(); go({ e: at().e + by }); };
  const slider = input("input.av-scrub", "range", "event", () => { pause(); go({ e: Number(slider.value) }); });
  const count = h("span.av-count"), kind = h("strong.av-kind"), words = h("span"), say = h("p.av-say", { "aria-live": "polite" }, kind, words);
  const toggle = button("play", "play", () => (timer ? pause() : play()));
  const link = h("a.av-b", { "aria-label": "link to this moment" }, "#");
  link.hidden = location.protocol === "about:"; // nothing can link into a frame without an address
  const frame = h("div.av-frame", group("Player"),
    h("div.av-top", {}, button("back", "previous event", () => move(-1)), toggle, button("next", "next event", () => move(1)), slider, count, link), say,
    h(`div.av-body${parts.map(({ name }) => `.av-with-${name}`).join("")}`, {}, ...parts.map((part) => part.el)),
    h("p.av-note.av-hint", {}, "Keys: ← → events, Shift ← → nodes, Home, End, Space plays."));
  frame.firstChild.hidden = frame.lastChild.hidden = N < (graph ? 1 : 2);

  let timer = 0, due = 0, width = 0;
  function pause() {
    clearTimeout(timer);
    timer = 0;
    show();
  }
  function show() {
    const face = timer ? "pause" : "play";
    toggle.replaceChildren(icon(face));
    toggle.setAttribute("aria-label", (toggle.title = face));
    say.setAttribute("aria-live", timer ? "off" : "polite");
  }
  /** Of few events each node, of many several events at a time. */
  function play() {
    const slow = N <= 60, runs = (e) => slow && graph?.moment({ e, n: null }).now;
    const enter = (e) => go({ e, n: runs(e) ? 0 : null });
    const step = () => {
      const { e, n } = at(), { total } = graph?.moment({ e, n }) || {}, ran = (n ?? total) + Math.ceil(total / 24);
      if (n !== null && runs(e)) go({ n: ran >= total ? null : ran });
      else if (e < N - 1) enter(Math.min(e + (slow ? 1 : Math.ceil(N / 1500)), N - 1));
      else return pause();
      timer = setTimeout(step, !slow ? 40 : at().n === null ? 1100 : clamp(3600 / total, 120, 700));
    };
    if (at().e >= N - 1) enter(0);
    timer = setTimeout(step, slow ? 500 : 40);
    show();
  }
  frame.addEventListener("keydown", (event) => {
    const { target, key, shiftKey } = event, slides = target.matches("input[type=range]"), by = { ArrowRight: 1, ArrowLeft: -1, Home: -N, End: N }[key];
    if (target.matches("[type=search]") || event.altKey || event.ctrlKey || event.metaKey) return;
    if (by && shiftKey && graph) {
      const { ran, total, now } = graph.moment(at());
      pause();
      if (now) go({ n: clamp(ran + by, 0, total) });
    } else if (by && !slides) move(by);
    else if (key === " " && N && !target.matches("button, a")) toggle.click(); else return;
    own(event);
  });

  function draw() {
    due = 0;
    const state = at(), [ran, selected] = graph?.describe(state) || ["", ""];
    parts.forEach((part) => part.draw(state));
    if (!N) {
      words.textContent = data.graphs.length ? `${ran || "All nodes have run."} ${selected}`.trim() : "Nothing to play: there is no event.";
      return;
    }
    const name = run.kinds[state.e];
    slide(slider, state.e, N - 1, run.head(state.e));
    count.textContent = `${(state.e + 1).toLocaleString("en")} / ${N.toLocaleString("en")}`;
    kind.textContent = name;
    kind.style.setProperty("--av-kind", run.kindColor(state.e));
    words.textContent = `${ran ? `${run.head(state.e)}. ${ran}` : run.sentence(state.e, state.p)} ${selected}`.trim();
    link.href = `#${model.get("link") || id}${Object.entries({ ...state, e: run.index(state.e) }).map(([key, x]) => (x === null || x < 0 ? "" : `&${key}=${x}`)).join("")}`;
  }
  /** A page may hold several players. */
  function follow() {
    const told = new URLSearchParams(location.hash.slice(1)), [e, n, p, node] = ["e", "n", "p", "node"].map((key) => (told.has(key) ? Math.trunc(told.get(key)) || 0 : null));
    if (!told.has(id)) return;
    go({ e: run.e.i ? run.e.i.findLastIndex((index) => index <= e) : e, n, p: clamp(p ?? -1, -1, run.count - 1), node: node ?? -1 });
    frame.scrollIntoView({ block: "nearest" });
  }
  const repaint = () => { time?.paint(); draw(); };
  const resized = new ResizeObserver(() => {
    if (frame.clientWidth === width) return;
    width = frame.clientWidth;
    graph?.fit();
    repaint();
  });
  const themed = new MutationObserver(repaint), ended = new AbortController(), { signal } = ended;
  for (const host of [document.documentElement, document.body]) themed.observe(host, { attributeFilter: ["data-theme", "data-jp-theme-light", "theme", "class"] });
  el.append(frame);
  model.on("change:at", () => { due ||= requestAnimationFrame(draw); });
  addEventListener("hashchange", follow, { signal });
  for (const look of ["(prefers-color-scheme: dark)", "print"]) matchMedia(look).addEventListener("change", repaint, { signal });
  resized.observe(frame);
  draw();
  follow();
  return () => { pause(); resized.disconnect(); themed.disconnect(); ended.abort(); };
}

/** A model without a kernel. @returns {Model} */
function still(state) {
  const heard = [];
  return {
    get: (key) => state[key],
    set: (key, value) => { state[key] = value; heard.forEach(([name, f]) => name === `change:${key}` && f()); },
    on: (...pair) => heard.push(pair),
    save_changes() {},
  };
}

/** The page's own players, once each: outputs may stand in a page twice. */
for (const el of document.querySelectorAll("div[data-accumviz-player]:not([data-done])")) {
  const id = el.dataset.accumvizPlayer, before = document.querySelectorAll(`[data-done="${id}"]`).length;
  const words = el.querySelector(".av-words"), data = el.querySelector('script[type="application/json"]').textContent, mount = h("div");
  el.dataset.done = id;
  words.before(mount);
  render({ model: still({ data, id: before ? `${id}-${before}` : id }), el: mount }).then(() => words.removeAttribute("open"),
    (error) => mount.append(h("p.av-note", {}, `The player could not start (${error.message}); below it stands in words.`)));
}

/** Explorers hold players. */
for (const el of document.querySelectorAll("[data-accumviz-explorer]")) Object.assign(el, { render, still, read, h, number });

export default { render };
