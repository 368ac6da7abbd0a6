// The word and the heads that views show when the link names none: the same in every view.

const SHORT = 60; // maximum number of words of a short text
const EARLY = 40; // the word of a longer text: visible without scrolling

// Return the number of a head in the model; a recording can contain only some of the heads.
export const getHeadNumber = (layer, head) => layer.numbers?.[head] ?? head;
export const getStateHeadNumber = (app, state) => getHeadNumber(app.attention().layers[state.layer], state.head); // of the selected head

// Return the query of a state: the one in the link, else that of the logit shown, else the last word or an early one.
export function chooseQuery(app, state) {
  if (state.q !== undefined && state.q !== null) return state.q;
  const { rows, layers } = app.attention();
  const last = layers[state.layer].queries - 1;
  if (["pull", "cut"].includes(app.settings.get(state))) return state.at ?? last; // the last layer is 0 for every other query
  const end = last - Number(app.ofTwoTexts() && last > 0); // the last token of a translation is its end token
  return app.telling(rows, last < SHORT ? end : EARLY);
}

// Return whether a text is short enough for a large font.
export const isShortText = ({ queries, keys }) => Math.max(queries, keys) <= SHORT;

// Return the heads that a state selects: "all", a list, or by default its one head.
export function getSelectedHeads(app, state) {
  const { heads } = app.attention().layers[state.layer];
  const named = state.heads === "all" ? Array.from({ length: heads }, (_, head) => head) : state.heads ? state.heads.split(",").map(Number) : [state.head];
  const found = named.filter((head) => head < heads);
  return found.length ? found : [state.head];
}

// Name the heads that a state selects, by their numbers in the model: "head 3", "mean of its 6 heads", "mean of heads 0, 2".
export function nameSelectedHeads(app, state) {
  const layer = app.attention().layers[state.layer];
  const names = getSelectedHeads(app, state).map((head) => getHeadNumber(layer, head));
  if (names.length === 1) return `head ${names[0]}`;
  return names.length === layer.heads ? `mean of its ${names.length} heads` : `mean of heads ${names.join(", ")}`;
}

// Return the changes of the link that select these heads; the first is the one of the views that show one head.
export function selectHeads(app, state, heads) {
  const count = app.attention().layers[state.layer].heads;
  if (heads.length === 1) return { head: heads[0], heads: null };
  return { head: heads.includes(state.head) ? state.head : heads[0], heads: heads.length === count ? "all" : heads.join(",") };
}
