// The heads that are switched off when the model predicts the next word; the link lists them: off=3.1,3.4.

import { el } from "../drawing/elements.js";
import { TERMS } from "./glossary.js";
import { getHeadNumber, getSelectedHeads } from "./selected_word.js";

// Return the heads that a state switches off, as "layer.head".
export const listHeadsOff = ({ off }) => (off ?? "").split(",").filter((one) => /^\d+\.\d+$/.test(one));

// Return the changes of the link that switch heads of a layer off, or on again.
export function switchHeads(state, layer, heads, isOff) {
  const others = listHeadsOff(state).filter((one) => !heads.some((head) => one === `${layer}.${head}`));
  const off = isOff ? [...others, ...heads.map((head) => `${layer}.${head}`)] : others;
  return { off: off.join() || null };
}

// Return the changes of the link that switch off all heads of a layer but one.
export function keepOneHead(app, state, layer, head) {
  const { heads } = app.attention().layers[layer];
  const others = Array.from({ length: heads }, (_, n) => n).filter((n) => n !== head);
  return switchHeads({ off: switchHeads(state, layer, [head], false).off }, layer, others, true);
}

// Return whether all heads that are selected are off.
export const isSelectionOff = (app, state) => getSelectedHeads(app, state).every((head) => listHeadsOff(state).includes(`${state.layer}.${head}`));

// Name heads "layer.head" by their numbers in the model.
export function nameHeads(app, heads) {
  const { layers } = app.attention();
  const names = heads.map((one) => one.split(".").map(Number)).filter(([layer]) => layer < layers.length).map(([layer, head]) => `${layer}.${getHeadNumber(layers[layer], head)}`);
  return `${names.length === 1 ? "head" : "heads"} ${names.join(", ")}`;
}

// Render the button that switches the selected heads off and shows the next words in Type; without a model it says why not.
export function renderOffButton(app, state) {
  const reason = app.settings.explainModel(state);
  const press = () => (reason ? app.fail(reason) : app.go({ view: "type", ...switchHeads(state, state.layer, getSelectedHeads(app, state), true) }));
  return el("button", { "data-control": "off", "aria-disabled": reason ? "true" : null, title: reason ?? TERMS["head off"], "aria-label": "Switch this head off", onclick: press }, "head off");
}
