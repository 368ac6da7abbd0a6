// The form of Generate: the prompt, the number of words, the temperature and the seed.

import { el } from "../../drawing/elements.js";
import { cutText } from "../../drawing/words.js";
import { TERMS } from "../../frame/glossary.js";
import { readModel, renderModelChoice, setModel } from "../../frame/model_choice.js";
import { COLD } from "../../frame/page_link.js";

const COUNTS = [5, 20, 40, 80, 160, 300];
const NOTE = "Temperature 0 always takes the likeliest token, 1 draws by the model’s probabilities; the same seed draws the same tokens.";
const LETTERS = 72; // maximum number of letters of an example sentence

// Create the form; it calls run({text, tokens, temperature, seed, model, chat}) and stop(). `set` sets how tokens are sampled, `busy` whether
// the model is running.
export function createPromptForm(app, { run, stop }) {
  const text = el("textarea", { name: "text", rows: 2, dir: "auto", "aria-label": "Prompt", placeholder: "Type a prompt for the model to continue", maxlength: app.start.limits.characters });
  const go = el("button", { class: "primary" }, "Generate");
  const halt = el("button", { type: "button", class: "generate-stop", hidden: true, onclick: stop }, "Stop");
  const settings = renderSamplingControls(app);
  const form = el("form", { class: "generate-form", onsubmit: (event) => {
    event.preventDefault();
    run({ text: text.value, ...settings.values() });
  } }, text, el("div", { class: "generate-go" }, go, halt));
  const offers = el("div", { class: "generate-offers" }, el("span", { class: "note" }, "Or try:"), app.start.sentences.map((one) =>
    el("button", { class: "chip", onclick: () => ((text.value = one), form.requestSubmit()) }, cutText(one, LETTERS))));
  const offer = () => (offers.hidden = text.value.trim() !== "");
  text.addEventListener("input", offer);
  text.addEventListener("keydown", (event) => readPromptForm(event, text, form));

  return {
    element: el("div", { class: "generate-ask" }, form, settings.element, offers),
    form,
    set(given) {
      text.value = given.text ?? "";
      settings.set(given);
      offer();
    },
    isBusy: () => !halt.hidden,
    busy(now) {
      const focused = document.activeElement === (now ? go : halt);
      [go.hidden, halt.hidden] = [now, !now];
      if (focused) (now ? halt : go).focus();
      offer();
    },
  };
}

// Handle the keys of the prompt: Enter submits it, Shift+Enter starts a new line, Escape leaves the field.
function readPromptForm(event, text, form) {
  if (event.key === "Escape") text.blur();
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

function renderSamplingControls(app) {
  const tokens = el("select", { name: "tokens", class: "numbers" }, COUNTS.filter((count) => count <= app.start.limits.tokens).map((count) => el("option", { value: count, selected: count === 40 }, String(count))));
  const warmth = el("input", { type: "range", name: "temperature", min: 0, max: 2, step: 0.1, value: COLD, oninput: () => warm(warmth.value) });
  const told = el("output", { class: "numbers" });
  const seed = el("input", { type: "number", name: "seed", min: 0, max: 999999, step: 1, value: 0, class: "numbers" });
  const warm = (value) => {
    warmth.value = value;
    told.textContent = Number(warmth.value) === 0 ? "0: always the likeliest" : Number(warmth.value).toFixed(1);
  };
  warm(COLD);
  const labelControl = (name, control, beside, title) => el("label", { class: "control", title }, el("span", { class: "name" }, name), control, beside);
  const element = el("div", { class: "generate-settings" },
    labelControl("tokens", tokens, null, TERMS.tokens),
    labelControl("temperature", warmth, told, TERMS["temperature of sampling"]),
    labelControl("seed", seed, null, TERMS.seed));
  const models = app.start.models.filter(({ writes }) => writes);
  const findModel = () => models.find(({ name }) => name === readModel(element)) ?? models[0];
  const chat = el("input", { type: "checkbox", name: "chat" });
  const asked = labelControl("as a chat", chat, null, TERMS["as a chat"]);
  const offerChat = () => (chat.checked = !(asked.hidden = !findModel()?.chats)); // such a model was trained to answer
  element.prepend(...[renderModelChoice(models, offerChat)].filter(Boolean));
  element.append(asked, el("p", { class: "note" }, NOTE));
  offerChat();
  const values = () => ({ model: readModel(element), chat: chat.checked && !asked.hidden ? 1 : undefined, tokens: Number(tokens.value), temperature: Number(warmth.value), seed: Number(seed.value) || 0 });
  const set = (given) => {
    warm(given.temperature);
    seed.value = given.seed;
    setModel(element, given.model);
    offerChat();
    if (given.text) chat.checked = Boolean(given.chat);
    if ([...tokens.options].some(({ value }) => value === String(given.tokens))) tokens.value = String(given.tokens); // a stopped text may have any number
  };
  return { element, set, values };
}
