// The choice among the models of a page that has several.

import { el } from "../drawing/elements.js";

// Render the choice, or null where there is one model only; choose(name) is called when another one is selected.
export function renderModelChoice(models, choose = () => {}) {
  if (models.length < 2) return null;
  const select = el("select", { name: "model", "aria-label": "Model", onchange: () => choose(select.value) }, models.map(({ name }) => el("option", { value: name }, name)));
  return el("label", { class: "control" }, el("span", { class: "name" }, "model"), select);
}

// Return the model that a form selects, or undefined for the only one.
export const readModel = (form) => form.querySelector("[name=model]")?.value;

// Select a model in a form; without a name the first one.
export function setModel(form, name) {
  const select = form.querySelector("[name=model]");
  if (select) select.value = [...select.options].some((option) => option.value === name) ? name : select.options[0].value;
}
