/** How a payload travels: JSON as it stands, or compressed together with columns of bytes. */

/** @import { Column } from "./types.d.ts" */

/** @param {string} base64 */
function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/**
 * @param {any} json text of a payload, or one that was read already
 * @returns {Promise<{data: any, bytes?: Uint8Array}>}
 */
export async function read(json) {
  if (json.data) return json;
  const data = JSON.parse(json);
  if (!data.z) return { data };
  const whole = new Blob([bytesOf(data.z)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(whole).arrayBuffer());
  const end = 4 + new DataView(raw.buffer).getUint32(0, true);
  return { data: JSON.parse(new TextDecoder().decode(raw.subarray(4, end))), bytes: raw.subarray(end) };
}

/**
 * A column of norms, -1 for None: plain, or as `payload.pack` packs it, all first bytes before all second ones.
 * @param {Column} packed @param {Uint8Array} [bytes]
 */
export function column(packed, bytes) {
  if (Array.isArray(packed)) return Float64Array.from(packed, Number);
  const { at, size } = packed;
  const [high, middle, low] = [0, 1, 2].map((n) => /** @type {Uint8Array} */ (bytes).subarray(at + n * size));
  const bits = new Uint32Array(size);
  for (let i = 0; i < size; i++) bits[i] = (high[i] << 24) | (middle[i] << 16) | (low[i] << 8);
  return new Float32Array(bits.buffer);
}
