/** A GAN's pipes: three taps change what flows; beside them the samples that a setting trains, round by round. */

/** @import { Dispose, Host } from "../../views/js/types.d.ts" */
/** @import { PlumbingData } from "./types.d.ts" */

import { put, slide, tell } from "../../views/js/dom.js";
import { read } from "../../views/js/packed.js";
import { startAll } from "../../views/js/page.js";

/** How long the samples take from one recorded round to the next. */
const STEP = 160;

/** @param {Host} host @returns {Promise<Dispose>} */
async function plumbing({ model, el }) {
  const { runs, rounds, games } = /** @type {PlumbingData} */ ((await read(model.get("data"))).data);
  const root = /** @type {HTMLElement} */ (el.parentElement);
  /** @param {string} which */
  const all = (which) => /** @type {SVGElement[]} */ ([...root.querySelectorAll(which)]);
  /** @param {string} which */
  const inputs = (which) => /** @type {HTMLInputElement[]} */ ([...root.querySelectorAll(`${which} input`)]);
  const [pipes, levels, numbers] = [all(".av-pipe"), all(".av-level"), all(".av-number")];
  const [valves, dots, taps] = [all(".av-valve"), all(".av-dot"), inputs(".av-taps")];
  const [[says], [shown], [slider]] = [all(".av-says"), all("output"), inputs(".av-ring")];
  const last = rounds.length - 1;
  let { game } = runs[0];
  let timer = 0;
  const stop = () => window.clearInterval(timer);

  /** @param {number} at */
  function show(at) {
    slide(slider, at, last, `round ${rounds[at]}`);
    tell(shown, `${rounds[at]}`);
    games[game][at].forEach(([x, y], i) => { dots[i].style.transform = `translate(${x}px,${y}px)`; });
  }

  function play() {
    let at = matchMedia("(prefers-reduced-motion: reduce)").matches ? last : 0;
    stop();
    show(at);
    timer = window.setInterval(() => at < last ? show(++at) : stop(), STEP);
  }

  function draw() {
    const run = runs[taps.reduce((sum, { checked }) => 2 * sum + Number(checked), 0)];
    tell(says, run.says);
    run.pipes.forEach((width, i) => put(pipes[i], { "stroke-width": width }));
    run.levels.forEach((part, i) => {
      levels[i].style.transform = `scaleY(${part})`;
      tell(numbers[i], run.numbers[i]);
      numbers[i].classList.toggle("av-some", part > 0);
    });
    valves.forEach((valve, i) => valve.classList.toggle("av-on", taps[i].checked));
    if (run.game === game) return;
    game = run.game;
    play();
  }

  taps.forEach((tap, i) => {
    tap.addEventListener("input", draw);
    valves[i].addEventListener("click", () => tap.click());
  });
  slider.addEventListener("input", () => {
    stop();
    show(Number(slider.value));
  });
  return stop;
}

startAll("plumbing", plumbing, "the picture, and what it shows in words");
