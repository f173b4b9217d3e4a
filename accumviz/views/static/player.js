/**
 * The player: one ES module for static pages and for anywidget, with no import and no global name.
 *
 * Everything a recording says goes into the page as text nodes and attributes, never as markup.
 *
 * @typedef {{e: number, n: number | null, p: number, node: number}} At  the one state: event, nodes that have run
 *   (null: all), selected parameter and selected node (-1: none)
 * @typedef {{born: number, amount: number, fresh: boolean, used: boolean}} Part
 * @typedef {{get: (k: string) => any, set: (k: string, v: any) => void, save_changes: () => void,
 *   on: (name: string, f: () => void) => void, off: (name?: string, f?: () => void) => void}} Model
 */

const SVG = "http://www.w3.org/2000/svg";
const DASH = { step: [], zero_grad: [6, 4], edit: [6, 3, 2, 3] };
const ICONS = {
  first: "M3 3h2v10H3zM13 3v10L6 8z", back: "M11 3v10L4 8z", play: "M4 2.5v11l9-5.5z", pause: "M4 3h3v10H4zM9 3h3v10H9z",
  next: "M5 3v10l7-5z", last: "M11 3h2v10h-2zM3 3v10l7-5z",
  link: "M6.5 9.5l3-3M7 4.5l1.6-1.6a2.6 2.6 0 0 1 3.7 3.7L10.700 8.200M9 11.500l-1.600 1.600a2.600 2.600 0 0 1-3.700-3.700L5.300 7.800",
};

/** Make an element: its tag and classes, attributes (functions: listeners), children. */
function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const vector = ["svg", "g", "path", "rect", "text", "tspan", "line", "title"].includes(tag);
  const made = vector ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const icon = (name) =>
  h("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
    h(name === "link" ? "path.av-stroke" : "path", { d: ICONS[name] }));
const button = (name, label, click) => h(`button.av-b.av-${name}`, { type: "button", "aria-label": label, title: label, click }, icon(name));
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Write a number as a person would; the same as `style.number`. */
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

/** Write a number of bytes; the same as `style.size`. */
function size(count) {
  if (count === null || Number.isNaN(count)) return "not measured";
  if (count < 1024) return `${count.toFixed(0)} B`;
  const unit = clamp(Math.floor(Math.log2(count) / 10), 1, 3);
  return `${Number((count / 1024 ** unit).toPrecision(3))} ${["B", "KiB", "MiB", "GiB"][unit]}`;
}

/** Cut a long name in the middle; the same as `words.shorten`. */
function shorten(text, limit) {
  const all = [...text];
  if (all.length <= limit) return text;
  const tail = Math.floor(limit / 2);
  return `${all.slice(0, Math.max(limit - 1 - tail, 1)).join("")}…${all.slice(all.length - tail).join("")}`;
}

/** Black or white, whichever is read better on a colour. */
function inkOn(color) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b < 0.5 ? "#fff" : "#000";
}

/** Read a payload: JSON as it stands, or JSON and columns of bytes in one compressed block. */
async function read(text) {
  const data = JSON.parse(text);
  if (!data.z) return { data, bytes: new Uint8Array() };
  const packed = Uint8Array.from(atob(data.z), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(raw.buffer).getUint32(0, true);
  return { data: JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + length))), bytes: raw.subarray(4 + length) };
}

/** A column of norms, -1 for None: numbers as they are, or 16-bit logarithms with the high bytes first. */
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
    const e = data.e || { k: [], l: [], f: [], n: [], skipped: [], inside: [], retained: [], by: [] };
    Object.assign(this, { data, e, length: e.k.length, parameters: data.p || [], rows: new Map() });
    this.skipped = new Set(e.skipped);
    this.inside = new Set(e.inside);
    this.retained = new Set(e.retained);
    this.by = new Map(e.by);
    this.colors = new Map(data.colors || []);
    this.kinds = e.k.map((k) => data.strings[k]);
    this.scales = this.kinds.map((kind) => ["clip", "unscale", "sync"].includes(kind));
    this.zeroes = this.kinds.map((kind) => kind === "zero_grad" || kind === "edit");
    this.c = data.c ? column(data.c, bytes) : [];
    this.g = data.g ? column(data.g, bytes) : [];
    let last = -1;
    this.backward = this.kinds.map((kind, i) => (last = kind === "backward" ? i : last));
  }

  index(e) { return this.e.i ? this.e.i[e] : e; }
  label(e) { return this.data.strings[this.e.l[e]]; }
  color(e) { return this.colors.get(this.e.l[e]) || "#0072B2"; }

  /** One parameter's numbers, or those of a group (`[name, start, stop]`) as one norm. */
  row(p) {
    if (this.rows.has(p)) return this.rows.get(p);
    const n = this.length, group = Array.isArray(p);
    let row;
    if (!group) {
      const about = this.parameters[p], exact = this.data.x[p];
      row = { n: about.n, d: about.d, o: new Set(about.o), c: this.c.subarray(p * n, p * n + n), g: this.g.subarray(p * n, p * n + n) };
      if (exact) row.x = exact.map((side) => side.map((values) => values && values.map(Number)));
      row.signed = Boolean(exact) && about.d.reduce((a, b) => a * b, 1) === 1;
    } else {
      const [name, start, stop] = p;
      row = { n: name, d: null, o: new Set(), c: new Float32Array(n).fill(-1), g: new Float32Array(n).fill(-1), signed: false, group };
      for (let i = start; i < stop; i++) {
        this.parameters[i].o.forEach((owner) => row.o.add(owner));
        for (const key of "cg") {
          const from = this[key].subarray(i * n, i * n + n), to = row[key];
          for (let e = 0; e < n; e++) if (!(from[e] < 0)) to[e] = Math.hypot(Math.max(to[e], 0), from[e]);
        }
      }
    }
    this.rows.set(p, row);
    return row;
  }

  /** What was added (null: nothing) and what `.grad` was (null: None): signed where the sign is known. */
  added(e, row) { return row.c[e] < 0 ? null : row.signed ? row.x[0][e][0] : row.c[e]; }
  grad(e, row) { return row.g[e] < 0 ? null : row.signed ? row.x[1][e][0] : row.g[e]; }
  gone(e, row) { return row.g[e] < 0 || (this.zeroes[e] && row.g[e] === 0); }
  steps(e, row) { return this.by.has(e) && !this.skipped.has(e) && row.o.has(this.by.get(e)); }

  /** Split `.grad` after an event into the contributions live in it, the oldest first. @returns {Part[]} */
  stack(e, row) {
    const parts = [];
    let scale = 1, used = false;
    for (let i = e; i >= 0 && parts.length < 2000; i--) {
      const added = this.added(i, row);
      if (added !== null) parts.push({ born: i, amount: added * scale, fresh: i === e, used });
      if (this.gone(i, row)) break;
      if (this.scales[i] && i) {
        const now = this.grad(i, row), before = this.grad(i - 1, row);
        if (now && before && Number.isFinite(now) && Number.isFinite(before)) scale *= now / before;
      }
      used ||= this.steps(i, row);
    }
    parts.reverse();
    if (row.signed && row.g[e] >= 0) {
      const grad = this.grad(e, row), rest = grad - parts.reduce((sum, part) => sum + part.amount, 0);
      const most = Math.max(Math.abs(grad), ...parts.map((part) => Math.abs(part.amount)));
      if (Math.abs(rest) > 1e-4 * most) parts.unshift({ born: -1, amount: rest, fresh: false, used: false });
    }
    return parts;
  }

  /** The contributions that an event erased before any step had used them. */
  lost(e, row) {
    if (!e || !this.gone(e, row) || this.gone(e - 1, row)) return [];
    return this.stack(e - 1, row).filter((part) => part.born >= 0 && !part.used && !this.inside.has(part.born)).map((part) => part.born);
  }

  /** A contribution or a `.grad` in words; the same as `words.value`. */
  value(e, row, of) {
    if ((of ? row.g : row.c)[e] < 0) return of ? "None" : "";
    const exact = row.x && row.x[of][e];
    if (!exact) return `‖·‖ ${number((of ? row.g : row.c)[e])}`;
    if (exact.length > 1) return `(${exact.map((x) => number(x)).join(", ")})`;
    return (!of && exact[0] > 0 ? "+" : "") + number(exact[0]);
  }

  /** What was done, to or by what, where: the beginning of an event's sentence. */
  head(e) {
    const kind = this.kinds[e], link = { backward: "of", step: "by" }[kind] || "on", loss = this.e.loss && this.e.loss[e];
    return `Event ${this.index(e)}, ${kind}${this.skipped.has(e) ? " skipped" : ""}` +
      (this.label(e) ? ` ${link} ${shorten(this.label(e), 40)}` : "") +
      (this.e.n[e] ? `, line ${this.e.n[e]}` : "") +
      (loss !== null && loss !== undefined ? `, loss ${number(Number(loss))}` : "");
  }

  /** An event in one sentence; the same as `words.sentence`, and the selected parameter if it is not among the first. */
  sentence(e, chosen = -1) {
    const shown = this.parameters.slice(0, 6).map((_, p) => p), parts = [];
    for (const p of chosen >= 6 ? [...shown, chosen] : shown) {
      const row = this.row(p), added = this.value(e, row, 0), lost = this.lost(e, row).map((b) => this.value(b, row, 0));
      parts.push(shorten(row.n, 40) + (added ? ` receives ${added},` : "") + ` .grad ${this.value(e, row, 1)}` +
        (lost.length ? ` (erased ${lost.join(", ")} before any step used it)` : ""));
    }
    const more = this.parameters.length - parts.length;
    if (more > 0) parts.push(`and ${counted(more, "more parameter")}`);
    const { b, a } = this.e;
    if (b && b[e] !== null) parts.push(`saved tensors ${size(b[e])} before, ${size(a ? a[e] : null)} after`);
    return this.head(e) + (parts.length ? `: ${parts.join("; ")}.` : ".");
  }
}

