/** The opening: a division in the code to press, `.grad` as a vessel that fills, and the weight on its loss. */

/** @import { Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { OpeningData } from "./types.d.ts" */

import { textOf } from "../../views/js/code.js";
import { group, h, icon, named, put, range, slide, svg, tell } from "../../views/js/dom.js";
import { read } from "../../views/js/packed.js";
import { startAll } from "../../views/js/page.js";

const DWELL = 620;
/** The vessel: its bottom, and how high the gradient of one large batch reaches. */
const [BOTTOM, LEVEL] = [176, 76];
/** A part that is lower has no room for its number. */
const ROOM = 14;
const [DIVIDED, UNDIVIDED] = [1, 2];
/** @type {Record<string, (grad: string, where: string) => string>} */
const SAYS = {
  backward: (grad) => `adds to .grad, which is ${grad} now`,
  step: (_, where) => `moves the weight against .grad: ${where}`,
  zero_grad: () => "empties .grad",
};

/** The code; its division is a button, and the line that runs is marked. @param {OpeningData} data */
function codeOf({ code, token }, /** @type {() => void} */ press) {
  const button = h("button.av-token", { type: "button", click: press }, token);
  /** @param {string} text @returns {(string | Node)[]} */
  const withToken = (text) => {
    const [before, after] = text.split(token);
    return after === undefined ? [text] : [before, button, after];
  };
  const lines = code.map(([, ...parts]) => {
    const pieces = parts.flatMap((part) =>
      typeof part === "string" ? withToken(part) : [h(`span.av-${part[0]}`, {}, part[1])]);
    // A line that is too long goes on below, further in than it began.
    const further = `--av-in: ${textOf(parts).search(/\S|$/) + 2}ch`;
    return h("li", {}, h("code", { style: further }, ...pieces));
  });
  /** @param {number} line @param {boolean} divides */
  function draw(line, divides) {
    lines.forEach((one, i) => one.toggleAttribute("data-now", i === line));
    const title = divides ? "Press to leave the division out" : "Press to divide again";
    put(button, { "aria-pressed": divides, title });
  }
  return { el: h("ol.av-loop", {}, ...lines), draw };
}

/** `.grad`, filled part by part; dashed is the gradient of one large batch. */
function vessel() {
  const parts = [0, 1].map((i) => svg(`rect.av-fill.av-fill-${i}`, { x: 42, width: 76 }));
  const names = [0, 1].map((i) => svg(`text.av-nth.av-nth-${i}`, { x: 80 }, `${i + 1}`));
  const number = svg("text.av-grad", { x: 80, y: 192 });
  const el = svg("svg", { viewBox: "0 0 160 196", "aria-hidden": "true" }, ...parts, ...names,
    svg("path.av-glass", { d: `M42 8V${BOTTOM}H118V8` }),
    svg("path.av-level", { d: `M28 ${BOTTOM - LEVEL}H132` }), number);
  /** @param {number[]} held @param {string} grad */
  function draw(held, grad) {
    let top = BOTTOM;
    parts.forEach((part, i) => {
      const height = Math.max(held[i] ?? 0, 0) * LEVEL;
      top -= height;
      part.style.transform = `translateY(${top}px) scaleY(${height})`;
      names[i].style.transform = `translateY(${top + height / 2 + 4}px)`;
      names[i].classList.toggle("av-none", height < ROOM);
    });
    tell(number, grad);
  }
  parts.forEach((part) => put(part, { y: 0, height: 1 }));
  return { el, draw };
}

