// The controls that views share: attention, batch row, layer and head; mean or max; log or linear colors.

import { TILE } from "../data/tile_cache.js";
import { chooseScaleName } from "../drawing/color.js";
import { el } from "../drawing/elements.js";
import { TERMS } from "./glossary.js";
import { renderOffButton } from "./heads_off.js";
import { chooseImplicitLayer, isPooled } from "./implicit_controls.js";
import { countImageRows, countWindows, findImageRow } from "./image_rows.js";
import { getHeadNumber } from "./selected_word.js";
import { renderSinkSwitch } from "./sink_switch.js";
import { askQuestion, renderSettingSwitch, renderTargetChoice } from "./setting_switch.js";

// Return the attention that a state names, or the first of the recording.
export function findAttention(summary, state) {
  const all = summary.attentions;
  return all.find((one) => one.kind === state.kind && one.part === (state.part ?? one.part)) ?? all[0];
}

// Return whether an attention is from one text to another, such as from a translation to its source.
export const isCrossText = (summary, attention) => attention?.kind === "cross" && "source" in summary.words;

// Return the initial place in a recording: cross attention if it has any, all heads, and the middle layer, because the first
// layers attend mostly to neighbors.
export function makeInitialState(summary) {
  if (!summary.attentions.length) return {};
  const seeing = summary.attentions.findLast((one) => one.layers.some(({ grids }) => grids)); // the words of a text that has images
  const { kind, part, layers } = summary.attentions.find((one) => isCrossText(summary, one)) ?? seeing ?? summary.attentions[0];
  const placed = layers.findLastIndex(({ grids }) => grids); // what the last layer looks at is clearest in an image
  const layer = placed < 0 ? Math.floor(layers.length / 2) : placed;
  const { heads } = layers[layer];
  return { kind, part: summary.attentions.length > 1 ? part : null, layer, head: 0, heads: heads > 1 ? "all" : null };
}

// Render the controls of a view; the focused control keeps the focus.
export function renderControls(line, view, app, state) {
  const focused = document.activeElement?.getAttribute("data-control");
  const asked = typeof view.bar === "function" ? view.bar(state, app) : view.bar; // some views choose their controls by the state
  const isOther = app && asked?.includes("show") && app.settings.get(state) !== "weight";
  const wanted = app ? (asked ?? []).filter((name) => !(isOther && name === "scale")) : []; // the scales of the other settings are linear
  const controls = wanted.map((name) => CONTROLS[name](app, state)).filter(Boolean);
  const told = [...(app?.summary()?.notes ?? []), ...(app?.summary()?.missed ?? [])];
  const notes = told.length > 0 && el("details", { class: "told" }, el("summary", {}, told.length === 1 ? "1 note" : `${told.length} notes`), el("div", {}, told.map((text) => el("p", {}, text))));
  line.replaceChildren(...[el("h1", { class: "question" }, isOther && !view.keepsQuestion ? askQuestion(app, state) : app?.inUnits(view.question) ?? view.question), notes, ...controls].filter(Boolean));
  if (focused) line.querySelector(`[data-control="${focused}"]`)?.focus();
}

const MEANT = {
  attention: "The kind of attention: from a text to itself, or to another text",
  text: "One of the texts of the batch",
  layer: TERMS.layer,
  image: "One of the images",
  head: TERMS.head,
};

