/** Where a timeline's columns (events) and lanes (parameters) stand, in CSS pixels. */

import { clamp } from "./numbers.js";

/** Bars are drawn in columns at least this wide. */
const NARROWEST = 18;

/**
 * @typedef {object} Geometry
 * @property {number} width
 * @property {number} left  where the first column begins
 * @property {number} column  width of one event
 * @property {boolean} bars  bars, or a heat map
 * @property {boolean} words  whether headings fit beside each other, or stand on end
 * @property {boolean} ruled  whether events have lines of their own
 * @property {number} top
 * @property {number} lane  height of one parameter
 * @property {number} bottom
 * @property {number} height
 */

/**
 * @param {number} width @param {number} events @param {number} parameters
 * @param {number} letters of the longest name @param {boolean} saved whether saved bytes stand below
 * @param {{sizes?: number[], lane: number}} all  of the runs that may come to stand here, all as tall as the tallest:
 *   how many events they have; and how tall a lane of bars is (0: too many parameters)
 * @returns {Geometry}
 */
export function geometry(width, events, parameters, letters, saved, { sizes = [], lane: barred }) {
  const left = clamp(14 + 6.8 * Math.max(5, letters), 52, clamp(0.38 * width, 92, 172));
  const of = (/** @type {number} */ events) => {
    const column = Math.min((width - left - 2) / events, 112);
    const bars = barred > 0 && column >= NARROWEST;
    const words = column >= 74;
    const top = column < 13 ? 6 : words ? 38 : 94;
    const lane = bars ? barred : clamp(Math.floor(260 / (parameters || 1)), 2, 22);
    return { column, bars, words, top, bottom: top + lane * parameters };
  };
  const place = of(events);
  const bottom = Math.max(place.bottom, ...sizes.map((size) => of(size).bottom));
  const lane = (bottom - place.top) / (parameters || 1);
  return { ...place, width, left, ruled: place.column >= 3, lane, bottom, height: bottom + (saved ? 38 : 4) };
}

/** How wide the bars of a column are. @param {number} column */
export const barWidth = (column) => Math.min(column * 0.62, 46);
