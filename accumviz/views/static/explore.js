/**
 * The explorer: controls that switch between recorded runs, two of them side by side when asked. One ES module with no
 * import; the player's functions come from the player's module, through the page or through the widget.
 *
 * @typedef {(number | string)[]} Choice  per control the place of a recorded value, or the text of another one
 * @typedef {{a: Choice, b: Choice | null}} Shown  the one state: the run, and the run beside it
 */

/** Beyond this share of its size, a difference between two gradients is no rounding. */
const ROUNDING = 1e-5;

/** Compare what the steps of two runs used. @returns {{text: string, share: number | null}} */
function difference(a, b, number) {
  if (JSON.stringify(a.of) !== JSON.stringify(b.of)) return { text: "The two runs have different parameters.", share: null };
  const both = Math.min(a.rows.length, b.rows.length), what = a.exact ? "gradients" : "norms of the gradients";
  if (!both) return { text: "There is no gradient to compare.", share: null };
  const at = (s) => (both > 1 ? `, at step ${s + 1}` : "");
  let share = 0, step = 0, ratio = 1, odd = false, absent = "";
  for (let s = 0; s < both; s++) {
    const rows = [a, b].map(({ rows }) => rows[s].map((x) => (x === null ? 0 : Number(x))));
    const sizes = rows.map((row) => Math.hypot(...row)), most = Math.max(...sizes);
    const gap = Math.hypot(...rows[0].map((x, i) => (Object.is(x, rows[1][i]) ? 0 : x - rows[1][i])));
    odd ||= a.rows[s].some((x, i) => (x === null) !== (b.rows[s][i] === null));
    absent ||= odd ? [a, b].map(({ rows }, i) => (rows[s].every((x) => x === null) ? ` ${"AB"[i]} has none${at(s)}.` : "")).join("") : "";
    const now = gap === 0 ? 0 : Number.isFinite(gap / most) ? gap / most : Infinity;
    if (now > share) [share, step, ratio] = [now, s, sizes[0] / sizes[1]];
  }
  const uneven = a.steps !== b.steps;
  const which = a.end || b.end ? "the end" : uneven || both < a.steps ? `the first ${both === 1 ? "step" : `${both} steps`}` : both === 1 ? "the step" : `all ${both} steps`;
  let text = `The ${what} at ${which} `;
  if (share === 0) text += odd ? "differ only in that one is None where the other is 0." : a.exact ? "are equal, bit for bit." : "are equal.";
  else if (absent) text += `cannot be compared:${absent}`;
  else if (share <= ROUNDING) text += `are equal to rounding: they differ by ${number(share, 2)} of their size${at(step)}.`;
  else if (!Number.isFinite(share)) text += `cannot be compared: one is not finite${at(step)}.`;
  else {
    text += `differ by ${number(share, 3)} of their size${at(step)}`;
    text += Number.isFinite(ratio) && ratio && Math.abs(ratio - 1) > 1e-3 ? `: A has ${number(ratio, 3)} times the norm of B.` : ".";
  }
  return { text: text + (uneven ? ` A takes ${a.steps}, B ${b.steps}.` : ""), share };
}

