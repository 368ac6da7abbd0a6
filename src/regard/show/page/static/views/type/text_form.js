// The text field of Type, and the example sentences while it is empty.

import { el, isTouch } from "../../drawing/elements.js";
import { cutText } from "../../drawing/words.js";
import { renderModelChoice } from "../../frame/model_choice.js";

const LETTERS = 72; // maximum number of letters of an example sentence

// Create the form; it calls run(text). `offer` shows the sentences if the field is empty, `busy` sets whether the model runs.
export function createTextForm(app, run) {
  const { translates, translation } = app.start;
  const text = el("textarea", { name: "text", rows: 1, dir: "auto", "aria-label": "Your text", placeholder: translates ? "Type a sentence to translate" : "Type a sentence, or paste a text", maxlength: app.start.limits.characters });
  const keys = isTouch() ? null : "Enter; Shift+Enter starts a new line";
  const button = el("button", { class: "primary", title: keys }, translates ? "Translate" : "Run");
  const form = el("form", { class: "type-form", onsubmit: (event) => {
    event.preventDefault();
    run(text.value);
  } }, text, el("div", { class: "type-go" }, renderModelChoice(app.start.models, () => text.value.trim() && form.requestSubmit()), button));
  const offers = el("div", { class: "type-offers" }, el("span", { class: "note" }, "Or try:"), app.start.sentences.map((one) =>
    el("button", { class: "chip", onclick: () => run((text.value = one)) }, cutText(one, LETTERS))),
    translation && !translates && [el("span", { class: "note" }, "Or try a translation:"), el("button", { class: "chip", "data-translation": "", onclick: () => app.translation("text") }, `${translation.sentence} → in French`)]);
  const offer = () => (offers.hidden = text.value.trim() !== "");
  text.addEventListener("input", offer);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") text.blur();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  const busy = (now) => (button.disabled = now);
  return { element: el("div", { class: "type-ask" }, form, offers), form, offer, busy };
}