/** A pane: a titled part of the player. */
function pane(name, title, ...children) {
  const head = h("div.av-head", {}, h("span.av-name", {}, title));
  return { el: h(`section.av-pane.av-${name}`, { "aria-label": title }, head, ...children), head };
}

const WORDS = /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|False|finally|for|from|global|if|import|in|is|lambda|None|nonlocal|not|or|pass|raise|return|True|try|while|with|yield)\b/g;

/** A line of Python as text nodes in spans. */
function highlighted(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(WORDS)) {
    parts.push(text.slice(end, match.index), h(`span.av-${match[1] ? "comment" : match[2] ? "string" : "keyword"}`, {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

/** The user's code; the current event's line is marked, and a line leads to its next event. */
function codePane(run, go, at) {
  const { data, e } = run, lines = new Map(), at_ = new Map();
  for (let i = 0; i < run.length; i++) {
    const key = `${e.n[i]} ${e.f[i]}`;
    if (!at_.has(key)) at_.set(key, []);
    at_.get(key).push(i);
  }
  const files = data.code.map((file) => {
    const name = data.strings.indexOf(file.name);
    const list = h("ol.av-lines", { role: "list" });
    for (const [n, text] of file.lines) {
      const key = `${n} ${name}`, events = at_.get(key);
      const next = () => go({ e: events.find((i) => i > at().e) ?? events[0] });
      const line = h(events ? "li.av-line.av-has" : "li.av-line", events ? { click: next } : {},
        events
          ? h("button.av-no", { type: "button", "aria-label": `line ${n}: to its next event (${counted(events.length, "event")})`,
              style: `--av-kind: ${data.kinds[run.kinds[events[0]]]}` }, String(n))
          : h("span.av-no", { "aria-hidden": n ? null : "true" }, n ? String(n) : "⋯"),
        h("code", {}, ...highlighted(text)));
      lines.set(key, line);
      list.append(line);
    }
    return h("div.av-file", {}, data.code.length > 1 ? h("p.av-path", {}, shorten(file.name, 44)) : null, list);
  });
  const box = h("div.av-box.av-mono", { tabindex: "0", role: "group", "aria-label": "Code, scrollable" }, ...files);
  const made = pane("code", "Code", box);
  let on = null;
  return {
    ...made,
    draw({ e: now }) {
      const line = lines.get(`${e.n[now]} ${e.f[now]}`) || null;
      if (line === on) return;
      on?.classList.remove("av-on");
      on?.removeAttribute("aria-current");
      on = line;
      if (!line) return;
      line.classList.add("av-on");
      line.setAttribute("aria-current", "true");
      line.style.setProperty("--av-kind", data.kinds[run.kinds[now]]);
      reveal(box, line.offsetTop, line.offsetHeight, 24);
    },
  };
}

/** Scroll a box, and only it, until a stretch of it is in view. */
function reveal(box, top, height, margin) {
  if (top - margin < box.scrollTop) box.scrollTop = top - margin;
  else if (top + height + margin > box.scrollTop + box.clientHeight) box.scrollTop = top + height + margin - box.clientHeight;
}

/** One card of a graph, as `dot` draws it: a title, rows, and the numbers that have come so far. */
function card(node, numbers) {
  const [x, y, width, height] = node.b, leaf = node.k.includes("accumulate");
  const made = h(`g.av-node.${node.k.map((k) => `av-${k}`).join(".")}`, { transform: `translate(${x} ${y})` });
  const box = { width, height, rx: leaf ? 15 : 7 };
  if (node.f) made.append(h("title", {}, node.f));
  if (node.k.includes("fold")) made.append(h("rect.av-behind", { x: 4, y: 4, ...box }));
  made.append(h("rect.av-card", box), h("text.av-title", { x: 11, y: 22 }, node.t));
  if (node.d) made.append(h("text.av-quiet", { x: width - 11, y: 22, "text-anchor": "end" }, node.d));
  let line = 22;
  for (const [label, text] of node.r) {
    line += 19;
    const row = h("text.av-quiet", { x: 11, y: line }, h("tspan.av-label", {}, label), label && text ? " " : "", h("tspan", {}, text));
    made.append(row);
    if (label.startsWith("saves")) made.saves = [row, label, text];
  }
  if (numbers.length) made.append(h("line.av-rule", { x1: 0, x2: width, y1: line + 9, y2: line + 9 }));
  line += 7;
  let what = "";
  numbers.forEach((text, i) => {
    line += 19;
    what = node.n[i] || what;
    const row = h(what === "grad" ? "g.av-late" : "g", {});
    if (node.n[i]) row.append(h("text.av-label", { x: 11, y: line }, node.n[i]));
    row.append(h("text", { x: 59, y: line }, text));
    made.append(row);
  });
  return made;
}

/** The graph of the moment: its nodes light up in the engine's order and are freed behind it. */
function graphPane(run, go, at) {
  const { data } = run;
  const box = h("div.av-box", { tabindex: "0", role: "group", "aria-label": "Autograd graph, scrollable; up and down select a node" });
  const note = h("p.av-note", {});
  const steps = h("input", { type: "range", min: 0, value: 0, "aria-label": "nodes that have run", "data-lm-suppress-shortcuts": "true",
    input: () => go({ e: at().e, n: Number(steps.value) }) });
  const told = h("span.av-told", {});
  const sub = h("label.av-sub", {}, steps, told);
  const zoomBy = (factor) => zoom(factor ? scale * factor : Math.min(box.clientWidth / layout.w, box.clientHeight / layout.h));
  const tools = h("span.av-tools", {}, ...[["−", "zoom out", 1 / 1.25], ["+", "zoom in", 1.25], ["fit", "fit the whole graph", 0]].map(
    ([text, label, factor]) => h("button.av-b", { type: "button", "aria-label": label, title: label, click: () => layout && zoomBy(factor) }, text)));
  const made = pane("graph", "Graph", box, sub, note);
  made.head.append(tools);
  let shown = -1, layout = null, scale = 1, cards = [], edges = [], rank = [], lit = -1;

  function zoom(to) {
    const middle = [(box.scrollLeft + box.clientWidth / 2) / scale, (box.scrollTop + box.clientHeight / 2) / scale];
    scale = clamp(to, 0.1, 3);
    box.firstChild?.setAttribute("width", layout.w * scale);
    box.firstChild?.setAttribute("height", layout.h * scale);
    box.scrollLeft = middle[0] * scale - box.clientWidth / 2;
    box.scrollTop = middle[1] * scale - box.clientHeight / 2;
  }
  /** As large as fits, and never so small that it cannot be read. */
  const fit = () => layout && zoom(clamp(Math.min((box.clientWidth - 4) / layout.w, (box.clientHeight - 4) / layout.h), 0.88, 1.15));

  function build(index) {
    const graph = data.graphs[index];
    layout = data.layouts[graph.l];
    cards = layout.n.map((node, i) => card(node, graph.v[i]));
    cards.forEach((one, i) => one.addEventListener("click", () => moved < 4 && choose(i)));
    edges = layout.e.map(([source, target, curve, tip]) => h("g.av-edge", {}, h("path.av-curve", { d: curve }), h("path.av-tip", { d: tip })));
    rank = layout.n.map(() => Infinity);
    graph.order.forEach((node, i) => { rank[node] = i; });
    box.replaceChildren(h("svg", { viewBox: `0 0 ${layout.w} ${layout.h}`, role: "img",
      "aria-label": `Autograd graph: ${counted(layout.n.length, "node")}` }, ...edges, ...cards));
    fit();
  }
  const choose = (node) => {
    const leaf = layout.n[node].leaf, p = run.parameters.findIndex((parameter) => parameter.n === leaf);
    go({ e: at().e, n: at().n, node: at().node === node ? -1 : node, ...(p >= 0 ? { p } : {}) });
  };

  let from = null, moved = 0, pinch = 0;
  const touches = new Map();
  box.addEventListener("pointerdown", (event) => {
    moved = 0;
    if (event.pointerType === "mouse" && event.button === 0) from = [event.clientX, event.clientY, box.scrollLeft, box.scrollTop];
    else touches.set(event.pointerId, event);
  });
  box.addEventListener("pointermove", (event) => {
    if (from && event.buttons) {
      const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
      moved = Math.max(moved, Math.hypot(dx, dy));
      if (moved >= 4) [box.scrollLeft, box.scrollTop] = [from[2] - dx, from[3] - dy];
    } else if (touches.has(event.pointerId)) {
      touches.set(event.pointerId, event);
      const [a, b] = [...touches.values()];
      if (!b || !layout) return;
      const apart = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      if (pinch) zoom((scale * apart) / pinch);
      pinch = apart;
    }
  });
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) box.addEventListener(name, (event) => { from = null; pinch = 0; touches.delete(event.pointerId); });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey || !layout) return;
    event.preventDefault();
    zoom(scale * Math.exp(-event.deltaY / 300));
  }, { passive: false });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!layout || (!move && !"+-0".includes(event.key))) return;
    event.preventDefault();
    event.stopPropagation();
    if (!move) return zoomBy({ "+": 1.25, "-": 0.8, 0: 0 }[event.key]);
    const order = data.graphs[shown].order, here = at().node < 0 ? (move > 0 ? -1 : order.length) : order.indexOf(at().node);
    const node = order[clamp(here + move, 0, order.length - 1)];
    go({ e: at().e, n: at().n, node });
  });

  /** The graph that an event shows, and how many of its nodes have run. */
  const moment = ({ e, n }) => {
    const owner = run.length ? run.backward[e] ?? -1 : 0, index = data.of[owner] ?? -1;
    const total = index < 0 ? 0 : data.graphs[index].order.length, now = !run.length || owner === e;
    return { owner, index, total, now, ran: now && n !== null ? clamp(n, 0, total) : total };
  };
  return {
    ...made, moment, fit,
    describe(state) {
      const { index, total, now, ran, owner } = moment(state);
      if (index < 0 || !now) return "";
      const nodes = data.layouts[data.graphs[index].l].n, name = (i) => nodes[i].t + (nodes[i].leaf !== undefined ? " (AccumulateGrad)" : "");
      let text = "";
      if (ran < total) {
        const last = ran ? data.graphs[index].order[ran - 1] : -1;
        text = ran ? `${ran} of ${total} nodes have run, the last is ${name(last)}${this.numbers(index, last, true)}.` : `The forward has built ${counted(nodes.length, "node")}; none has run backward yet.`;
      }
      if (state.node >= 0 && nodes[state.node]) {
        const node = nodes[state.node], done = data.graphs[index].order.indexOf(state.node) < ran;
        text += ` Selected: ${name(state.node)}${node.d ? `, shape ${node.d}` : ""}${this.numbers(index, state.node, done)}` +
          (node.s ? (done && !run.retained.has(owner) ? ", freed" : `, ${node.r.map(([label]) => label).find((label) => label.startsWith("saves")) || "freed"}`) : "") + ".";
      }
      return text.trim();
    },
    numbers(index, node, done) {
      const graph = data.graphs[index], labels = data.layouts[graph.l].n[node].n;
      return graph.v[node].map((text, i) => (labels[i] === "grad" && !done ? "" : `${labels[i] ? `, ${labels[i]} ` : "; "}${text}`)).join("");
    },
    draw(state) {
      const { owner, index, total, now, ran } = moment(state);
      sub.hidden = !now || index < 0;
      tools.hidden = index < 0;
      const notes = index < 0 ? [] : data.layouts[data.graphs[index].l].notes;
      note.textContent = [index < 0
        ? data.undrawn[owner] || (owner < 0 ? "No graph yet: a forward builds it." : "The graph of this backward was not kept.")
        : now ? data.remark : `The graph of event ${run.index(owner)}${run.retained.has(owner) ? ", retained" : ", freed by its backward"}.`, ...notes].filter(Boolean).join(" ");
      made.el.classList.toggle("av-past", !now);
      if (index !== shown) {
        shown = index;
        if (index < 0) { box.replaceChildren(); layout = null; return; }
        build(index);
        lit = -1;
      }
      if (index < 0) return;
      steps.max = total;
      steps.value = ran;
      told.textContent = ran === total ? `all ${total} run` : `${ran} of ${total} run`;
      steps.setAttribute("aria-valuetext", told.textContent);
      const color = run.length ? run.color(owner) : "#0072B2";
      made.el.style.setProperty("--av-now", color);
      made.el.style.setProperty("--av-on-now", inkOn(color));
      const kept = run.retained.has(owner), last = now && ran < total ? data.graphs[index].order[ran - 1] ?? -1 : -1;
      layout.n.forEach((node, i) => {
        const done = rank[i] < ran, freed = done && node.s && !kept, one = cards[i];
        one.classList.toggle("av-done", done);
        one.classList.toggle("av-gone", Boolean(freed));
        one.classList.toggle("av-lit", i === last);
        one.classList.toggle("av-wrote", now && done && node.k.includes("accumulate"));
        one.classList.toggle("av-chosen", i === state.node);
        if (one.saves && one.gone !== freed) {
          const [row, label, text] = one.saves;
          one.gone = freed;
          row.firstChild.textContent = freed ? "freed" : label;
          row.lastChild.textContent = freed ? "" : text;
        }
      });
      layout.e.forEach(([source], i) => edges[i].classList.toggle("av-flown", now && rank[source] < ran));
      const follow = last >= 0 ? last : state.node;
      if (follow >= 0 && follow !== lit && layout.n[follow]) {
        const [x, y, width, height] = layout.n[follow].b.map((side) => side * scale);
        reveal(box, y, height, 40);
        if (x < box.scrollLeft || x + width > box.scrollLeft + box.clientWidth) box.scrollLeft = x + width / 2 - box.clientWidth / 2;
      }
      lit = follow;
    },
  };
}

