// Format numbers: with three digits on screen, in sentences and formulas as regard.show.number_format does.

// Format a number with three significant digits; a missing number is a dash.
export function formatThreeDigits(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? shortenZeros(value) : groupDigits(value, size);
  return text.replace(/^-/, "−");
}

// Format a number with three significant digits and its sign.
export const formatSigned = (value) => `${value > 0 ? "+" : ""}${formatThreeDigits(value)}`;

function groupDigits(value, size) {
  if (size >= 999.5) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return value.toPrecision(3);
}

function shortenZeros(value) {
  const [digits, power] = value.toExponential(2).split("e");
  return `${digits}e${power.replace("+", "").replace("-", "−")}`;
}

// Format a count with separated thousands.
export function formatCount(number) {
  return number.toLocaleString("en").replaceAll(",", "\u202f");
}

// Round a number up to 1, 2, 5, 10 ...
export function roundStep(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].find((digit) => digit * power >= value) * power;
}

// Format a number of tokens: "1 token", "2 000 tokens".
export const formatTokens = (number) => `${formatCount(number)} ${number === 1 ? "token" : "tokens"}`;

const NOISE = 2 ** -21; // relative error of a float32 result, as in regard.show.number_format: the last bits depend on the processor

// Format a number of a calculation with as many places as it needs, at most four.
export function formatNumber(value) {
  if (!Number.isFinite(value)) return formatInfinite(value);
  if (value !== 0 && !(incrementDigits(value) >= 1e-4 && incrementDigits(value) < 1e6)) return formatGeneral(moveFromHalf(value), 4);
  const places = [0, 1, 2, 3].find((one) => isExact(value, one)) ?? 4;
  const text = formatFixed(moveFromHalf(value, places), places);
  const short = places ? text.replace(/\.?0+$/, "") : text;
  return short === "-0" ? "0" : short;
}

// Format a number of a sentence with two places, or with two significant digits if it is below 0.1.
export function formatRounded(value) {
  if (!Number.isFinite(value) || value === 0) return formatNumber(value);
  return incrementDigits(value) >= 0.095 && incrementDigits(value) < 1e6 ? formatFixed(moveFromHalf(value, 2), 2) : formatGeneral(moveFromHalf(value), 2);
}

// Return whether a float32 result has at most `places` decimal places.
function isExact(value, places) {
  const rounded = Number(value.toFixed(places));
  return Math.abs(rounded - value) <= NOISE * Math.max(Math.abs(rounded), Math.abs(value));
}

// Return the absolute value of a number, increased by its error.
function incrementDigits(value) {
  return Math.abs(value) * (1 + NOISE);
}

// Move a number away from 0 by its error, so that a number just below half a unit of its last place always rounds up.
function moveFromHalf(value, places) {
  if (places !== undefined && isExact(value, places)) return value;
  const most = places === undefined ? Infinity : 10 ** -places / 8;
  return value + Math.sign(value) * Math.min(Math.abs(value) * NOISE, most);
}

// Format the numbers of a table alike, with the places they need, at most three, or with exponents if they do not fit.
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

// Return a text, which writes numbers as Python does, with a minus sign in place of each hyphen that means one, and −∞.
export function writeMinusSigns(text) {
  return text.replaceAll("-inf", "−∞").replace(/(?<![\p{L}\p{N}])-(?=[\d.])|(?<=\de)-(?=\d)/gu, "−").replaceAll(" - ", " − ");
}

// Format a share as a percentage.
export function formatPercent(value) {
  const hundred = 100 * value;
  if (hundred !== 0 && hundred < 0.01) return "< 0.01 %";
  return `${hundred >= 10 ? hundred.toFixed(1) : hundred.toFixed(2)} %`;
}

// Format a number with a number of places; a tie rounds to the even digit, as in Python.
function formatFixed(value, places) {
  const text = value.toFixed(places);
  const middle = Math.abs(value * 2 ** (places + 1)) % 2 === 1; // only multiples of a power of two can be an exact tie
  if (!middle || Number(text.at(-1)) % 2 === 0) return text;
  const step = value < 0 ? 10 ** -places : -(10 ** -places);
  return (Number(text) + step).toFixed(places);
}

// Format a number with a number of significant digits, as Python's format g does.
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
