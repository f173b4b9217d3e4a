/** Many parameters or events on a timeline: a heat map, as `payload.py` codes it. */

/** @import { Geometry } from "./geometry.js" */
/** @import { Ledger } from "./ledger.js" */
/** @import { Inks, Pen } from "./pen.js" */

const LEVELS = 30;
/** How opaque the weakest contribution is. */
const FAINTEST = 0.46;
/** Nothing, a `.grad` without a contribution, a number that is not finite. */
const FIXED_ALPHA = [0, 33, 255];

/** @param {string} color as #rrggbb */
const channels = (color) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));

/**
 * The colour of a pixel's code.
 * @param {number} code @param {number[][]} colors of the labels @param {number[]} ink
 */
export function pixel(code, colors, ink) {
  if (code < FIXED_ALPHA.length) return [...[[0, 0, 0], [127, 127, 127], ink][code], FIXED_ALPHA[code]];
  const level = code - FIXED_ALPHA.length;
  return [...colors[Math.floor(level / LEVELS)], 255 * (FAINTEST + (1 - FAINTEST) * (level % LEVELS) / (LEVELS - 1))];
}

/** @param {Pen} pen @param {Inks} inks @param {Ledger} ledger @param {Geometry} place */
export function drawHeat({ context }, inks, ledger, { left, top, column, lane }) {
  const { heat } = ledger.data;
  const { count, length } = ledger;
  if (!heat || !count) return;
  const ink = (inks.text.match(/[\d.]+/g) ?? []).slice(0, 3).map(Number);
  const colors = [...ledger.colors.values(), ["#0072B2"]].map(([color]) => channels(color));
  const pixels = new ImageData(heat.w, count);
  for (let i = 0; i < heat.w * count; i++) pixels.data.set(pixel(heat.px[i], colors, ink), 4 * i);
  const small = new OffscreenCanvas(heat.w, count);
  small.getContext("2d")?.putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = column * length < heat.w;
  context.drawImage(small, left, top, column * length, lane * count);
}
