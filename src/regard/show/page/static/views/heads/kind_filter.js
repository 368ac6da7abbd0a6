// The descriptions of the kinds of heads, and the controls that sort and filter heads.

import { el } from "../../drawing/elements.js";
import { TERMS } from "../../frame/glossary.js";
import { canExamine } from "./visibility_panel.js";

export const SENTENCES = {
  "previous token": "attends to the previous token",
  itself: "attends to its own token",
  duplicate: "attends to earlier occurrences of its token",
  induction: "attends to what followed its token before, and copies it",
  "prefix matching": "attends to what followed its token before",
  "first token": "attends to the first token",
  stripe: "attends to the same few tokens from everywhere",
  broad: "attends to half of its keys or more",
  local: "attends to tokens nearby",
  unclear: "no score is surely above its threshold, or several are",
};

export const EFFECT = "effect"; // the order by the sum of what is shown, if that is not the weight

// Return whether a state shows the scores of the built-in probe in place of those on the text.
export const isProbed = (app, state) => Boolean(state.probe) && !app.settings.explainModel(state);

// Render the controls: `rows` are the scores of the heads by name; `detectors` are known once all heads are scored.
export function renderHeadControls(element, app, state, { rows, detectors, whole }) {
  const { name } = app.settings.quantity(state);
  const effect = name !== "weight" && el("option", { value: EFFECT, selected: state.by === EFFECT }, `sum of ${name}`);
  const focused = document.activeElement?.getAttribute("data-control");
  const select = el("select", { "data-control": "by", disabled: !whole && !effect, onchange: () => app.go({ by: select.value || null }) },
    el("option", { value: "" }, "layer and head"), effect || null, detectors.map((one) => el("option", { value: one, selected: one === state.by }, one)));
  const chip = (kind, text) => el("button", { class: "chip", "data-control": `only ${kind}`, title: SENTENCES[kind] ?? "", "aria-pressed": String((state.only ?? "") === kind), onclick: () => app.go({ only: kind || null }) }, text);
  const toggle = () => app.go({ sight: state.sight ? null : "earlier" });
  const seen = canExamine(app.summary()) && el("button", { class: "chip", title: TERMS["Who may see whom?"], "data-control": "sight", "aria-expanded": String(Boolean(state.sight)), onclick: toggle }, "Who may see whom?");
  const reason = app.settings.explainModel(state);
  const probe = () => (reason ? app.fail(reason, element) : app.go({ probe: isProbed(app, state) ? null : 1, by: null, only: null }));
  const probed = el("button", { class: "chip", "data-control": "probe", "aria-pressed": String(isProbed(app, state)), "aria-disabled": reason ? "true" : null, title: reason ?? TERMS["Probe the model"], onclick: probe }, "Probe the model");
  element.replaceChildren(
    el("label", { class: "control" }, el("span", { class: "name" }, "sort by"), select),
    el("span", { class: "chips", role: "group", "aria-label": "Kinds of heads" }, chip("", "all"), countKinds(rows).map(([kind, count]) => chip(kind, `${kind} ${count}`))),
    probed,
    seen || "",
    seen ? el("span", { class: "note at-width" }, "The probe shows what heads do on any text; the other checks that no token sees a later one.") : "",
  );
  if (focused) element.querySelector(`[data-control="${focused}"]`)?.focus();
}

// Count the heads of each kind: [[kind, count]], the most frequent first.
function countKinds(rows) {
  const counts = new Map();
  for (const { kind } of rows.values()) if (kind) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
