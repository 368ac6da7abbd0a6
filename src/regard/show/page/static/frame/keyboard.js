// The keyboard: the keys of every view, the keys of the mounted view, the list of keys, and the search for a word.

import { el } from "../drawing/elements.js";
import { listTerms } from "./glossary.js";
import { createSearch } from "./word_search.js";

const OWNERS = "input, textarea, select, dialog, [contenteditable], [role=slider], [role=listbox]"; // elements that handle keys themselves
const PRESSED = "a[href], button, summary, [role=button]"; // elements that Enter and Space activate
const PRESSING = ["Enter", " "];

export function createKeyboard(app, ofView, hands) {
  const find = createSearch(app);
  const common = [
    ["[", "previous head", () => stepState(app, "head", -1)],
    ["]", "next head", () => stepState(app, "head", 1)],
    [",", "previous layer", () => stepState(app, "layer", -1)],
    [".", "next layer", () => stepState(app, "layer", 1)],
    ["/", "find a token", () => find()],
    ["?", "explain the picture, list the keys", () => list()],
    ["Escape", "clear the selection", () => app.go({ q: null, k: null })],
  ];

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest?.(OWNERS) || (PRESSING.includes(event.key) && event.target.closest?.(PRESSED))) return;
    const found = [...ofView(), ...common].find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2](event);
  });

  function list() {
    const own = ofView();
    const shared = common.filter(([key]) => !own.some(([other]) => other === key));
    const dialog = el("dialog", { "aria-label": "What is seen, and keys", onclose: () => dialog.remove() },
      ...renderPicture(app),
      ...renderTerms(app),
      ...renderKeyGroup(app, "Keys of this view", own),
      ...renderKeyGroup(app, "Keys of every view", shared),
      ...renderKeyGroup(app, "Mouse and touch", hands(), "span"),
      el("form", { method: "dialog", style: { marginTop: "1rem" } }, el("button", { autofocus: true }, "Close")));
    document.body.append(dialog);
    dialog.showModal();
    dialog.scrollTop = 0; // the focused button is at the end of a long list
  }

  const button = el("button", { class: "quiet", "aria-label": "Help: what is seen, and keys", title: "What is seen, and keys (?)", onclick: list }, "?");
  return { button, find };
}

const WEIGHTS = "Attention weights say how much of each earlier token a token takes in; those of a token add up to 1.";
const TOKENS = "A token is what the model reads at a time: a word, a piece of one, or a character.";
const PICTURES = {
  type: "Each token is shaded by its weight for the selected token. At the side is the same for all tokens at once, one picture for each head: rows are the tokens that look (queries), columns those looked at (keys). The bars are the tokens that the model expects next.",
  image: "Each patch of the image is colored by its weight for the selected patch or token.",
  text: "Each token is shaded by its weight for the selected token, or with the arrow turned by how much it attends to that token. The list names the largest.",
  heads: "Each small picture is a head: rows are the tokens that look (queries), columns those looked at (keys). The cards name the clearest heads, with their score, its 95 % interval, and the number of tokens it is measured on.",
  map: "One head whole: a row for each token that looks (query), a column for each token looked at (key). The bars at the side say how spread the attention of each token is, those below how much each token receives.",
  implicit: "One head of a layer without a softmax: a row for each token whose output is computed (query), a column for each token whose value is mixed in (key). Each entry is what that value is multiplied by. It can be above or below 0, and a row need not sum to 1.",
  steps: "The computation of one head, a step at a time. At the side, how one weight came about: the numbers of the query and of the key, their products, which add up to the score, its place in the softmax, and what it adds to the new vector.",
  compare: "Two heads, texts or models, and their difference: the first has more where it is orange, the second where it is blue.",
  generate: "Each token that the model wrote, a word or a piece of one, with the tokens it looked at, those that moved it, and the likeliest alternatives.",
};

// Render what the picture of the view shows, and what a token is; those of the lectures' examples are whole words.
function renderPicture(app) {
  const { view, example } = app.state();
  const said = app.inUnits([PICTURES[view], view !== "implicit" && WEIGHTS].filter(Boolean).join(" "));
  const tokens = app.unit() === "token" && !(view === "steps" && example);
  return [el("h2", {}, "What is seen"), el("p", { class: "explained" }, tokens ? `${said} ${TOKENS}` : said)];
}

// Render the words of the view's controls, and what they mean.
const renderTerms = (app) => [el("h2", {}, "Words"), el("dl", { class: "terms" }, listTerms(app).map(([word, text]) => [el("dt", {}, word), el("dd", {}, text)]))];

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc", " ": "Space" };

// Render the keys or gestures of a group; those with the same effect share a line.
function renderKeyGroup(app, title, pairs, tag = "kbd") {
  const lines = new Map();
  for (const [key, what] of pairs) lines.set(what, [...(lines.get(what) ?? []), key]);
  const names = (keys) => keys.flatMap((key, n) => [n ? " " : "", el(tag, {}, NAMES[key] ?? key)]);
  return lines.size ? [el("h2", {}, title), el("dl", {}, [...lines].map(([what, keys]) => [el("dt", {}, names(keys)), el("dd", {}, app.inUnits(what))]))] : [];
}

// Go to the next or previous head or layer, if there is one.
function stepState(app, key, by) {
  if (!app.summary()) return;
  const state = app.state();
  const { layers } = app.attention();
  const count = key === "layer" ? layers.length : layers[state.layer].heads;
  const next = state[key] + by;
  if (next >= 0 && next < count) app.go({ [key]: next, ...(key === "head" && { heads: null }) });
}
