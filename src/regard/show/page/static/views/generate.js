// Generate: words appear one by one, each with what it looked at and what else was likely.

import { three } from "../codes.js";
import { css, ink, shade } from "../colour.js";
import { el } from "../el.js";
import { percent } from "../numerals.js";
import { quoted, shown } from "../words.js";
import { likeness } from "./likeness.js";

const COUNTS = [5, 20, 40, 80, 160];
const LINKED = 400; // letters of a text that the link holds

export const view = { name: "generate", title: "Generate", question: "Which word comes next, and why?", bar: [], mount };

function mount(stage, app) {
  let written = []; // the words that came, as the server told them
  let begun = ""; // what they go on from
  let picked = null; // the one looked into, null for the last
  let made = null; // the recording of it all
  let running = null;
  const page = skeleton(app, { run, stop: () => running?.abort(), pick });
  stage.append(page.root);

  async function run({ text, tokens, temperature, seed }) {
    if (!text.trim()) return app.fail("Type the beginning first.", page.form);
    running?.abort();
    const mine = (running = new AbortController());
    [written, begun, picked, made] = [[], text, null, null];
    page.begin(text);
    app.fail("", page.form);
    app.go({ text: text.length <= LINKED ? text : null, heat: temperature === 1 ? null : String(temperature) }, { replace: true });
    page.busy(true);
    try {
      for await (const line of app.source.generate({ text, tokens, temperature, seed }, mine.signal)) {
        if (line.recording) finish(line.recording);
        else add(line, tokens);
      }
    } catch (fault) {
      if (fault.name !== "AbortError") app.fail(fault.message, page.form);
    } finally {
      if (running === mine) page.busy(false);
      if (running === mine && !made) page.end(stopped(mine.signal.aborted), null);
      app.ready();
    }
  }

  function add(line, tokens) {
    written.push(line);
    page.add(line, written.length - 1);
    page.count(written.length, tokens);
    if (picked === null) look(written.length - 1);
  }

  function look(n) {
    page.look(written[n], n, picked === n);
    page.shade(written, n, made);
    caption(n);
  }

  function pick(n) {
    picked = picked === n ? null : Math.min(Math.max(n, 0), written.length - 1);
    look(picked ?? written.length - 1);
  }

  function finish(summary) {
    made = summary;
    app.add(summary);
    look(picked ?? written.length - 1);
    const links = [["text", "Read it in Text"], ["heads", "all Heads"], ["map", "Map"], ["steps", "Steps"]];
    page.end("", links.map(([name, said]) => el("a", { class: "button", href: app.link({ view: name, r: summary.id, q: null, k: null, text: null, heat: null }) }, said)));
  }

  // What was stopped has no recording yet; Type makes one of the same words.
  function stopped(asked) {
    if (!written.length) return asked ? "Stopped before the first word came." : "";
    const text = begun + written.map((one) => one.word).join("");
    return el("span", {}, "Stopped. ", el("a", { href: app.link({ view: "type", text: text.slice(0, LINKED), r: "new" }) }, "Look at these words in Type"), ".");
  }

  function caption(n) {
    const { word, probability } = written[n];
    app.caption(app.el("b", {}, quoted(word)), ` had the probability ${percent(probability)}`, picked === null ? "; pick a word to see what it looked at." : "; pick it again to let go.");
  }

  const step = (by) => () => {
    if (!written.length) return;
    picked = Math.min(Math.max((picked ?? written.length - 1) + by, 0), written.length - 1);
    look(picked);
  };
  const state = app.state();
  page.form.elements.text.value = state.text ?? "";
  if (state.heat) page.warm(state.heat); // not `temperature`: that is a switch of Steps
  if (!state.text) page.form.elements.text.focus();
  const keys = [
    ["ArrowRight", "the next word that came", step(1)],
    ["ArrowLeft", "the word before", step(-1)],
    ["s", "stop", () => running?.abort()],
    ["i", "write in the box", () => page.form.elements.text.focus()],
    ["Escape", "stop, or let go of the picked word", () => (page.isBusy() ? running.abort() : written.length && ((picked = null), look(written.length - 1)))],
  ];
  return { draw() {}, leave: () => running?.abort(), keys, picture: () => written.length && { svg: likeness(page.body) } };
}

