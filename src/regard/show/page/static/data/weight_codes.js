// Codes of weights: 0 is a hidden entry, and a code c from 1 up is the weight 2 ** ((c - 65535) / 2048).

export const HIDDEN = 0;
export const TOP = 65535;
const STEPS = 2048;

// Return the weight of a code, or null for a hidden entry.
export function decodeWeight(code) {
  return code === HIDDEN ? null : code === 1 ? 0 : 2 ** ((code - TOP) / STEPS);
}

// Return the weight of a code with the four digits that it has, NaN for a hidden entry.
export const roundCode = (code) => (code === HIDDEN ? NaN : Number(decodeWeight(code).toPrecision(4)));

// Return the code of a visible weight.
export function encodeWeight(weight) {
  return weight > 0 ? Math.max(1, Math.round(TOP + STEPS * Math.log2(weight))) : 1;
}

// Decode little-endian bytes to 32-bit numbers on any machine.
export function readNumbers(buffer) {
  const view = new DataView(buffer);
  return Float32Array.from({ length: buffer.byteLength / 4 }, (_, n) => view.getFloat32(4 * n, true));
}

// Decode little-endian bytes to codes on any machine.
export function readCodes(buffer) {
  if (new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) return new Uint16Array(buffer);
  const view = new DataView(buffer);
  return Uint16Array.from({ length: buffer.byteLength / 2 }, (_, n) => view.getUint16(2 * n, true));
}
