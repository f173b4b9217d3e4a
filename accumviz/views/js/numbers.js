/** Numbers, and how they are written. */

/** @param {number} x @param {number} low @param {number} high */
export const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

/** @param {{amount: number}[]} parts */
export const sum = (parts) => parts.reduce((whole, { amount }) => whole + amount, 0);

/** @param {number} count @param {string} noun */
export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** @param {number} size */
function scientific(size, digits = 4) {
  return size.toExponential(digits - 1).replace(/\.?0*e\+?/, "e").replace("-", "−");
}

/** @param {number} size */
function decimal(size, digits = 4) {
  const text = size.toPrecision(digits);
  return text.includes("e") ? size.toFixed(0) : String(Number(text));
}

/** Write a number as `style.number` does. @param {number} x */
export function number(x, digits = 4) {
  const size = Math.abs(x);
  const far = size && (size < 1e-3 || size >= 1e5);
  const text = size === Infinity ? "∞" : (far ? scientific : decimal)(size, digits);
  return (x < 0 ? "−" : "") + text;
}

/** Cut a long name in the middle: both ends tell it apart. @param {string} text @param {number} limit */
export function shorten(text, limit) {
  if (text.length <= limit) return text;
  return `${text.slice(0, (limit - 1) >> 1)}…${text.slice(-(limit >> 1))}`;
}