// What stands on the page from the first, and how its parts are set.
function skeleton(app, { run, stop, pick }) {
  const text = el("textarea", { name: "text", rows: 2, "aria-label": "The beginning", placeholder: "Begin, and the model goes on", maxlength: app.start.limits.characters });
  const go = el("button", { class: "primary" }, "Go on");
  const halt = el("button", { type: "button", class: "generate-stop", hidden: true, onclick: stop }, "Stop");
  const tokens = el("select", { name: "tokens", class: "numbers" }, COUNTS.map((count) => el("option", { value: count, selected: count === 40 }, String(count))));
  const warmth = el("input", { type: "range", name: "temperature", min: 0, max: 2, step: 0.1, value: 1, oninput: () => warm(warmth.value) });
  const told = el("output", { class: "numbers" }, "1.0");
  const seed = el("input", { type: "number", name: "seed", min: 0, max: 999999, step: 1, value: 0, class: "numbers" });
  const warm = (value) => {
    warmth.value = value;
    told.textContent = Number(warmth.value) === 0 ? "0: always the likeliest" : Number(warmth.value).toFixed(1);
  };
  const form = el("form", { class: "generate-form", onsubmit: (event) => {
    event.preventDefault();
    run({ text: text.value, tokens: Number(tokens.value), temperature: Number(warmth.value), seed: Number(seed.value) || 0 });
  } }, text, el("div", { class: "generate-go" }, go, halt));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") text.blur();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  text.addEventListener("input", () => offer());
  const named = (name, control, beside, title) => el("label", { class: "control", title }, el("span", { class: "name" }, name), control, beside);
  const settings = el("div", { class: "generate-settings" }, named("words", tokens, null, "How many are to come at most"), named("temperature", warmth, told, "0 always takes the likeliest word, 1 as the model expects, 2 wilder"), named("seed", seed, null, "The same seed throws the same dice: the same words come again"));
  const offers = el("div", { class: "generate-offers" }, el("span", { class: "note" }, "Or begin with:"), app.start.sentences.map((one) =>
    el("button", { class: "chip", onclick: () => ((text.value = one), form.requestSubmit()) }, one.length > 72 ? `${one.slice(0, 70)}…` : one)));
  const offer = () => (offers.hidden = text.value.trim() !== "");
  const prompt = el("span", { class: "generate-prompt" });
  const came = el("span", { class: "generate-came" });
  const paragraph = el("div", { class: "words generate-words", role: "group", "aria-label": "The text: pick a word that came to look into it" }, prompt, came);
  const progress = el("p", { class: "note generate-count", role: "status" });
  const after = el("nav", { class: "generate-after", "aria-label": "The same words in other views" });
  const likely = el("ol", { class: "generate-list" });
  const looked = el("ol", { class: "generate-list" });
  const which = el("h2");
  const side = el("aside", { class: "generate-side", hidden: true }, which,
    el("section", {}, el("h3", {}, "It looked at"), looked, el("p", { class: "note" }, "Shares of its attention: the mean over the heads of the last layers.")),
    el("section", {}, el("h3", {}, "It might have been"), likely));
  const body = el("div", { class: "generate-body", hidden: true }, el("section", {}, paragraph, progress, after), side);
  const root = el("div", { class: "generate-page" }, el("div", { class: "generate-ask" }, form, settings, offers), body);

  came.addEventListener("click", (event) => {
    const word = event.target.closest("[data-n]");
    if (word) pick(Number(word.dataset.n));
  });
  came.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.target.closest("[data-n]")?.click();
  });

  const bar = (word, share, top, told) => el("li", { class: "generate-bar" },
    el("span", { class: "generate-word" }, shown(word)),
    el("span", { class: "generate-track" }, el("span", { style: { width: `${(100 * share) / top}%`, ...(told ? { backgroundColor: css(shade(0.25 + (0.75 * share) / top)) } : {}) } })),
    el("span", { class: "numbers" }, told ? three(share) : percent(share)));

  return {
    root,
    body,
    form,
    warm,
    isBusy: () => !halt.hidden,
    begin(beginning) {
      prompt.textContent = beginning;
      came.replaceChildren();
      after.replaceChildren();
      [body.hidden, side.hidden, offers.hidden] = [false, true, true];
      progress.textContent = "";
    },
    busy(now) {
      const focused = document.activeElement === (now ? go : halt);
      [go.hidden, halt.hidden] = [now, !now];
      if (focused) (now ? halt : go).focus();
      offer();
    },
    add({ word }, n) {
      came.append(el("span", { class: "word", role: "button", tabindex: n ? -1 : 0, "data-n": n }, shown(word)), word.includes("\n") ? el("br") : "");
    },
    count: (n, all) => (progress.textContent = `${n} of ${all} words`),
    look({ word, probability, likeliest, looked: places }, n, pinned) {
      side.hidden = false;
      which.replaceChildren("When ", quoted(word), " came");
      looked.replaceChildren(...places.map((one) => bar(one.word, one.weight, places[0].weight, true)));
      const all = likeliest.some((one) => one.word === word) ? likeliest : [...likeliest, { word, probability }];
      likely.replaceChildren(...all.map((one) => {
        const line = bar(one.word, one.probability, all[0].probability, false);
        if (one.word === word) line.classList.add("generate-chosen");
        return line;
      }));
      came.querySelector("[aria-current]")?.removeAttribute("aria-current");
      came.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
      const focused = came.contains(document.activeElement);
      const span = came.querySelector(`[data-n="${n}"]`);
      span.setAttribute("aria-current", pinned ? "true" : "step");
      span.setAttribute("tabindex", "0");
      if (focused) span.focus();
    },
    // The words that this one looked at, where they are among those that came: the beginning is not cut into words here.
    shade(words, n, made) {
      const spans = [...came.querySelectorAll("[data-n]")];
      for (const span of spans) Object.assign(span.style, { backgroundColor: "", color: "" });
      const read = made?.attentions[0]?.layers[0].keys; // all but the last word, which was written and not read
      const first = words[0].place ?? (read && read - (words.length - 1)); // the place of the first word that came
      const top = Math.max(...words[n].looked.map((one) => one.weight), 1e-6);
      if (first === undefined) return;
      for (const { place, weight } of words[n].looked) {
        const span = spans[place - first];
        if (!span) continue;
        const colour = shade(0.15 + (0.85 * weight) / top);
        Object.assign(span.style, { backgroundColor: css(colour), color: ink(colour) });
      }
    },
    end(said, links) {
      after.replaceChildren(...[said, ...(links ?? [])].filter(Boolean));
    },
  };
}