const CONTROLS = {
  attention(app) {
    const all = app.summary().attentions;
    if (all.length < 2) return null;
    const at = all.indexOf(app.attention());
    const options = all.map((one, n) => el("option", { value: n, selected: n === at }, [one.part, one.kind].filter(Boolean).join(" ")));
    const select = el("select", { "data-control": "attention", "aria-label": "Attention", onchange: () => {
      const { kind, part } = all[select.value];
      app.go({ kind, part, layer: 0, head: 0, q: null, k: null, x: null, y: null, zoom: null });
    } }, options);
    return renderControl("attention", select);
  },
  batch: (app, state) => (app.summary().batch < 2 ? null : renderStepper(app, "text", "b", state.b, listNumbers(app.summary().batch))),
  layer(app, state) {
    return renderStepper(app, "layer", "layer", state.layer, app.attention().layers.map((_, n) => String(n)));
  },
  head(app, state) {
    const layer = app.attention().layers[state.layer];
    return renderStepper(app, "head", "head", state.head, Array.from({ length: layer.heads }, (_, head) => String(getHeadNumber(layer, head))));
  },
  image(app, state) {
    const count = app.attention().layers[state.layer].grids?.length ?? 1;
    return count < 2 ? null : renderStepper(app, "image", "image", Math.min(state.image ?? 0, count - 1), listNumbers(count));
  },
  row(app, state) {
    const [summary, layer] = [app.summary(), app.attention().layers[state.layer]];
    const count = countImageRows(summary, layer);
    const go = (row) => app.go({ b: row * countWindows(summary, layer) });
    const name = layer.grids?.length > 1 ? "text" : "image";
    return count < 2 ? null : renderStepper(app, name, "b", findImageRow(summary, layer, state), listNumbers(count), go);
  },
  how: (app, state) => getLongestAxis(app, state) > TILE && renderChoice(app, "how", state.how ?? "mean", [["mean", "mean"], ["max", "max"]], "Value of a pixel that covers many weights", TERMS["mean, max"]),
  implicitText(app, state) {
    const { batch } = chooseImplicitLayer(app.summary(), state);
    return batch < 2 ? null : renderStepper(app, "text", "b", state.b, listNumbers(batch));
  },
  channel: (app, state) => renderStepper(app, "head", "channel", state.channel, listNumbers(chooseImplicitLayer(app.summary(), state).heads)),
  pooling: (app, state) => isPooled(chooseImplicitLayer(app.summary(), state)) && renderChoice(app, "how", state.how ?? "mean", [["mean", "mean"], ["max", "largest"]], "Value of a pixel that covers many entries", TERMS["mean, largest"]),
  off: renderOffButton,
  show: renderSettingSwitch,
  sink: renderSinkSwitch,
  target: renderTargetChoice,
  scale(app, state) {
    const layer = state.view === "implicit" ? chooseImplicitLayer(app.summary(), state) : app.attention()?.layers[state.layer];
    const keys = layer?.keys ?? 1;
    return renderChoice(app, "scale", chooseScaleName(state, keys), [["log", "log"], ["linear", "linear"]], "Color scale", TERMS["log, linear"]);
  },
};

// Return the longer side of the matrix; a matrix of a single tile has a pixel for every weight, so nothing is pooled.
const getLongestAxis = (app, state) => Math.max(app.attention().layers[state.layer].queries, app.attention().layers[state.layer].keys);
const listNumbers = (count) => Array.from({ length: count }, (_, n) => String(n));

function renderControl(name, ...children) {
  return el("label", { class: "control", title: MEANT[name] }, el("span", { class: "name" }, name), ...children);
}

// Render a list of numbers with a button on either side.
function renderStepper(app, name, key, value, options, go = (next) => app.go({ [key]: next, ...(key === "head" && { heads: null }) })) {
  const select = el("select", { "data-control": key, "aria-label": name, class: "numbers", onchange: () => go(Number(select.value)) },
    options.map((text, n) => el("option", { value: n, selected: n === value }, text)));
  const step = (by, sign, said) => el("button", { "data-control": `${key}${by}`, "aria-label": `${said} ${name}`, disabled: !(value + by in options), onclick: () => go(value + by) }, sign);
  return el("span", { class: "control", title: MEANT[name] }, el("span", { class: "name" }, name), el("span", { class: "stepper" }, step(-1, "‹", "previous"), select, step(1, "›", "next")));
}

// Render a choice among a few options as a row of buttons.
export function renderChoice(app, key, value, options, label, title = label) {
  return el("span", { class: "choice", role: "group", "aria-label": label, title }, options.map(([name, text]) =>
    el("button", { "data-control": `${key} ${name}`, "aria-pressed": String(name === value), onclick: () => app.go({ [key]: name }) }, text)));
}
