// The switch that takes the first word, which many heads use as a sink, out of the weights, the colors and the scores.

import { el } from "../drawing/elements.js";
import { TERMS } from "./glossary.js";

export const WITHOUT_FIRST = ":rest"; // after the id of a recording in the addresses of the server

const IN_FILE = "A file holds the weights as they are. Run `regard serve` with the recording to take the first token out.";

// Return whether a state takes the first word out; what the other settings show is not a share of the attention.
export const isFirstOut = (app, state) => state.sink === "out" && !app.source.file && app.settings.get(state) === "weight";

// Render the switch.
export function renderSinkSwitch(app, state) {
  if (app.settings.get(state) !== "weight") return null;
  const reason = app.source.file ? app.inUnits(IN_FILE) : null;
  const press = () => (reason ? app.fail(reason) : app.go({ sink: isFirstOut(app, state) ? null : "out" }));
  return el("span", { class: "choice" }, el("button", { "data-control": "sink", title: reason ?? app.inUnits(TERMS["skip first token"]), "aria-label": app.inUnits("skip first token"), "aria-pressed": String(isFirstOut(app, state)), "aria-disabled": reason ? "true" : null, onclick: press }, "skip first", el("span", { class: "at-width" }, app.inUnits(" token"))));
}
