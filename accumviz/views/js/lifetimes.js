/** What became of each contribution, as Python says it: nothing here decides what is live, or how much of it. */

/**
 * @typedef {object} Flow  as Python writes it
 * @property {number[]} runs
 * @property {[number, number | null, number?][]} by  what scaled it: event, factor (null: unknown), an average's
 *
 * @typedef {object} Lifetimes  per contribution of a row, the oldest first
 * @property {number[]} born  the event that made it
 * @property {Int32Array} erased  the event that removed it from `.grad`
 * @property {Int32Array} consumed  the first step that used it
 * @property {Int32Array} until  when the last of it and all before it is erased: beyond, no search is needed
 * @property {Flow["by"]} by
 */

export const NEVER = 2 ** 31 - 1;
/** No step used it, and yet it is not lost: a collective handed it on. */
const HANDED_ON = NEVER - 1;

/**
 * Read `payload.flow`: runs of how many contributions share a fate, and after how many events, counted from the last
 * of them, they are erased (0: never) and consumed (0: never, -1: handed on).
 * @param {Flow} flow @param {ArrayLike<number>} norms contributions by event, below 0 for none
 * @returns {Lifetimes}
 */
export function decode({ runs, by }, norms) {
  const born = Array.from(norms, (_, e) => e).filter((e) => !(norms[e] < 0));
  const [erased, consumed, until] = [1, 2, 3].map(() => new Int32Array(born.length).fill(NEVER));
  for (let i = 0, at = 0; i < runs.length; i += 3) {
    const [count, gone, used] = runs.slice(i, i + 3);
    const last = born[at + count - 1];
    if (gone) erased.fill(last + gone, at, at + count);
    if (used) consumed.fill(used > 0 ? last + used : HANDED_ON, at, at + count);
    at += count;
  }
  erased.forEach((end, k) => { until[k] = Math.max(until[k - 1] ?? 0, end); });
  return { born, erased, consumed, until, by };
}

/** How many of the ascending numbers are at most `limit`. @param {number[]} numbers @param {number} limit */
export function countUpTo(numbers, limit) {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The places of the contributions live after an event, the oldest first. @param {Lifetimes} row @param {number} e */
export function live({ born, erased, until }, e) {
  const found = [];
  for (let k = countUpTo(born, e) - 1; k >= 0 && until[k] > e; k--) if (erased[k] > e) found.push(k);
  return found.reverse();
}

/**
 * The events whose contributions an event erased before any step used them.
 * @param {Lifetimes} row @param {number} e
 */
export function lost(row, e) {
  const { born, erased, consumed } = row;
  const gone = live(row, e - 1).filter((k) => erased[k] === e && consumed[k] === NEVER);
  return gone.map((k) => born[k]);
}
