// The controls above a text: the direction of the links, and the heads; several heads show their mean.

import { el } from "../../drawing/elements.js";
import { renderChoice } from "../../frame/controls.js";
import { getHeadNumber, getSelectedHeads, selectHeads } from "../../frame/selected_word.js";

export function renderTextControls(element, app, state) {
  const focused = document.activeElement?.getAttribute("data-control");
  element.replaceChildren(
    renderChoice(app, "way", state.way ?? "from", [["from", "what it attends to"], ["to", "what attends to it"]], "Direction of the links"),
    renderHeads(app, state),
  );
  if (focused) element.querySelector(`[data-control="${focused}"]`)?.focus();
}

// Render the choice of heads, unless it is without meaning, after other controls.
export function renderHeadChoice(element, app, state, others, hasHeads) {
  const focused = document.activeElement?.getAttribute("data-control");
  element.replaceChildren(...others, ...(hasHeads ? [renderHeads(app, state)] : []));
  if (focused) element.querySelector(`[data-control="${focused}"]`)?.focus();
}

const renderHeads = (app, state) => el("span", { class: "control", role: "group", "aria-label": "Heads; several show their mean" },
  el("span", { class: "name" }, "heads"), el("span", { class: "chips" }, renderHeadChips(app, state)));

// Render a chip for each head, and one for all heads.
function renderHeadChips(app, state) {
  const layer = app.attention().layers[state.layer];
  const heads = getSelectedHeads(app, state);
  const all = heads.length === layer.heads;
  const chip = (name, pressed, press) => el("button", { class: "chip numbers", "data-control": `head ${name}`, "aria-pressed": String(pressed), onclick: press });
  const each = Array.from({ length: layer.heads }, (_, head) => {
    const one = chip(head, heads.includes(head), () => app.go(toggleHead(app, state, heads, head)));
    one.append(String(getHeadNumber(layer, head)));
    return one;
  });
  const every = chip("all", all, () => app.go({ heads: all ? null : "all" }));
  every.append("all");
  return layer.heads > 1 ? [...each, every] : each;
}

// Return the changes of the link that add or remove a head; the last head is not removed.
function toggleHead(app, state, heads, head) {
  const next = heads.includes(head) ? heads.filter((one) => one !== head) : [...heads, head].sort((a, b) => a - b);
  return next.length ? selectHeads(app, state, next) : {};
}
