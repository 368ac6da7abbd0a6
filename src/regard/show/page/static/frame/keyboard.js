// The keyboard: the keys of every view, the keys of the mounted view, the list of keys, and the search for a word.

import { el } from "../drawing/elements.js";
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
    ["/", "find a word", () => find()],
    ["?", "show this list", () => list()],
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
    const dialog = el("dialog", { "aria-label": "Keys", onclose: () => dialog.remove() },
      ...renderKeyGroup("Keys of this view", own),
      ...renderKeyGroup("Keys of every view", shared),
      ...renderKeyGroup("Mouse and touch", hands(), "span"),
      el("form", { method: "dialog", style: { marginTop: "1rem" } }, el("button", { autofocus: true }, "Close")));
    document.body.append(dialog);
    dialog.showModal();
    dialog.scrollTop = 0; // the focused button is at the end of a long list
  }

  const button = el("button", { class: "quiet", "aria-label": "Keys", title: "Keys (?)", onclick: list }, "?");
  return { button, find };
}

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc", " ": "Space" };

// Render the keys or gestures of a group; those with the same effect share a line.
function renderKeyGroup(title, pairs, tag = "kbd") {
  const lines = new Map();
  for (const [key, what] of pairs) lines.set(what, [...(lines.get(what) ?? []), key]);
  const names = (keys) => keys.flatMap((key, n) => [n ? " " : "", el(tag, {}, NAMES[key] ?? key)]);
  return lines.size ? [el("h2", {}, title), el("dl", {}, [...lines].map(([what, keys]) => [el("dt", {}, names(keys)), el("dd", {}, what)]))] : [];
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
