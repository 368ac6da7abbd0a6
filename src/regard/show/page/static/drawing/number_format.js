// Numbers as people read them: on screen with three digits, in sentences and formulas as regard.show.number_format writes them.

// A number for the screen: three significant digits, those that are not there as a dash.
export function formatThreeDigits(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? shortenZeros(value) : groupDigits(value, size);
  return text.replace(/^-/, "−");
}

function groupDigits(value, size) {
  if (size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return value.toPrecision(3);
}

function shortenZeros(value) {
  const [digits, power] = value.toExponential(2).split("e");
  return `${digits}e${power.replace("+", "").replace("-", "−")}`;
}

// A count with its thousands apart.
export function formatCount(number) {
  return number.toLocaleString("en").replaceAll(",", "\u202f");
}

const NOISE = 2 ** -21; // of a result of float32, as in regard.show.number_format: the last bits differ from processor to processor

// A number of a calculation, to four places and no more than it needs.
export function formatNumber(value) {
  if (!Number.isFinite(value)) return formatInfinite(value);
  if (value !== 0 && !(incrementDigits(value) >= 1e-4 && incrementDigits(value) < 1e6)) return formatGeneral(moveFromHalf(value), 4);
  const places = [0, 1, 2, 3].find((one) => isExact(value, one)) ?? 4;
  const text = formatFixed(moveFromHalf(value, places), places);
  const short = places ? text.replace(/\.?0+$/, "") : text;
  return short === "-0" ? "0" : short;
}

// A number of a sentence: two places, or two digits where it is smaller than that.
export function formatRounded(value) {
  if (!Number.isFinite(value) || value === 0) return formatNumber(value);
  return incrementDigits(value) >= 0.095 && incrementDigits(value) < 1e6 ? formatFixed(moveFromHalf(value, 2), 2) : formatGeneral(moveFromHalf(value), 2);
}

// Return whether a result of float32 is a number of so many places.
function isExact(value, places) {
  const rounded = Number(value.toFixed(places));
  return Math.abs(rounded - value) <= NOISE * Math.max(Math.abs(rounded), Math.abs(value));
}

// The size of a number, increased by its error.
function incrementDigits(value) {
  return Math.abs(value) * (1 + NOISE);
}

// A number moved away from 0 by its error, so that one just below half a unit of its last place is rounded up everywhere.
function moveFromHalf(value, places) {
  if (places !== undefined && isExact(value, places)) return value;
  const most = places === undefined ? Infinity : 10 ** -places / 8;
  return value + Math.sign(value) * Math.min(Math.abs(value) * NOISE, most);
}

// The numbers of one table in one format: the places they need, three at most; exponents where three would say nothing.
export function alignNumbers(table) {
  const sizes = table.flat().filter((value) => Number.isFinite(value) && value !== 0).map(Math.abs);
  const greatest = Math.max(...sizes, 0);
  if (greatest >= 1e6 || (greatest > 0 && greatest < 5e-3)) return table.map((row) => row.map((value) => formatText(value, (one) => formatExponent(one.toExponential(2)))));
  const most = greatest < 100 ? 3 : greatest < 1000 ? 2 : 1;
  const exact = (places) => sizes.every((size) => Math.abs(size - Number(size.toFixed(places))) <= 2e-7 * size);
  const needed = [0, 1, 2].find((places) => places < most && exact(places)) ?? most;
  return table.map((row) => row.map((value) => formatText(value, (one) => one.toFixed(needed))));
}

function formatText(value, write) {
  if (!Number.isFinite(value)) return formatInfinite(value).replace("inf", "∞").replace("-", "−");
  const written = value === 0 ? "0" : write(value);
  return (Number(written) === 0 ? written.replace("-", "") : written).replaceAll("-", "−");
}

// A share as a percentage of two or three digits.
export function formatPercent(value) {
  const hundred = 100 * value;
  if (hundred !== 0 && hundred < 0.01) return "< 0.01 %";
  return `${hundred >= 10 ? hundred.toFixed(1) : hundred.toFixed(2)} %`;
}

// So many places; what lies in the middle goes to the even digit, as in Python.
function formatFixed(value, places) {
  const text = value.toFixed(places);
  const middle = Math.abs(value * 2 ** (places + 1)) % 2 === 1; // only halves of a power of two lie exactly there
  if (!middle || Number(text.at(-1)) % 2 === 0) return text;
  const step = value < 0 ? 10 ** -places : -(10 ** -places);
  return (Number(text) + step).toFixed(places);
}

// So many significant digits, as Python's format g.
function formatGeneral(value, digits) {
  const power = Number(value.toExponential(digits - 1).split("e")[1]);
  if (power < -4 || power >= digits) return formatExponent(value.toExponential(digits - 1).replace(/\.?0+e/, "e"));
  const text = value.toFixed(digits - 1 - power);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function formatExponent(text) {
  return text.replace(/e([+-])(\d)$/, "e$10$2");
}

function formatInfinite(value) {
  return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
}