/** Put an explorer into an element. */
async function explore(model, el, { render, still, read, h, number }) {
  const { data, bytes } = await read(model.get("data")), { controls } = data, id = model.get("id"), live = model.get("live");
  const uid = `avx${Math.random().toString(36).slice(2, 8)}`, others = new Map(), waiting = new Set();
  /** @returns {Shown} */
  const at = () => ({ a: data.start, b: data.against, ...model.get("at") });
  const go = (change) => { model.set("at", { ...at(), ...change }); model.save_changes(); };
  const text = (choice) => choice.map((place, i) => (typeof place === "number" ? controls[i].labels[place] : place));
  const keyOf = (choice) => JSON.stringify(text(choice));

  /** A recorded run, as the player reads it. */
  function runAt(choice) {
    if (others.has(keyOf(choice))) return others.get(keyOf(choice));
    if (choice.some((place) => typeof place !== "number")) return null;
    const run = data.runs[data.grid[choice.reduce((index, place, i) => index * controls[i].labels.length + place, 0)]];
    if (run.data && !run.whole) {
      const parts = Object.entries(run.data).map(([name, part]) => [name, data.parts[part]]);
      run.whole = { data: Object.fromEntries(parts), bytes: bytes?.subarray(...run.bytes) };
    }
    return run;
  }

  /** Two runs side by side are drawn to one scale. */
  function alike(run, other) {
    const { data: told, bytes } = run.whole, ranges = new Map(other?.whole?.data.p.map((row) => [row.n, row.r]));
    const p = told.p.map((row) => {
      const [mine, beside] = [row.r, ranges.get(row.n) || row.r].map((range) => range.map(Number));
      return { ...row, r: [Math.min(mine[0], beside[0]), Math.max(mine[1], beside[1])] };
    });
    const most = Math.max(1, ...[run, other].flatMap((one) => one?.whole?.data.e.b || []).map((count) => Number(count) || 0));
    return { data: { ...told, p, most }, bytes };
  }

  /** One control of one side; it tells what it shows. */
  function control(side, { name, kind, labels }, i) {
    const key = `${uid}-${side}-${i}`, choose = (place) => go({ [side]: at()[side].map((old, k) => (k === i ? place : old)) });
    const field = (tag, attributes, ...inside) => h(tag, { "data-lm-suppress-shortcuts": "true", ...attributes }, ...inside);
    const title = h("span.av-xname", { id: key }, name);
    if (kind === "fixed") return { el: h("div.av-control", {}, title, h("span.av-xvalue", {}, labels[0])), draw() {} };
    if (kind === "switch") {
      const box = field("input", { type: "checkbox", role: "switch", "aria-labelledby": key, input: () => choose(labels.indexOf(box.checked ? "yes" : "no")) });
      return { el: h("label.av-control.av-switch", {}, box, title), draw: (place) => { box.checked = labels[place] === "yes"; } };
    }
    if (kind === "slider") {
      const slider = field("input", { type: "range", min: 0, max: labels.length - 1, "aria-labelledby": key, input: () => choose(Number(slider.value)) });
      const value = h("output.av-xvalue"), made = h("div.av-control", {}, title, slider, value);
      const take = () => other.value && choose(other.value);
      const other = live && field("input.av-other", { type: "number", step: "any", "aria-label": `${name}: another value`, placeholder: "other", change: take,
        keydown: (event) => { if (event.key === "Enter") take(); event.stopPropagation(); } }); // notebooks take Enter for themselves
      if (other) made.append(other);
      return { el: made, draw(place) {
        value.textContent = typeof place === "number" ? labels[place] : place;
        if (typeof place === "number") slider.value = place;
        slider.style.setProperty("--av-at", `${(100 * slider.value) / (labels.length - 1)}%`);
        slider.setAttribute("aria-valuetext", value.textContent);
      } };
    }
    if (labels.join("").length > 24) {
      const list = field("select", { "aria-labelledby": key, input: () => choose(list.selectedIndex) }, ...labels.map((label) => h("option", {}, label)));
      return { el: h("div.av-control", {}, title, list), draw: (place) => { list.selectedIndex = place; } };
    }
    const radios = labels.map((label, place) => field("input", { type: "radio", name: key, "aria-label": label, input: () => choose(place) }));
    const group = h("div.av-segments", { role: "radiogroup", "aria-labelledby": key }, ...radios.map((radio, place) => h("label", {}, radio, h("span", {}, labels[place]))));
    return { el: h("div.av-control", {}, title, group), draw: (place) => { radios.forEach((radio, k) => { radio.checked = k === place; }); } };
  }

  /** One side: its controls, and its player. */
  function sideOf(side) {
    const offered = controls.map((one, i) => control(side, one, i));
    const panel = h("div.av-xside", { role: "group", "aria-label": side === "a" ? "Run A" : "Run B" }, h("b.av-xmark", { "aria-hidden": "true" }, side.toUpperCase()), ...offered.map(({ el }) => el));
    const slot = h("div.accumviz.av-player");
    let shown, beside, player, moment, due;
    const link = () => `${id}&side=${side}&a=${at().a.join(".")}${at().b ? `&b=${at().b.join(".")}` : ""}`;
    return {
      panel, slot,
      /** Where the player stands, for a permalink that leads here. */
      place(e, n, p, node) { due?.(); moment = { e, n, p, node }; due = player = shown = undefined; },
      draw(choice, other) {
        panel.hidden = slot.hidden = !choice;
        if (!choice) return;
        offered.forEach((one, i) => one.draw(choice[i]));
        const run = runAt(choice);
        if (!run && !waiting.has(keyOf(choice))) {
          waiting.add(keyOf(choice));
          model.set("ask", { choice, n: waiting.size });
          model.save_changes();
        }
        player?.set("link", link());
        if (run && run === shown && other === beside) return;
        [shown, beside] = [run, other];
        due?.();
        due = undefined;
        if (player) moment = { ...player.get("at"), node: -1, last: player.last };
        player = undefined;
        slot.replaceChildren();
        if (!run) return slot.append(h("p.av-note", { role: "status" }, "The kernel is recording this run."));
        if (run.error) return slot.append(h("p.av-raised", { role: "status" }, run.error));
        const kinds = run.whole.data.kinds.map(([kind]) => kind), e = run.whole.data.e.k.map((k) => kinds[k]), end = Math.max(e.lastIndexOf("step"), 0) || e.length - 1;
        // A reader who watches the end of one run wants the end of the next; else the same event.
        const where = !moment || moment.e === moment.last ? end : Math.min(moment.e, e.length - 1);
        const mine = (player = still({ data: alike(run, other), id: "", link: link(), at: { e: where, n: moment?.n ?? null, p: moment?.p ?? -1, node: moment?.node ?? -1 } }));
        mine.last = end;
        const box = slot.appendChild(h("div")); // a player that comes late finds its own box gone
        render({ model: mine, el: box }).then((dispose) => { if (mine === player) due = dispose; else dispose(); });
      },
    };
  }

  const sides = { a: sideOf("a"), b: sideOf("b") }, table = h("table.av-figures"), verdict = h("p.av-verdict", { "aria-live": "polite" });
  const needle = h("i.av-needle"), ticks = [[0, "equal"], [ROUNDING, "rounding"], [0.01, "1 %"], [1, "100 %"]];
  const along = (share) => (share === 0 ? 2 : 8 + 90 * Math.min(Math.max((Math.log10(share) + 8) / 8, 0), 1));
  const meter = h("div.av-meter", { "aria-hidden": "true" }, ...ticks.map(([share, name]) => h("span.av-tick", { style: `left: ${along(share)}%` }, name)), needle);
  const compare = h("button.av-compare", { type: "button", click: () => go({ b: at().b ? null : data.against || at().a }) });
  const result = h("div.av-result", {}, table, meter, verdict);
  const frame = h("div.av-xframe", { role: "group", "aria-label": "Explorer" },
    h("div.av-xtop", {}, sides.a.panel, sides.b.panel, compare), result, h("div.av-slots", {}, sides.a.slot, sides.b.slot));

  function draw() {
    const { a, b } = at(), shown = [a, ...(b ? [b] : [])].map(runAt);
    frame.classList.toggle("av-two", Boolean(b));
    compare.textContent = b ? "Show one run" : "Compare with another run";
    sides.a.draw(a, shown[1]);
    sides.b.draw(b, shown[0]);
    const told = shown.map((run) => new Map(run?.figures)), names = [...new Set(told.flatMap((run) => [...run.keys()]))];
    const head = h("tr", {}, h("td"), ...(b ? ["A", "B"] : ["this run"]).map((name) => h("th", { scope: "col" }, name)));
    table.replaceChildren(...(b ? [head] : []), ...names.map((name) => h("tr", {}, h("th", { scope: "row" }, name),
      ...told.map((run) => h(told.length > 1 && new Set(told.map((one) => one.get(name))).size > 1 ? "td.av-differs" : "td", {}, run.get(name) ?? "–")))));
    table.hidden = !names.length;
    const both = b && shown.every((run) => run?.grad), { text: said, share } = both ? difference(shown[0].grad, shown[1].grad, number) : { text: "", share: null };
    verdict.textContent = said;
    meter.hidden = share === null;
    needle.style.left = `${along(share ?? 0)}%`;
    needle.classList.toggle("av-far", share > ROUNDING);
  }
  /** A permalink names its explorer, the choices of both sides, and the moment of one. */
  function follow() {
    const told = new URLSearchParams(location.hash.slice(1)), whole = (key) => (told.has(key) ? Math.trunc(told.get(key)) || 0 : null);
    if (!id || !told.has(id)) return;
    const choice = (key) => told.get(key)?.split(".").map((place, i) => Math.min(Math.max(Math.trunc(place) || 0, 0), (controls[i]?.labels.length ?? 1) - 1));
    const [a, b] = [choice("a"), choice("b")], side = told.get("side") === "b" && b ? "b" : "a";
    if (a?.length !== controls.length || (b && b.length !== controls.length)) return;
    sides[side].place(whole("e") ?? 0, whole("n"), whole("p") ?? -1, whole("node") ?? -1);
    go({ a, b: b || null });
    frame.scrollIntoView({ block: "nearest" });
  }
  model.on("change:at", draw);
  model.on("change:told", async () => {
    const told = model.get("told"), { data, bytes } = await read(told.run);
    others.set(keyOf(told.choice), data.data ? { ...data, whole: { data: data.data, bytes } } : data);
    draw();
  });
  const ended = new AbortController();
  addEventListener("hashchange", follow, { signal: ended.signal });
  el.append(frame);
  draw();
  follow();
  return () => ended.abort();
}

/** The page's own explorers, once each; the player's module ran before this one and left its functions on them. */
for (const el of document.querySelectorAll("div[data-accumviz-explorer]:not([data-done])")) {
  const id = el.dataset.accumvizExplorer, before = document.querySelectorAll(`[data-done="${CSS.escape(id)}"]`).length;
  const words = el.querySelector(".av-words"), data = el.querySelector('script[type="application/json"]').textContent, mount = document.createElement("div");
  el.dataset.done = id;
  words.before(mount);
  Promise.resolve().then(() => explore(el.still({ data, id: before ? `${id}-${before}` : id }), mount, el)).then(() => words.removeAttribute("open"),
    (error) => mount.append(`The explorer could not start (${error.message}); below it stands as a table.`));
}

export default { render: ({ model, el }) => explore(model, el, { render, still, read, h, number }) };
