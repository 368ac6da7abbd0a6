// The state of the page as readable pairs after the # of its address: links contain it, and the history restores it.

const NUMBERS = ["b", "layer", "head", "q", "k", "x", "y", "zoom", "at", "token", "image", "words", "seed", "word", "chat", "mixer", "channel"];
const FIRST = { view: "text", kind: "self", part: null, b: 0, layer: 0, head: 0, show: "weight", mixer: 0, channel: 0 };

export const COLD = 0; // the temperature that a link leaves out: the likeliest token is taken

// Return a temperature as links hold it.
export const formatHeat = (temperature) => (temperature === COLD ? null : String(temperature));

// Return the state of a hash, with defaults for what it omits.
export function parseLink(hash) {
  const state = { ...FIRST };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (NUMBERS.includes(name) && !Number.isFinite(Number(value))) continue;
    state[name] = NUMBERS.includes(name) ? Number(value) : value;
  }
  return state;
}

// Return the shortest hash of a state, with readable commas and colons.
export function formatLink(state) {
  const pairs = Object.entries(state).filter(([name, value]) => name === "view" || !isDefault(value, FIRST[name]));
  const order = ["view", "r", "kind", "part", "b", "layer", "head", "q", "k"];
  const rank = ([name]) => (order.includes(name) ? order.indexOf(name) : order.length);
  const text = new URLSearchParams(pairs.sort((a, b) => rank(a) - rank(b))).toString();
  return "#" + text.replaceAll("%2C", ",").replaceAll("%3A", ":");
}

function isDefault(value, first) {
  return value === null || value === undefined || value === "" || value === first;
}

// Return a value of a state as an index below a count: a whole number, 0 if it is no number.
export function clampIndex(value, count) {
  return Math.min(Math.max(Math.trunc(Number(value)) || 0, 0), Math.max(count - 1, 0));
}

// Return the changes of the link that hold what makes a recording again: its text, the model, and how the model continued the text.
export function linkRequest({ request }) {
  const { text = null, tokens = null, temperature = COLD, seed = null, model = null, chat = false } = request ?? {};
  return { text, words: tokens, heat: formatHeat(temperature), seed, word: null, model, chat: chat ? 1 : null };
}

// Set the address to a state, as a new entry of the history or in place of the current one.
export function updateLink(state, { replace = false } = {}) {
  const hash = formatLink(state);
  if (hash === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash);
}
