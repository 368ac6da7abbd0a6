// The state of the page, as readable pairs after the # of its address: what a link holds, and what back and forward undo.

const NUMBERS = ["b", "layer", "head", "q", "k", "x", "y", "zoom"];
const FIRST = { view: "text", kind: "self", part: null, b: 0, layer: 0, head: 0 };

// The state that a hash says; what it leaves out is as at the start.
export function parseLink(hash) {
  const state = { ...FIRST };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (NUMBERS.includes(name) && !Number.isFinite(Number(value))) continue;
    state[name] = NUMBERS.includes(name) ? Number(value) : value;
  }
  return state;
}

// The hash of a state, the shortest that says it, with spaces and commas left readable.
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

// Goes to a state: a new entry of the history, or in place of the present one.
export function updateLink(state, { replace = false } = {}) {
  const hash = formatLink(state);
  if (hash === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash);
}