/** One row per parameter: a bar whose parts are the contributions live in its `.grad`; many parameters are grouped. */
function gradPane(run, go, at, uid) {
  const { data } = run, many = run.parameters.length > 12, tall = many ? 30 : 42;
  const list = h("div.av-rows", {});
  const box = h("div.av-box", { tabindex: "0", role: "listbox", "aria-label": "Parameters and their .grad", scroll: () => draw(at()) }, list);
  const equation = h("p.av-note", {});
  const made = pane("grad", ".grad", box, equation);
  const search = h("input.av-search", { type: "search", placeholder: `search ${run.parameters.length} names`, "aria-label": "search parameters by name",
    "data-lm-suppress-shortcuts": "true", input: () => { arrange(); box.scrollTop = 0; draw(at()); } });
  if (many) made.head.append(search);
  const open = new Set(), pool = [];
  let rows = [];

  function arrange() {
    const wanted = search.value.trim().toLowerCase();
    rows = run.parameters.map((_, p) => p).filter((p) => !wanted || run.parameters[p].n.toLowerCase().includes(wanted));
    if (many && !wanted) rows = data.groups.flatMap((group) => {
      const inside = Array.from({ length: group[2] - group[1] }, (_, i) => group[1] + i);
      return inside.length === 1 ? inside : open.has(group) ? [group, ...inside] : [group];
    });
    list.style.height = `${rows.length * tall}px`;
    box.style.setProperty("--av-tall", `${rows.length * tall}px`);
    made.el.classList.toggle("av-empty", !rows.length);
  }
  const toggle = (group) => { if (!open.delete(group)) open.add(group); arrange(); draw(at()); };
  const choose = (key) => Array.isArray(key) ? toggle(key) : go({ e: at().e, n: at().n, p: at().p === key ? -1 : key });

  function make() {
    const row = { name: h("span.av-of", {}), bar: h("span.av-bar", {}), total: h("span.av-total", {}), parts: [] };
    row.zero = h("i.av-zero", {});
    row.end = h("i.av-end", {});
    row.bar.append(row.zero, row.end);
    row.el = h("div.av-row", { role: "option", style: `height: ${tall}px`, click: () => { choose(row.key); } }, row.name, row.bar, row.total);
    return row;
  }
  /** How far a row's bars reach over all events, so that its scale stands still while one scrubs. */
  function extent(row) {
    if (row.high !== undefined) return;
    [row.low, row.high] = [0, 0];
    for (let e = 0; e < run.length; e++) {
      let [down, up] = [run.grad(e, row) || 0, 0];
      if (down > 0) [down, up] = [0, down];
      if (row.signed && run.length <= 2000) {
        let [under, over] = [0, 0];
        for (const { amount } of run.stack(e, row)) if (Number.isFinite(amount)) amount < 0 ? (under += amount) : (over += amount);
        [down, up] = [Math.min(down, under), Math.max(up, over)];
      }
      if (Number.isFinite(down) && down < row.low) row.low = down;
      if (Number.isFinite(up) && up > row.high) row.high = up;
    }
  }
  function fill(one, key, e, width) {
    const row = run.row(key), grad = run.grad(e, row), group = Array.isArray(key);
    extent(row);
    one.key = key;
    one.name.textContent = group ? `${open.has(key) ? "▾" : "▸"} ${row.n}` : row.n;
    one.name.title = group ? `${row.n}: ${counted(key[2] - key[1], "parameter")}` : `${row.n}, shape (${row.d.join(", ")})`;
    const text = group ? (grad === null ? "None" : `‖·‖ ${number(grad)}`) : run.value(e, row, 1);
    one.total.textContent = text;
    one.total.classList.toggle("av-none", grad === null);
    const span = row.high - row.low || 1, x = (value) => (100 * (value - row.low)) / span;
    const broken = grad !== null && !Number.isFinite(grad);
    let parts = broken || grad === null ? [] : run.stack(e, row).filter((part) => Number.isFinite(part.amount));
    const whole = parts.reduce((sum, part) => sum + part.amount, 0);
    const share = row.signed || !whole ? 1 : grad / whole;
    if (parts.length > 24) {
      const early = parts.slice(0, -23);
      parts = [{ ...early.at(-1), amount: early.reduce((sum, part) => sum + part.amount, 0), many: early.length }, ...parts.slice(-23)];
    }
    one.bar.classList.toggle("av-none", grad === null);
    one.bar.classList.toggle("av-broken", broken);
    one.zero.style.left = `${x(0)}%`;
    one.end.hidden = grad === null || broken;
    one.end.style.left = `${x(grad || 0)}%`;
    let [under, over] = [0, 0];
    while (one.parts.length < parts.length) {
      one.parts.push(h("b.av-part", {}));
      one.bar.insertBefore(one.parts.at(-1), one.end);
    }
    one.parts.forEach((seg, i) => {
      const part = parts[i];
      seg.hidden = !part;
      if (!part) return;
      const amount = part.amount * share, start = amount < 0 ? under + amount : over;
      if (amount < 0) under += amount; else over += amount;
      const wide = (100 * Math.abs(amount)) / span, color = part.born < 0 ? "var(--av-muted)" : run.color(part.born);
      seg.className = `av-part ${part.born < 0 ? "av-unseen" : part.fresh ? "av-new" : part.used ? "av-used" : "av-live"}`;
      seg.style.cssText = `left: ${x(start)}%; width: ${wide}%; --av-c: ${color}; --av-ink: ${part.fresh && part.born >= 0 ? inkOn(color) : "inherit"}`;
      const told = part.many ? `${part.many} earlier` : number(part.amount, row.signed ? 4 : 3);
      seg.textContent = (wide * width) / 100 > told.length * 7 + 6 ? told : "";
    });
    const lost = group ? [] : run.lost(e, row);
    one.bar.dataset.lost = lost.length ? `× ${lost.length === 1 ? run.value(lost[0], row, 0) : counted(lost.length, "contribution")} unused` : "";
    one.el.setAttribute("aria-label", `${row.n}: .grad ${text}${parts.length > 1 ? `, ${counted(parts.length, "contribution")}` : ""}`);
    one.el.setAttribute("aria-selected", String(at().p === key));
    one.el.classList.toggle("av-group", group);
    if (group) one.el.setAttribute("aria-expanded", String(open.has(key))); else one.el.removeAttribute("aria-expanded");
  }
  box.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!rows.length || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    event.stopPropagation();
    if (!move) return Array.isArray(rows[cursor]) ? toggle(rows[cursor]) : undefined;
    cursor = clamp(cursor + move, 0, rows.length - 1);
    reveal(box, cursor * tall, tall, 0);
    if (!Array.isArray(rows[cursor])) go({ e: at().e, n: at().n, p: rows[cursor] });
    else draw(at());
  });
  let cursor = -1;

  function explain({ e, p }) {
    const key = p >= 0 ? p : run.parameters.length === 1 ? 0 : -1;
    if (key < 0) return many ? "" : "Select a parameter to see what its .grad is made of.";
    const row = run.row(key), name = `${shorten(row.n, 28)}.grad`;
    if (run.grad(e, row) === null) return `${name} is None: there is no tensor, which is not zero.`;
    const parts = run.stack(e, row), shown = parts.slice(-5), total = run.value(e, row, 1);
    if (!parts.length) return `${name} = ${total}: no contribution is live in it.`;
    const scaled = (part) => !row.signed && part.born >= 0 && row.x ? run.value(part.born, row, 0) : number(part.amount);
    const terms = shown.map((part, i) => {
      const text = scaled(part), first = i === 0 && shown.length === parts.length, from = part.born < 0 ? "not recorded" : `event ${run.index(part.born)}`;
      return (first ? text : text.startsWith("−") ? ` − ${text.slice(1)}` : ` + ${text}`) + ` (${from})`;
    }).join("");
    const early = parts.length - shown.length;
    if (!row.x) return `‖${name}‖ ${number(run.grad(e, row))}, from ${counted(parts.length, "contribution")}; norms ${shown.map((part) => number(part.amount)).join(", ")}${early ? " for the latest" : ""}.`;
    return `${name} = ${early ? `${early} earlier` : ""}${terms} = ${total}`;
  }
  function draw(state) {
    if (state.p >= 0 && state.p !== shownP) {
      let i = rows.indexOf(state.p);
      const group = i < 0 && data.groups.find(([, start, stop]) => start <= state.p && state.p < stop);
      if (group && !search.value) { open.add(group); arrange(); i = rows.indexOf(state.p); }
      if (i >= 0) { cursor = i; reveal(box, i * tall, tall, 0); }
    }
    shownP = state.p;
    const first = Math.floor(box.scrollTop / tall), count = Math.min(Math.ceil((box.clientHeight || 300) / tall) + 1, rows.length - first);
    const width = pool[0]?.bar.clientWidth || 200;
    for (let i = 0; i < Math.max(pool.length, count); i++) {
      if (i === pool.length) { pool.push(make()); list.append(pool[i].el); }
      pool[i].el.hidden = i >= count;
      if (i >= count) continue;
      pool[i].el.style.top = `${(first + i) * tall}px`;
      pool[i].el.id = `${uid}-${first + i}`;
      pool[i].el.classList.toggle("av-cursor", first + i === cursor);
      pool[i].el.setAttribute("aria-setsize", rows.length);
      pool[i].el.setAttribute("aria-posinset", first + i + 1);
      fill(pool[i], rows[first + i], state.e, width);
    }
    if (cursor >= first && cursor < first + count) box.setAttribute("aria-activedescendant", `${uid}-${cursor}`);
    equation.textContent = explain(state);
  }
  let shownP = -1;
  arrange();
  return { ...made, draw };
}

