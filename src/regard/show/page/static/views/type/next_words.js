// The tokens that are predicted after the marked one, in Type: their probability, and beside it that without heads that are off.

import { el } from "../../drawing/elements.js";
import { formatPercent } from "../../drawing/number_format.js";
import { quoteWord, renderWord } from "../../drawing/words.js";
import { isSelectionOff, keepOneHead, listHeadsOff, nameHeads, switchHeads } from "../../frame/heads_off.js";
import { getSelectedHeads } from "../../frame/selected_word.js";

// Create the list of words with the switches of the heads; append(word) continues the text.
export function createNextWords(app, append) {
  const list = el("ol", { class: "type-next" });
  const switches = el("div", { class: "type-switches", role: "group", "aria-label": "Heads that are off" });
  const said = el("p", { class: "note", "aria-live": "polite" });
  const title = el("h2", {});
  const element = el("section", { class: "type-predicted" }, title, switches, said, list);

  // Draw the words [{word, probability}] after the token that `after` names, or with heads off [{word, before, after}].
  function draw(state, words, after) {
    element.hidden = !words.length;
    title.textContent = `What comes next after ${after}`;
    const top = Math.max(...words.flatMap((one) => [one.probability ?? one.before, one.after ?? 0]));
    list.replaceChildren(...words.map((one) => el("li", {}, renderPrediction(one, top, () => append(one.word)))));
    const off = listHeadsOff(state);
    switches.hidden = Boolean(app.settings.explainModel(state));
    const focused = switches.contains(document.activeElement) && document.activeElement.dataset.control;
    switches.replaceChildren(...renderSwitches(app, state));
    if (focused) (switches.querySelector(`[data-control="${focused}"]`) ?? switches.firstChild)?.focus();
    said.textContent = off.length ? describeLoss(nameHeads(app, off), words) : "";
    requestAnimationFrame(() => list.querySelectorAll("[data-width]").forEach((bar) => (bar.style.width = bar.dataset.width))); // they move
  }

  return { element, draw };
}

// Say what the likeliest token loses without some heads, and which one comes first then.
function describeLoss(heads, words) {
  const [lost] = words;
  const first = words.reduce((best, one) => (one.after > best.after ? one : best));
  const moves = lost.after < lost.before ? "falls" : "rises";
  const instead = first === lost ? "" : `, and ${namePrediction(first)} comes first`;
  return `Without ${heads} ${namePrediction(lost)} ${moves} from ${formatPercent(lost.before)} to ${formatPercent(lost.after)}${instead}. The upper bar is with all heads.`;
}

const END = "the end of the text";
const namePrediction = ({ word, ends }) => (ends ? END : quoteWord(word));

// Render the buttons that switch the selected head off or on, leave it alone in its layer, and switch all heads on.
function renderSwitches(app, state) {
  const selected = getSelectedHeads(app, state);
  const { heads } = app.attention().layers[state.layer];
  const isOff = isSelectionOff(app, state);
  const name = selected.length === heads && heads > 1 ? `layer ${state.layer}` : nameHeads(app, selected.map((head) => `${state.layer}.${head}`));
  const button = (control, text, changes) => el("button", { class: control === "off" ? "type-main" : "chip", "data-control": control, onclick: () => app.go(changes()) }, text);
  return [
    button("off", `Switch ${name} ${isOff ? "on" : "off"}`, () => switchHeads(state, state.layer, selected, !isOff)),
    selected.length === 1 && heads > 1 && button("only", `Keep only ${name} of its layer`, () => keepOneHead(app, state, state.layer, selected[0])),
    listHeadsOff(state).length > 0 && button("on", "All heads on", () => ({ off: null })),
  ].filter(Boolean);
}

// Render a predicted word with its probability; with heads off before and after, one bar above the other.
function renderPrediction({ word, ends, probability, before, after }, top, go) {
  const widen = (share) => `${(100 * share) / top}%`;
  const bar = (share, kind, start = share) => el("span", { class: kind, style: { width: widen(start) }, "data-width": start === share ? null : widen(share) });
  const isCompared = after !== undefined;
  return el("button", { class: `quiet type-expected${isCompared ? " type-compared" : ""}`, title: ends ? END : "Append this token", "aria-disabled": ends ? "true" : null, onclick: ends ? null : go },
    el("span", { class: "type-word" }, ends ? el("i", {}, "end of text") : renderWord(word)),
    el("span", { class: "type-track" }, isCompared ? [bar(before, "type-before"), bar(after, "type-after", before)] : bar(probability)),
    el("span", { class: "numbers" }, isCompared ? `${formatPercent(before)} → ${formatPercent(after)}` : formatPercent(probability)));
}
