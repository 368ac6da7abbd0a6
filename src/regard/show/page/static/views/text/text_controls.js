// The controls above a text: the direction of the links, and the heads; several heads show their mean.

import { el } from "../../drawing/elements.js";
import { renderChoice, getHeadNumber } from "../../frame/controls.js";

// Return the heads that a state selects.
export function getSelectedHeads(app, state) {
  const named = state.heads ? state.heads.split(",").map(Number) : [state.head];
  const found = named.filter((head) => head < app.attention().layers[state.layer].heads);
  return found.length ? found : [state.head];
}

export function renderTextControls(element, app, state) {
  const focused = document.activeElement?.getAttribute("data-control");
  element.replaceChildren(
    renderChoice(app, "way", state.way ?? "from", [["from", "what it attends to"], ["to", "what attends to it"]], "Direction of the links"),
    el("span", { class: "control", role: "group", "aria-label": "Heads; several show their mean" },
      el("span", { class: "name" }, "heads"), el("span", { class: "chips" }, renderHeadChips(app, state))),
  );
  if (focused) element.querySelector(`[data-control="${focused}"]`)?.focus();
}

// Render a chip for each head, and one for all heads.
function renderHeadChips(app, state) {
  const layer = app.attention().layers[state.layer];
  const heads = getSelectedHeads(app, state);
  const all = heads.length === layer.heads;
  const chip = (name, pressed, press) => el("button", { class: "chip numbers", "data-control": `head ${name}`, "aria-pressed": String(pressed), onclick: press });
  const each = Array.from({ length: layer.heads }, (_, head) => {
    const one = chip(head, heads.includes(head), () => app.go(toggleHead(heads, head)));
    one.append(String(getHeadNumber(layer, head)));
    return one;
  });
  const every = chip("all", all, () => app.go({ heads: all ? null : each.map((_, n) => n).join(",") }));
  every.append("all");
  return layer.heads > 1 ? [...each, every] : each;
}

// Return the changes of the link that add or remove a head; the last head is not removed.
function toggleHead(heads, head) {
  const next = heads.includes(head) ? heads.filter((one) => one !== head) : [...heads, head].sort((a, b) => a - b);
  if (!next.length) return {};
  return { head: next[0], heads: next.length === 1 ? null : next.join(",") };
}
