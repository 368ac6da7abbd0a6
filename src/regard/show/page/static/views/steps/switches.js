// The switches of Steps: the mask, the division by √d and the temperature.

import { el } from "../../drawing/elements.js";
import { formatThreeDigits } from "../../drawing/number_format.js";
import { isCausal, isOpen, isScaledByRoot, getKeyWidth } from "./attend.js";

const DECADE = 40; // steps of the temperature slider from 1 to 10

// Read the switches of a state.
export function readSettings({ mask, root, temperature }) {
  const warmth = Number(temperature ?? 1);
  return {
    mask: mask === "causal" || mask === "none" ? mask : "own",
    root: root === "on" ? true : root === "off" ? false : null,
    temperature: warmth >= 0.1 && warmth <= 10 ? warmth : 1,
  };
}

export const UNTOUCHED = { mask: null, root: null, temperature: null };

// Create the switches; draw(data, state) sets them, and user input calls change(changes). The elements are kept, and with them
// the focus.
export function createSwitches(change) {
  const masks = el("span", { class: "choice", role: "group", "aria-label": "Mask" });
  const root = el("input", { type: "checkbox", onchange: () => change({ root: root.checked === root.own ? null : root.checked ? "on" : "off" }) });
  const rooted = el("span");
  const warmth = el("input", { type: "range", min: -DECADE, max: DECADE, step: 1, "aria-label": "Temperature", oninput: () => change({ temperature: formatTemperature(warmth.value) }) });
  const told = el("output", { class: "numbers" });
  const reset = el("button", { class: "chip", onclick: () => change(UNTOUCHED) }, "reset");
  const divided = el("label", { class: "control" }, root, rooted);
  const element = el("fieldset", { class: "steps-switches" },
    el("legend", {}, "What if?"),
    el("div", { class: "control" }, el("span", { class: "name" }, "mask"), masks),
    divided,
    el("label", { class: "control" }, el("span", { class: "name" }, "temperature"), warmth, told),
    reset);

  function draw(data, state) {
    const now = readSettings(state);
    element.hidden = !data.rows.length || Boolean(data.partial);
    if (element.hidden) return;
    const focused = masks.contains(document.activeElement) && document.activeElement.dataset.mask;
    const offered = listChoices(data, state.kind === "cross" && !state.example);
    masks.replaceChildren(...offered.map(([name, text]) =>
      el("button", { "data-mask": name, "aria-pressed": String(name === now.mask), onclick: () => change({ mask: name === "own" ? null : name }) }, text)));
    if (focused) masks.querySelector(`[data-mask="${focused}"]`)?.focus();
    divided.hidden = Boolean(data.weight); // additive scores are not divided
    root.own = data.scale !== 1;
    root.checked = now.root ?? root.own;
    rooted.textContent = data.scale === 1 || isScaledByRoot(data) ? `divide by √${getKeyWidth(data)}` : `multiply by ${formatThreeDigits(data.scale)}`;
    warmth.value = Math.round(DECADE * Math.log10(now.temperature));
    told.textContent = formatThreeDigits(now.temperature);
    reset.disabled = now.mask === "own" && now.root === null && now.temperature === 1;
  }

  return { element, draw };
}

// List the masks to choose from as [name, text], the mask of the head first.
function listChoices(data, cross) {
  if (isCausal(data)) return [["own", "causal"], ["none", "none"]];
  if (isOpen(data)) return cross ? [["own", "none"]] : [["own", "none"], ["causal", "causal"]];
  return [["own", data.hidden == null ? "original" : "the wrong one"], ...(cross ? [] : [["causal", "causal"]]), ["none", "none"]];
}

const formatTemperature = (steps) => (Number(steps) === 0 ? null : (10 ** (steps / DECADE)).toPrecision(3));
