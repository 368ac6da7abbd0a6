// Weights as they travel: 0 is no visible entry, and a code c from 1 up is 2 ** ((c - 65535) / 2048).

export const TOP = 65535;
const STEPS = 2048;

// The weight of a code, or null where there is nothing to see.
export function weight(code) {
  return code === 0 ? null : code === 1 ? 0 : 2 ** ((code - TOP) / STEPS);
}

// The code of a weight that is visible.
export function code(weight) {
  return weight > 0 ? Math.max(1, Math.round(TOP + STEPS * Math.log2(weight))) : 1;
}

// Codes out of bytes, little-endian on every machine.
export function codes(buffer) {
  if (new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) return new Uint16Array(buffer);
  const view = new DataView(buffer);
  return Uint16Array.from({ length: buffer.byteLength / 2 }, (_, n) => view.getUint16(2 * n, true));
}

// A number for the screen: three significant digits, those that are not there as a dash.
export function three(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? short(value) : grouped(value, size);
  return text.replace(/^-/, "−");
}

function grouped(value, size) {
  if (size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u2009");
  return value.toPrecision(3);
}

function short(value) {
  const [digits, power] = value.toExponential(2).split("e");
  return `${digits}e${power.replace("+", "").replace("-", "−")}`;
}

// A count with its thousands apart.
export function count(number) {
  return number.toLocaleString("en").replaceAll(",", "\u2009");
}
