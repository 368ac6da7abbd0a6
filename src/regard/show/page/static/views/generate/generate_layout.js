// The layout of Generate: the prompt, the generated text and the selected word.

import { formatColor, chooseInk } from "../../drawing/color.js";
import { formatTokens } from "../../drawing/number_format.js";
import { el } from "../../drawing/elements.js";
import { explainBytes, renderTextWord, renderWord } from "../../drawing/words.js";
import { createTokenPanel } from "./token_panel.js";
import { createPromptForm } from "./prompt_form.js";

const NEAR = 60; // maximum pixels from the end of the text at which it scrolls along with new words

const HINT = "The model continues the text, one token at a time: a word or a piece of one. Then select a token to see where the model looked, and which others were likely there.";

const COMPILING = "The code that writes the text is being prepared for this processor, which takes up to half a minute the first time.";

// Build the layout; user input calls run, stop and pick(n).
export function buildLayout(app, { run, stop, pick }) {
  const ask = createPromptForm(app, { run, stop });
  const text = createGeneratedText(pick);
  const word = createTokenPanel();
  const bytes = el("p", { class: "note generate-bytes" });
  const explain = (words) => (bytes.textContent ||= explainBytes(words));
  const progress = el("p", { class: "note generate-count", role: "status" });
  const after = el("nav", { class: "generate-after", "aria-label": "The same tokens in other views" });
  const body = el("div", { class: "generate-body", hidden: true }, el("section", {}, text.element, bytes, progress, after), word.element);
  const hint = el("p", { class: "note" }, HINT);
  const root = el("div", { class: "generate-page" }, ask.element, hint, body);

  return {
    root,
    body,
    form: ask.form,
    set: ask.set,
    busy: ask.busy,
    isBusy: ask.isBusy,
    begin(beginning) {
      [hint.hidden, body.hidden, word.element.hidden] = [true, false, true];
      text.begin(beginning);
      after.replaceChildren();
      [progress.textContent, bytes.textContent] = ["", ""];
    },
    hide: () => ([hint.hidden, body.hidden] = [false, true]),
    add(line, n) {
      text.add(line, n);
      explain([line.word, ...line.likeliest.map((one) => one.word)]);
    },
    read(words, count) {
      text.read(words, count);
      explain(words);
    },
    shade: text.shade,
    moved: word.moved,
    count: (n, all) => (progress.textContent = n < all ? `${n} of ${formatTokens(all)}` : `${formatTokens(n)}; the model reads ${n === 1 ? "it" : "them"} once more, to see where it looked.`),
    compiling: () => (progress.textContent = COMPILING),
    finished: () => (progress.textContent = ""),
    stopped: (n) => (progress.textContent = `Stopped after ${n} ${n === 1 ? "token" : "tokens"}.`),
    ended: (n) => (progress.textContent = `${formatTokens(n)}; the model ended the text here.`),
    look(line, n, { isPinned, ...known }) {
      word.show(line, known);
      text.mark(n, isPinned);
    },
    end: (said, links) => after.replaceChildren(...[said, ...(links ?? [])].filter(Boolean)),
  };
}

// Create the text: the prompt, and the generated words as buttons.
function createGeneratedText(pick) {
  const prompt = el("span", { class: "generate-prompt" });
  const came = el("span", { class: "generate-came" });
  const element = el("div", { class: "words generate-words", role: "group", "aria-label": "Text: select a generated token to see its attention" }, prompt, came);
  const findWord = (n) => came.querySelector(`[data-n="${n}"]`);

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
    findWord(n).setAttribute("aria-current", pinned ? "true" : "step");
    findWord(n).setAttribute("tabindex", "0");
    if (focused) findWord(n).focus();
  }

  // Shade the words by the numbers at their places, in the colors of a quantity; the words without one are left as they are.
  function shadeWords(numbers, scale, quantity) {
    for (const span of element.querySelectorAll("[data-place]")) {
      const value = numbers[Number(span.dataset.place)] ?? null;
      const colour = value === null ? null : quantity.shade(scale, value);
      Object.assign(span.style, { backgroundColor: colour ? formatColor(colour) : "", color: colour ? chooseInk(colour) : "" });
      span.title = colour ? `${quantity.name} ${(quantity.isSigned ? quantity.format : quantity.write)(value)}` : "";
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
    // Split the prompt into words; the first `count` of them are loaded.
    read(words, count) {
      const text = prompt.textContent;
      const begun = Math.max(words.join("").indexOf(text.slice(0, 8)), 0); // after what the tokenizer puts before every text
      const rest = words.length < count ? text.slice(words.join("").length - begun) : "";
      prompt.replaceChildren(...words.flatMap((word, place) => renderTextWord({ "data-place": place }, word, word)), rest);
    },
    add({ word, place }, n) {
      const follows = element.scrollTop + element.clientHeight > element.scrollHeight - NEAR;
      came.append(...renderTextWord({ role: "button", tabindex: n ? -1 : 0, "data-n": n, "data-place": place }, word, renderWord(word)), word.includes("\n") ? el("br") : "");
      if (follows) element.scrollTop = element.scrollHeight;
    },
  };
}