/** The loss, the way of the weight, and as a ghost the way of one large batch. @param {OpeningData["ground"]} ground */
function valley(ground) {
  const marks = ground.map(([name, at, text = ""]) => svg(name, at, text));
  const ghost = svg("polyline.av-whole");
  const end = svg("circle.av-goal", { r: 6 });
  const way = svg("polyline.av-walked");
  const ball = svg("circle.av-ball", { r: 5.5 });
  const el = svg("svg", { viewBox: "0 0 320 192", "aria-hidden": "true" }, ...marks, ghost, end, way, ball);
  /** @param {[number, number, number, string][]} stations */
  const points = (stations) => stations.map(([, x, y]) => `${x},${y}`).join(" ");
  /** @param {OpeningData["runs"][0][0]} run @param {OpeningData["runs"][0][0]} whole @param {number} e */
  function draw(run, whole, e, wrong = false) {
    const walked = run.way.filter(([place]) => place <= e);
    const [, x, y] = walked[walked.length - 1];
    put(ghost, { points: points(whole.way) });
    const [, gx, gy] = whole.way[whole.way.length - 1];
    put(end, { cx: gx, cy: gy });
    put(way, { points: points(walked) });
    ball.style.transform = `translate(${x}px, ${y}px)`;
    el.classList.toggle("av-wrong", wrong);
    return walked[walked.length - 1][3];
  }
  return { el, draw };
}

/** @param {Host} host @returns {Promise<Dispose>} */
async function opening({ model, el }) {
  const data = /** @type {OpeningData} */ ((await read(model.get("data"))).data);
  let [rate, way, e] = [data.start, DIVIDED, -1];
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const code = codeOf(data, () => {
    way = DIVIDED + UNDIVIDED - way;
    start();
  });
  const [glass, loss] = [vessel(), valley(data.ground)];
  const play = h("button.av-b-play", { type: "button", ...named("play"), click: () => (timer ? pause() : start()) });
  const scrub = range("event", () => go(Number(scrub.value) - 1), "av-scrub");
  const rates = range("learning rate", () => {
    rate = Number(rates.value);
    draw();
  }, "av-rate");
  const shown = h("output");
  const verdict = h("strong");
  const words = h("span");
  const scale = h("span");
  const say = h("p.av-says", { "aria-live": "polite" }, verdict, " ", words);
  const part = (/** @type {string} */ title, /** @type {Element} */ drawing, /** @type {string | Node} */ note) =>
    h("figure", {}, h("p.av-title", {}, title), drawing, h("figcaption", {}, note));
  el.append(h("div.av-hero", group("The division, and what it does"),
    h("div.av-panes", {},
      h("figure", {}, h("p.av-title", {}, "the loop"), code.el),
      part("w.grad", glass.el, scale),
      part("the weight, on its loss", loss.el, "dotted: the steps of one large batch")),
    say, h("div.av-keys", {}, play, scrub, h("label", {}, "learning rate ", rates, shown))));

  /** @param {number} to */
  function go(to) {
    pause();
    e = to;
    draw();
  }
  function pause() {
    clearTimeout(timer);
    timer = undefined;
    play.replaceChildren(icon("play"));
    put(play, named("play"));
  }
  function start() {
    clearTimeout(timer);
    const last = run().events.length - 1;
    if (e >= last) e = -1;
    play.replaceChildren(icon("pause"));
    put(play, named("pause"));
    const step = () => {
      e += 1;
      draw();
      timer = e < last ? setTimeout(step, DWELL) : undefined;
      if (!timer) pause();
    };
    draw();
    timer = setTimeout(step, DWELL);
  }
  const run = () => data.runs[rate][way];

  function draw() {
    const { events, from, to, fails } = run();
    const last = events.length - 1;
    e = Math.min(e, last);
    const [kind, line, held, grad, whole] = events[e] ?? ["", -1, [], "None", events[0][4]];
    tell(scale, `1, 2: the samples; dashed: one batch of both, now ${whole}`);
    const wrong = way === UNDIVIDED;
    code.draw(line, !wrong);
    glass.draw(held, grad);
    const where = loss.draw(run(), data.runs[rate][0], e, wrong);
    slide(scrub, e + 1, last + 1, kind || "start");
    slide(rates, rate, data.rates.length - 1, data.rates[rate]);
    tell(shown, data.rates[rate]);
    const twice = wrong ? "Twice the gradient." : "";
    const ends = `The loss went from ${from} to ${to}${fails ? ", and no line raised an error" : ""}.`;
    tell(verdict, e === last ? twice : kind);
    const invites = `Press play, then press ${data.token} in the code.`;
    tell(words, e < 0 ? invites : e === last ? ends : SAYS[kind](grad, where));
    el.classList.toggle("av-fails", wrong);
  }
  pause();
  draw();
  return () => clearTimeout(timer);
}

startAll("opening", opening, "what it shows in words");
