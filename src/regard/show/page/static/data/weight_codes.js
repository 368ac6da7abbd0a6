// Weights as they travel: 0 is no visible entry, and a code c from 1 up is 2 ** ((c - 65535) / 2048).

export const TOP = 65535;
const STEPS = 2048;

// The weight of a code, or null where there is nothing to see.
export function decodeWeight(code) {
  return code === 0 ? null : code === 1 ? 0 : 2 ** ((code - TOP) / STEPS);
}

// The code of a weight that is visible.
export function encodeWeight(weight) {
  return weight > 0 ? Math.max(1, Math.round(TOP + STEPS * Math.log2(weight))) : 1;
}

// Codes out of bytes, little-endian on every machine.
export function readCodes(buffer) {
  if (new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) return new Uint16Array(buffer);
  const view = new DataView(buffer);
  return Uint16Array.from({ length: buffer.byteLength / 2 }, (_, n) => view.getUint16(2 * n, true));
}