/** Parameters × events: bars while there is room, else a heat map of norms; events that are no backward rule through it. */
function timePane(run, go, at) {
  const { data, e: columns } = run, P = run.parameters.length, N = run.length, saved = columns.b;
  const canvas = h("canvas", { role: "img", "aria-label": `Timeline: ${data.about}` });
  const head = h("i.av-playhead", {}), lane = h("i.av-lane", {});
  const plot = h("div.av-plot", {}, canvas, lane, head);
  const legend = h("p.av-legend", {});
  const made = pane("time", "Timeline", plot, legend);
  let g = null;

  function layout(width) {
    const few = P <= 8, names = (few ? run.parameters.map((p, i) => [p.n, i, i + 1]) : data.groups);
    const left = clamp(12 + 7.3 * Math.max(5, ...names.map(([name]) => Math.min([...name].length, 22))), 52, width < 480 ? 92 : 172);
    const room = width - left - 2, column = Math.min(room / N, 112), bars = few && column >= 18;
    const up = bars && column >= 74, top = up ? 38 : bars ? 84 : 14;
    const lane = bars ? (P === 1 ? 84 : 60) : clamp(Math.floor(260 / P), 2, 22);
    const strip = saved ? 34 : 0;
    return { width, left, column, bars, up, top, lane, strip, names, few, bottom: top + lane * P, height: top + lane * P + strip + 4 };
  }
  const x = (i) => g.left + i * g.column;

  function paint() {
    const width = plot.clientWidth;
    if (!width || !N) return;
    g = layout(width);
    const ratio = Math.min(globalThis.devicePixelRatio || 1, 2), context = canvas.getContext("2d");
    canvas.width = width * ratio;
    canvas.height = g.height * ratio;
    canvas.style.height = `${g.height}px`;
    context.scale(ratio, ratio);
    const of = (name) => { head.style.color = `var(${name})`; return getComputedStyle(head).color; };
    const inks = { text: of("--av-text"), muted: of("--av-muted"), line: of("--av-line") };
    head.style.color = "";
    const font = getComputedStyle(made.el).fontFamily;
    const write = (text, px, py, { size = 11, align = "left", ink = inks.text, bold = "", family = font } = {}) => {
      Object.assign(context, { font: `${bold} ${size}px ${family}`, textAlign: align, textBaseline: "middle", fillStyle: ink });
      context.fillText(text, px, py);
    };
    const rule = (px, from, to, color, dash = [], wide = 1) => {
      Object.assign(context, { strokeStyle: color, lineWidth: wide });
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(px, from);
      context.lineTo(px, to);
      context.stroke();
      context.setLineDash([]);
    };
    const mono = getComputedStyle(made.el).getPropertyValue("--av-mono") || "monospace";
    if (g.bars) bars(context, inks, write, mono); else heat(context, inks);
    let taken = -Infinity;
    for (const [name, start] of g.names) {
      const stop = g.names.find((other) => other[1] === start)[2], middle = g.top + (g.lane * (start + stop)) / 2;
      if (start && g.lane * (stop - start) > 5) { context.fillStyle = inks.line; context.fillRect(0, g.top + g.lane * start, width, 0.7); }
      if (middle - taken < 13) continue;
      taken = middle;
      write(shorten(name, Math.floor((g.left - 12) / 7)), g.left - 8, middle, { size: 11.5, align: "right", family: mono });
    }
    const ruled = g.column >= 3;
    for (let i = 0; i < N && (ruled || g.bars); i++) {
      const kind = run.kinds[i];
      if (kind !== "backward") rule(x(i) + 0.5, g.bars ? 2 : g.top, g.bottom, data.kinds[kind], DASH[kind] || [2, 3], g.column > 12 ? 1.8 : 1);
      if (!g.bars) continue;
      if (g.up) {
        write(`${kind}${run.skipped.has(i) ? " skipped" : ""}`, x(i) + 6, 10, { size: 12, bold: kind === "backward" ? "600" : "600" });
        write(shorten(run.label(i), Math.floor((g.column - 8) / 6.8)), x(i) + 6, 26, { size: 11, ink: inks.muted, family: mono });
      } else {
        context.save();
        context.translate(x(i) + g.column / 2 + 1, g.top - 6);
        context.rotate(-Math.PI / 2);
        write(shorten(`${kind} ${run.label(i)}`.trim(), 12), 0, 0, { size: 11 });
        context.restore();
      }
    }
    if (saved) {
      const most = Math.max(1, ...saved.map((b) => Number(b) || 0)), base = g.height - 3;
      write("saved", g.left - 8, g.bottom + 19, { size: 11, align: "right", ink: inks.muted });
      context.fillStyle = inks.line;
      context.fillRect(0, g.bottom + 3, width, 0.7);
      for (let i = 0; i < N; i++) if (saved[i] !== null) {
        const wide = Math.max(Math.min(g.column * 0.62, 46), 0.7), start = x(i) + (g.column - wide) / 2;
        [saved[i], columns.a ? columns.a[i] : 0].forEach((bytes, k) => {
          const tall = (24 * (Number(bytes) || 0)) / most;
          context.globalAlpha = k ? 0.45 : 0.85;
          context.fillStyle = inks.muted;
          context.fillRect(start + (k * wide) / 2, base - tall, wide / 2, tall);
        });
        context.globalAlpha = 1;
      }
      context.fillStyle = inks.muted;
      context.fillRect(g.left, base, g.column * N, 0.8);
    }
    describe(ruled);
    place(at());
  }

  function bars(context, inks, write) {
    const wide = Math.min(g.column * 0.62, 46);
    for (let p = 0; p < P; p++) {
      const row = run.row(p), top = g.top + g.lane * p, stacks = run.kinds.map((_, e) => run.stack(e, row));
      const heights = stacks.map((stack, e) => {
        const whole = stack.reduce((sum, part) => sum + part.amount, 0), grad = run.grad(e, row);
        return stack.map((part) => (row.signed || !whole ? part.amount : (part.amount * grad) / whole));
      });
      const sums = heights.flatMap((list) => [list.filter((v) => v < 0), list.filter((v) => v > 0)].map((half) => half.reduce((a, b) => a + b, 0)));
      const known = [0, ...sums, ...run.kinds.map((_, e) => run.grad(e, row))].filter(Number.isFinite);
      const [low, high] = [Math.min(...known), Math.max(...known)], over = high > 0 ? 17 : 8, under = low < 0 ? 17 : 8;
      const scale = (g.lane - over - under) / (high - low || 1), zero = top + over + high * scale;
      context.fillStyle = inks.muted;
      context.fillRect(g.left, zero, g.column * N, 0.8);
      stacks.forEach((stack, e) => {
        const start = x(e) + (g.column - wide) / 2, grad = run.grad(e, row), middle = start + wide / 2;
        const absent = grad === null;
        if (absent || !Number.isFinite(grad) || heights[e].some((v) => !Number.isFinite(v))) {
          write(absent ? (g.column >= 36 ? "None" : "∅") : number(grad), middle, high > 0 || !absent ? zero - 9 : zero + 10,
            { align: "center", ink: absent ? inks.muted : inks.text, bold: absent ? "italic" : "bold" });
          return;
        }
        let [down, up] = [zero, zero];
        stack.forEach((part, k) => {
          const tall = Math.abs(heights[e][k]) * scale, above = heights[e][k] >= 0, py = above ? up - tall : down;
          if (above) up -= tall; else down += tall;
          context.fillStyle = context.strokeStyle = part.born < 0 ? inks.muted : run.color(part.born);
          context.globalAlpha = part.fresh ? 1 : part.used ? 0 : 0.36;
          context.fillRect(start, py + 0.5, wide, Math.max(tall - 1, 0.8));
          context.globalAlpha = 1;
          context.lineWidth = 1.2;
          context.strokeRect(start, py + 0.5, wide, Math.max(tall - 1, 0.8));
        });
        context.fillStyle = inks.text;
        context.fillRect(start - 4, zero - grad * scale - 1.2, wide + 8, 2.4);
        const text = [4, 3, 2].map((digits) => number(grad, digits)).find((told) => told.length * 7 <= g.column - 2);
        if (text) write(text, middle, grad < 0 ? Math.max(down, zero - grad * scale) + 10 : Math.min(up, zero - grad * scale) - 9, { align: "center", bold: "600" });
      });
    }
  }

  /** The largest norm of each pixel's events: a single spike must survive. */
  function heat(context, inks) {
    const room = Math.min(g.column * N, g.width - g.left), bins = Math.max(Math.min(N, Math.floor(room)), 1), each = N / bins;
    const pixels = new ImageData(bins, P), ink = inks.text.match(/[\d.]+/g).slice(0, 3).map(Number);
    let [low, high] = [Infinity, 0];
    for (const v of run.c) if (v > 0 && v < Infinity) { if (v < low) low = v; if (v > high) high = v; }
    low = Math.log(Math.max(low, high / 1e6));
    const span = Math.log(high) - low || 1;
    const paint_ = [...Array(N).keys()].map((e) => { const c = run.color(e); return [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)); });
    for (let p = 0; p < P; p++) for (let b = 0; b < bins; b++) {
      let most = -1, from = -1, broken = false, held = false;
      for (let e = Math.floor(b * each); e < Math.floor((b + 1) * each); e++) {
        const v = run.c[p * N + e];
        if (v > most && v < Infinity) { most = v; from = e; } else if (v === Infinity || Number.isNaN(v)) broken = true;
        held ||= !(run.g[p * N + e] < 0);
      }
      const color = broken ? ink : from >= 0 ? paint_[from] : [127, 127, 127];
      const alpha = broken ? 1 : most > 0 ? 0.14 + 0.86 * clamp((Math.log(most) - low) / span, 0, 1) : most === 0 ? 0.14 : held ? 0.13 : 0;
      pixels.data.set([...color, 255 * alpha], 4 * (p * bins + b));
    }
    const small = new OffscreenCanvas(bins, P);
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, g.left, g.top, g.column * N, g.lane * P);
  }

  /** A legend of what is drawn, and of what is left out. */
  function describe(ruled) {
    const kinds = new Set(run.kinds), key = (mark, text) => h("span.av-key", {}, mark, text);
    const swatch = (look, color) => h(`i.av-swatch.av-${look}`, { style: `--av-c: ${color}` });
    const shown = [...run.colors].map(([at, color]) => [data.strings[at] || "backward", color]);
    const own = shown.length === 1 ? shown[0][1] : "var(--av-muted)";
    const keys = shown.length > 1 ? shown.slice(0, 8).map(([label, color]) => key(swatch("new", color), shorten(label, 28))) : [];
    keys.push(key(swatch("new", own), "added now"), key(swatch("live", own), "already in .grad"), key(swatch("used", own), "used by a step"));
    if (ruled || g.bars) for (const kind of kinds) if (kind !== "backward") keys.push(key(swatch(`rule.av-${kind}`, data.kinds[kind]), kind));
    if (!g.bars) keys.push(h("span.av-key", {}, "In the timeline, darker is a larger contribution; grey: .grad is there, nothing is added."));
    if (g.column < 1) keys.push(h("span.av-key", {}, `Each pixel is the largest of ${Math.ceil(1 / g.column)} events.`));
    if (data.note) keys.push(h("strong.av-key", {}, data.note));
    legend.replaceChildren(...keys);
  }

  function place(state) {
    if (!g) return;
    const wide = Math.max(g.column, 2);
    head.style.transform = `translateX(${clamp(x(state.e), g.left, g.width - wide)}px)`;
    head.style.width = `${wide}px`;
    lane.hidden = state.p < 0;
    lane.style.cssText = `top: ${g.top + g.lane * Math.max(state.p, 0)}px; height: ${Math.max(g.lane, 3)}px`;
  }
  const point = (event) => {
    const { left, top } = canvas.getBoundingClientRect(), i = Math.floor((event.clientX - left - g.left) / g.column);
    const p = Math.floor((event.clientY - top - g.top) / g.lane);
    go({ e: clamp(i, 0, N - 1), ...(event.type === "pointerdown" && p >= 0 && p < P ? { p } : {}) });
  };
  plot.addEventListener("pointerdown", (event) => {
    if (!g || event.button) return;
    plot.setPointerCapture?.(event.pointerId);
    point(event);
  });
  plot.addEventListener("pointermove", (event) => { if (g && event.buttons && plot.hasPointerCapture(event.pointerId)) point(event); });
  return { ...made, paint, draw: place };
}

