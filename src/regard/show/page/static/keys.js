// The keyboard: keys that every view shares, those of the view that stands, the list of them all, and the search for a word.

import { el } from "./el.js";
import { finder } from "./find.js";

const OWNERS = "input, textarea, select, dialog, [contenteditable], [role=slider], [role=listbox]"; // these keep their keys

export function keyboard(app, ofView) {
  const find = finder(app);
  const common = [
    ["[", "the head before", () => step(app, "head", -1)],
    ["]", "the next head", () => step(app, "head", 1)],
    [",", "the layer before", () => step(app, "layer", -1)],
    [".", "the next layer", () => step(app, "layer", 1)],
    ["/", "find a word", () => find()],
    ["?", "these keys", () => list()],
    ["Escape", "let go of what is pinned", () => app.go({ q: null, k: null })],
  ];

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest?.(OWNERS)) return;
    const found = [...ofView(), ...common].find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    found[2](event);
  });

  function list() {
    const seen = new Set();
    const all = [...ofView(), ...common].filter(([key]) => !seen.has(key) && seen.add(key));
    const dialog = el("dialog", { "aria-label": "Keys", onclose: () => dialog.remove() },
      el("h2", {}, "Keys"),
      el("dl", {}, all.map(([key, what]) => [el("dt", {}, el("kbd", {}, NAMES[key] ?? key)), el("dd", {}, what)])),
      el("form", { method: "dialog", style: { marginTop: "1rem" } }, el("button", { autofocus: true }, "Close")));
    document.body.append(dialog);
    dialog.showModal();
  }

  const button = el("button", { class: "quiet", "aria-label": "Keys", title: "Keys (?)", onclick: list }, "?");
  return { button, find };
}

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc", " ": "Space" };

// A step to the next head or layer, if there is one.
function step(app, key, by) {
  if (!app.summary()) return;
  const state = app.state();
  const { layers } = app.attention();
  const count = key === "layer" ? layers.length : layers[state.layer].heads;
  const next = state[key] + by;
  if (next >= 0 && next < count) app.go({ [key]: next });
}
