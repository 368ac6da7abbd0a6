// The layout of Generate: the prompt, the generated text and the selected word.

import { formatColor, chooseInk, shadeWeight } from "../../drawing/color.js";
import { el } from "../../drawing/elements.js";
import { formatPercent, formatThreeDigits } from "../../drawing/number_format.js";
import { quoteWord, renderWord } from "../../drawing/words.js";
import { createPromptForm } from "./prompt_form.js";

const NEAR = 60; // maximum pixels from the end of the text at which it scrolls along with new words

// Build the layout; user input calls run, stop and pick(n).
export function buildLayout(app, { run, stop, pick }) {
  const ask = createPromptForm(app, { run, stop });
  const text = createGeneratedText(pick);
  const word = createTokenPanel();
  const progress = el("p", { class: "note generate-count", role: "status" });
  const after = el("nav", { class: "generate-after", "aria-label": "The same words in other views" });
  const body = el("div", { class: "generate-body", hidden: true }, el("section", {}, text.element, progress, after), word.element);
  const root = el("div", { class: "generate-page" }, ask.element, body);

  return {
    root,
    body,
    form: ask.form,
    warm: ask.warm,
    busy: ask.busy,
    isBusy: ask.isBusy,
    begin(beginning) {
      [body.hidden, word.element.hidden] = [false, true];
      text.begin(beginning);
      after.replaceChildren();
      progress.textContent = "";
    },
    add: text.add,
    shade: text.shade,
    count: (n, all) => (progress.textContent = `${n} of ${all} words`),
    ended: (n) => (progress.textContent = `${n} words; the model ended the text here.`),
    look(line, n, pinned) {
      word.show(line);
      text.mark(n, pinned);
    },
    end: (said, links) => after.replaceChildren(...[said, ...(links ?? [])].filter(Boolean)),
  };
}

// Create the text: the prompt, and the generated words as buttons.
function createGeneratedText(pick) {
  const prompt = el("span", { class: "generate-prompt" });
  const came = el("span", { class: "generate-came" });
  const element = el("div", { class: "words generate-words", role: "group", "aria-label": "Text: select a generated word to see its attention" }, prompt, came);
  const at = (n) => came.querySelector(`[data-n="${n}"]`);

  came.addEventListener("click", (event) => {
    const word = event.target.closest("[data-n]");
    if (word) pick(Number(word.dataset.n));
  });
  came.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.target.closest("[data-n]")?.click();
  });

  // Mark the selected word, the only one that the Tab key reaches.
  function mark(n, pinned) {
    came.querySelector("[aria-current]")?.removeAttribute("aria-current");
    came.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    const focused = came.contains(document.activeElement);
    at(n).setAttribute("aria-current", pinned ? "true" : "step");
    at(n).setAttribute("tabindex", "0");
    if (focused) at(n).focus();
  }

  // Shade the generated words that word n attends to; the prompt is not split into words here.
  function shadeWords(words, n, made) {
    for (const span of came.querySelectorAll("[data-n]")) Object.assign(span.style, { backgroundColor: "", color: "" });
    const read = made?.attentions[0]?.layers[0].keys; // all tokens except the last, which was generated and not read
    const first = words[0].place ?? (read && read - (words.length - 1)); // the position of the first generated word
    if (first === undefined) return;
    const top = Math.max(...words[n].looked.map((one) => one.weight), 1e-6);
    for (const { place, weight } of words[n].looked) {
      const colour = shadeWeight(0.15 + (0.85 * weight) / top);
      Object.assign(at(place - first)?.style ?? {}, { backgroundColor: formatColor(colour), color: chooseInk(colour) });
    }
  }

  return {
    element,
    mark,
    shade: shadeWords,
    begin(beginning) {
      prompt.textContent = beginning;
      came.replaceChildren();
      element.scrollTop = element.scrollHeight;
    },
    add({ word }, n) {
      const follows = element.scrollTop + element.clientHeight > element.scrollHeight - NEAR;
      came.append(el("span", { class: "word", role: "button", tabindex: n ? -1 : 0, "data-n": n }, renderWord(word)), word.includes("\n") ? el("br") : "");
      if (follows) element.scrollTop = element.scrollHeight;
    },
  };
}

// Create the panel of the selected word: the words it attends to, and the alternatives.
function createTokenPanel() {
  const [looked, likely] = [el("ol", { class: "generate-list" }), el("ol", { class: "generate-list" })];
  const which = el("h2");
  const element = el("aside", { class: "generate-side", "aria-label": "Selected word", hidden: true }, which,
    el("section", {}, el("h3", {}, "Attention"), looked, el("p", { class: "note" }, "Weights of the word: the mean over the heads of the last layers.")),
    el("section", {}, el("h3", {}, "Alternatives"), likely));

  function show({ word, probability, likeliest, looked: places }) {
    element.hidden = false;
    which.replaceChildren("Word ", quoteWord(word));
    const paper = (share) => formatColor(shadeWeight(0.25 + 0.75 * share));
    looked.replaceChildren(...places.map((one) => renderProbabilityBar(one.word, one.weight / places[0].weight, formatThreeDigits(one.weight), paper)));
    const all = likeliest.some((one) => one.word === word) ? likeliest : [...likeliest, { word, probability }];
    likely.replaceChildren(...all.map((one) => renderProbabilityBar(one.word, one.probability / all[0].probability, formatPercent(one.probability), null, one.word === word)));
  }

  return { element, show };
}

// Render a word with a bar and a number.
function renderProbabilityBar(word, share, text, paper, chosen) {
  const fill = { width: `${100 * share}%`, ...(paper && { backgroundColor: paper(share) }) };
  return el("li", { class: chosen ? "generate-bar generate-chosen" : "generate-bar" },
    el("span", { class: "generate-word" }, renderWord(word)),
    el("span", { class: "generate-track" }, el("span", { style: fill })),
    el("span", { class: "numbers" }, text));
}