/** Put a player into an element; the same function serves a page and a kernel. @param {{model: Model, el: HTMLElement}} host */
async function render({ model, el }) {
  const { data, bytes } = await read(model.get("data"));
  const run = new Recording(data, bytes), N = run.length, uid = `av${Math.random().toString(36).slice(2, 8)}`;
  const start = { e: 0, n: null, p: -1, node: -1 };
  const at = () => ({ ...start, ...model.get("at") });
  const go = (change) => {
    const next = { ...at(), n: null, node: -1, ...change };
    next.e = clamp(Math.trunc(next.e) || 0, 0, Math.max(N - 1, 0));
    model.set("at", next);
    model.save_changes();
  };

  const parts = [], alone = !N && Object.keys(data.of).length;
  const code = N && data.code.length ? codePane(run, go, at) : null;
  const graph = data.graphs.length || Object.keys(data.undrawn).length ? graphPane(run, go, at) : null;
  const grad = N && run.parameters.length ? gradPane(run, go, at, uid) : null;
  const time = N ? timePane(run, go, at) : null;
  parts.push(...[code, graph, grad, time].filter(Boolean));

  const slider = h("input.av-scrub", { type: "range", min: 0, max: Math.max(N - 1, 0), value: 0, "aria-label": "event", "data-lm-suppress-shortcuts": "true",
    input: () => { pause(); go({ e: Number(slider.value) }); } });
  const count = h("span.av-count", {}), kind = h("strong.av-kind", {}), words = h("span", {});
  const say = h("p.av-say", { "aria-live": "polite" }, kind, words);
  const link = h("a.av-b.av-link", { href: "#", title: "link to this moment", "aria-label": "link to this moment", click: () => {
    globalThis.navigator?.clipboard?.writeText(link.href).catch(() => {});
  } }, icon("link"));
  const toggle = button("play", "play", () => (timer ? pause() : play()));
  const move = (by) => { pause(); go({ e: at().e + by }); };
  const bar = h("div.av-bar-top", {}, button("first", "first event", () => move(-N)), button("back", "previous event", () => move(-1)), toggle,
    button("next", "next event", () => move(1)), button("last", "last event", () => move(N)), slider, count, link);
  const hint = h("p.av-hint", {}, "← → events · Shift ← → nodes · Home End · Space plays");
  const body = h("div.av-body", { class: `av-body ${parts.map((part) => part.el.classList[1].replace("av-", "av-with-")).join(" ")}` }, ...parts.map((part) => part.el));
  const frame = h("div.av-frame", { role: "group", "aria-label": "Player" }, ...(N ? [bar] : []), say, body);
  if (!N && !alone) say.textContent = data.e ? "Nothing to play: this ledger has no event." : "Nothing to play.";
  if (N) frame.append(hint);

  let timer = 0;
  function pause() {
    clearTimeout(timer);
    timer = 0;
    show();
  }
  function show() {
    toggle.replaceChildren(icon(timer ? "pause" : "play"));
    toggle.setAttribute("aria-label", timer ? "pause" : "play");
    toggle.title = timer ? "pause" : "play";
    say.setAttribute("aria-live", timer ? "off" : "polite");
  }
  /** One moment after the other: nodes of a backward one by one, many events several at a time. */
  function play() {
    if (at().e >= N - 1 && at().n === null) go({ e: 0, n: graph?.moment({ e: 0, n: null }).now ? 0 : null });
    const step = () => {
      const now = at(), { total, ran, now: own } = graph?.moment(now) || { total: 0, ran: 0, now: false };
      const slow = N <= 60;
      let wait = slow ? 1100 : 40;
      if (slow && own && ran < total) {
        const by = Math.ceil(total / 24);
        go({ e: now.e, p: now.p, n: ran + by >= total ? null : ran + by });
        wait = ran + by >= total ? 1100 : clamp(3600 / total, 120, 700);
      } else if (now.e >= N - 1) return pause();
      else {
        const e = now.e + (slow ? 1 : Math.ceil(N / 1500)), next = graph?.moment({ e: Math.min(e, N - 1), n: null });
        go({ e, p: now.p, n: slow && next?.now && next.total ? 0 : null });
        if (slow && next?.now && next.total) wait = 700;
      }
      timer = setTimeout(step, wait);
    };
    timer = setTimeout(step, 60);
    show();
  }

  frame.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target), slides = target.matches("input[type=range]");
    if (target.matches("input:not([type=range])") || event.altKey || event.ctrlKey || event.metaKey) return;
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by && event.shiftKey && graph) {
      const { ran, total, now } = graph.moment(at());
      pause();
      if (now) go({ e: at().e, p: at().p, n: clamp(ran + by, 0, total) });
    } else if (by && !slides) move(by);
    else if (event.key === "Home" && !slides) move(-N);
    else if (event.key === "End" && !slides) move(N);
    else if (event.key === " " && !target.matches("button, a, summary")) timer ? pause() : play();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  function draw() {
    const state = at();
    for (const part of parts) part.draw(state);
    const node = graph ? graph.describe(state) : "";
    if (!N) { if (graph) words.textContent = node || `${data.about || "The graph"}`; return; }
    slider.value = String(state.e);
    slider.setAttribute("aria-valuetext", run.head(state.e));
    count.textContent = `${(state.e + 1).toLocaleString("en")} / ${N.toLocaleString("en")}`;
    const name = run.kinds[state.e];
    kind.textContent = name;
    kind.style.setProperty("--av-kind", data.kinds[name]);
    words.textContent = node.includes("run") && !node.startsWith("Selected") ? `${run.head(state.e)}. ${node}` : `${run.sentence(state.e, state.p)} ${node}`.trim();
    link.href = `#${id}&e=${run.index(state.e)}${state.n === null ? "" : `&n=${state.n}`}${state.p < 0 ? "" : `&p=${state.p}`}`;
  }
  let due = 0;
  const schedule = () => { due ||= requestAnimationFrame(() => { due = 0; draw(); }); };
  const id = model.get("id") || uid;
  /** A permalink names its player, so that a page may hold several and keep its own anchors. */
  const follow = () => {
    const [whose, ...rest] = decodeURIComponent(location.hash.slice(1)).split("&");
    if (whose !== id) return false;
    const told = Object.fromEntries(rest.map((pair) => pair.split("="))), index = Number(told.e) || 0;
    const e = run.e.i ? Math.max(run.e.i.findLastIndex((i) => i <= index), 0) : index;
    go({ e, n: told.n === undefined ? null : Number(told.n), p: clamp(Number(told.p ?? -1) | 0, -1, run.parameters.length - 1) });
    frame.scrollIntoView({ block: "nearest" });
    return true;
  };

  el.append(frame);
  model.on("change:at", schedule);
  addEventListener("hashchange", follow);
  const repaint = () => { time?.paint(); draw(); };
  let width = 0;
  const resized = new ResizeObserver(() => {
    if (frame.clientWidth === width) return;
    width = frame.clientWidth;
    graph?.fit();
    repaint();
  });
  resized.observe(frame);
  const themed = new MutationObserver(repaint);
  themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class", "data-jp-theme-light", "theme"] });
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  if (alone) model.set("at", { ...start });
  if (!follow()) draw();
  return () => { pause(); resized.disconnect(); themed.disconnect(); removeEventListener("hashchange", follow); };
}

/** What anywidget's model is to a kernel, for a page without one. @returns {Model} */
function still(state) {
  const heard = {};
  return {
    get: (key) => state[key],
    set: (key, value) => { state[key] = value; (heard[`change:${key}`] || []).forEach((f) => f()); },
    save_changes() {}, send() {}, off() {},
    on: (name, f) => { (heard[name] ||= []).push(f); },
  };
}

/** Find the page's own players, once each: an output may stand in a page twice, and so may this script. */
for (const el of document.querySelectorAll("div[data-accumviz-player]:not([data-done])")) {
  el.dataset.done = "";
  const text = el.querySelector('script[type="application/json"]')?.textContent, id = el.dataset.accumvizPlayer;
  const before = document.querySelectorAll(`div[data-accumviz-player="${CSS.escape(id)}"][data-done]`).length - 1;
  const mount = h("div.av-mount", {});
  el.querySelector(".av-words").before(mount);
  render({ model: still({ data: text, id: before ? `${id}-${before}` : id }), el: mount }).then(
    () => el.querySelector(".av-words").removeAttribute("open"),
    (error) => { mount.replaceChildren(h("p.av-note", {}, `The player could not start (${error.message}); the recording stands below in words.`)); });
}

export default { render };
