/** What a reader may answer, and whether it is right: the rule of book/predict.py. */

const NUMBER = "([-+]?(?:\\d+\\.?\\d*|\\.\\d+)(?:e[-+]?\\d+)?)";
const FRACTION = new RegExp(`^${NUMBER}(?:/${NUMBER})?$`);

/** @param {string} text */
function tidied(text) {
  return text.trim().toLowerCase()
    .replace(/[−–—]/g, "-")
    .replace(/\s*[/⁄∕]\s*/, "/")
    .replace(/^([-+])\s+/, "$1");
}

/**
 * A number, None as null, and undefined for anything else.
 * @param {string} text @returns {number | null | undefined}
 */
export function parse(text) {
  const tidy = tidied(text);
  if (tidy === "none") return null;
  if (tidy === "nan") return NaN;
  if (/^[-+]?(inf|infinity|∞)$/.test(tidy)) return tidy[0] === "-" ? -Infinity : Infinity;
  const match = FRACTION.exec(tidy);
  const value = match ? Number(match[1]) / Number(match[2] ?? 1) : NaN;
  return Number.isFinite(value) ? value : undefined;
}

/** @param {unknown} said @param {unknown} answer @param {number} tolerance */
export function same(said, answer, tolerance) {
  if (typeof said !== "number" || typeof answer !== "number") return Object.is(said, answer);
  if (!Number.isFinite(said) || !Number.isFinite(answer)) return Object.is(said, answer);
  return answer === 0 ? Math.abs(said) <= 1e-9 : Math.abs(said - answer) <= (tolerance + 1e-12) * Math.abs(answer);
}

/**
 * What lies behind a wrong number for which nobody wrote a reason ("": nothing that we know).
 * @param {number | null | undefined} said @param {number | null | undefined} right @param {number} tolerance
 */
export function usualReason(said, right, tolerance) {
  if (right === null && said === 0) return "None is not 0: nothing was there.";
  if (right === 0 && said === null) return "0 is not None: a value was there.";
  if (right && typeof said === "number" && same(-said, right, tolerance)) return "The size is right, the sign is not.";
  return "";
}
