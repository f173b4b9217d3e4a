/** How a payload travels: JSON as it stands, or compressed; of several runs, what they have in common once. */

/** @param {string} base64 */
function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/**
 * @param {any} json text of a payload, or one that was read already
 * @returns {Promise<{data: any}>}
 */
export async function read(json) {
  if (json.data) return json;
  const data = JSON.parse(json);
  if (!data.z) return { data };
  const whole = new Blob([bytesOf(data.z)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return { data: await new Response(whole).json() };
}

/**
 * A run, of which a row says for each part which of the different ones is its own (-1: it has none).
 * @param {Record<string, unknown[]>} parts @param {number[]} row
 */
export function together(parts, row) {
  /** @type {any} */
  const whole = {};
  Object.entries(parts).forEach(([name, found], i) => {
    if (row[i] < 0) return;
    const [first, second] = name.split(".");
    if (second) (whole[first] ??= {})[second] = found[row[i]];
    else whole[first] = found[row[i]];
  });
  return whole;
}
