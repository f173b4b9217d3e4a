/** What stands above the panes: previous, play, next, the scrubber, a link to the moment, and the event in words. */

/** @import { Ledger } from "./ledger.js" */
/** @import { At } from "./types.d.ts" */

import { button, h, icon, range, slide } from "./dom.js";

/** @param {{ledger: Ledger, move: (by: number) => void, toggle: () => void, scrub: (e: number) => void}} app */
export function controls({ ledger, move, toggle, scrub }) {
  const slider = range("event", () => scrub(Number(slider.value)), "av-scrub");
  const count = h("span.av-count");
  const kind = h("strong.av-kind");
  const words = h("span");
  const say = h("p.av-say", { "aria-live": "polite" }, kind, words);
  const play = button("play", "play", toggle);
  const link = h("a.av-b", { "aria-label": "link to this moment" }, "#");
  link.hidden = location.protocol === "about:"; // nothing can link into a frame without an address
  const back = button("back", "previous event", () => move(-1));
  const next = button("next", "next event", () => move(1));
  const bar = h("div.av-top", {}, back, play, next, slider, count, link);

  /** @param {boolean} on */
  function showPlaying(on) {
    const face = on ? "pause" : "play";
    play.replaceChildren(icon(face));
    play.title = face;
    play.setAttribute("aria-label", face);
    say.setAttribute("aria-live", on ? "off" : "polite");
  }
  /** @param {At} state @param {string} told @param {string} address */
  function draw({ e }, told, address) {
    words.textContent = told;
    if (!ledger.length) return;
    slide(slider, e, ledger.length - 1, ledger.head(e));
    count.textContent = `${(e + 1).toLocaleString("en")} / ${ledger.length.toLocaleString("en")}`;
    kind.textContent = ledger.kinds[e];
    kind.style.setProperty("--av-kind", ledger.kindColor(e));
    link.href = address;
  }
  return { bar, say, play, showPlaying, draw };
}
