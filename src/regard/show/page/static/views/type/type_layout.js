// The layout of Type: the text field, the words, the predicted next words and the heads.

import { formatColor, chooseInk } from "../../drawing/color.js";
import { el } from "../../drawing/elements.js";
import { formatCount } from "../../drawing/number_format.js";
import { renderTextWord, renderWord } from "../../drawing/words.js";
import { formatLink, parseLink } from "../../frame/page_link.js";
import { createHeadStrip } from "./head_strip.js";
import { createNextWords } from "./next_words.js";
import { createTextForm } from "./text_form.js";

const WELCOME =
  "A language model reads a text token by token: words and pieces of words. At each token it combines the tokens so far, each " +
  "with a weight: these weights are the attention of the token. Type a sentence to shade each of its tokens by its weight.";
const TRANSLATES =
  "A translation model reads a sentence and writes its translation token by token: words and pieces of words. For each token it " +
  "combines the tokens of the sentence, each with a weight: these weights are the attention of the token. Type a sentence, then " +
  "select a token of its translation.";
const ELSEWHERE = [["text", "Read in Text"], ["heads", "All heads"], ["map", "Map"], ["steps", "Steps"]];

export function buildLayout(app, run, append) {
  const ask = createTextForm(app, run);
  const words = createParagraph("Tokens: select one to see its attention");
  const written = createParagraph("Translation: select a token to see its attention");
  const wrote = el("section", { hidden: true }, el("h2", {}, "Translation"), el("p", { class: "note" }, "Select a token to shade the sentence above by the attention that was used to write it."), written.element, written.more);
  const heads = createHeadStrip();
  const source = el("p", { class: "note" });
  const told = el("p", { class: "type-told", "aria-live": "polite" });
  const links = el("nav", { class: "type-links", "aria-label": "The same tokens in other views" });
  const next = createNextWords(app, append);
  const result = el("div", { class: "type-result", hidden: true },
    el("div", { class: "type-left" }, el("section", { class: "type-read" }, words.element, words.more, wrote, told), el("section", { class: "type-said" }, links, source), heads.strip, heads.figure),
    next.element);
  const welcome = el("p", { class: "type-welcome" }, app.start.translates ? TRANSLATES : WELCOME);
  const root = el("div", { class: "type-page" }, ask.element, createGallery(app), welcome, result);

  return {
    root,
    form: ask.form,
    result,
    welcome,
    offer: ask.offer,
    busy(now) {
      ask.busy(now);
      root.setAttribute("aria-busy", String(now));
    },
    words: words.set,
    // Set the words of the queries if they differ from those of the keys.
    written(words, total, pick) {
      wrote.hidden = !words;
      if (words) written.set(words, total, pick);
    },
    picked(q, same) {
      words.mark(q, same);
      written.mark(q, !same);
    },
    shade: words.shade,
    heads: heads.set,
    label: heads.label,
    read: (sentence) => (source.textContent = sentence),
    told: (sentence) => (told.textContent = sentence),
    next: next.draw,
    links(app, state) {
      const q = state.q ?? null;
      links.replaceChildren(...ELSEWHERE.map(([name, said]) => el("a", { class: "button", href: app.link({ view: name, r: state.r, q }) }, said)));
      heads.lead(app.link({ view: "map", r: state.r }));
    },
  };
}

// List the findings of the gallery, each a link.
function createGallery({ start }) {
  const link = ({ name, view, link }) => (link ? `#view=${view}&${link}` : formatLink({ ...parseLink(""), view, find: name }));
  const items = start.gallery.map((one) => el("li", {}, el("a", { class: "chip button", href: link(one) }, one.title)));
  return el("nav", { class: "type-gallery", "aria-label": "Gallery", hidden: !items.length }, el("span", { class: "note" }, "Examples:"), el("ul", {}, items));
}

// Create the words as buttons; the Tab key reaches only the selected one.
function createParagraph(label) {
  const element = el("div", { class: "words type-words", role: "group", "aria-label": label });
  const more = el("p", { class: "note" });
  let standing = { words: [], pick: null };
  element.addEventListener("click", (event) => {
    const word = event.target.closest("[data-n]");
    if (word) standing.pick?.(Number(word.dataset.n));
  });
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.target.closest("[data-n]")?.click();
  });

  function set(words, total, pick) {
    const one = (word, n) => [...renderTextWord({ role: pick && "button", tabindex: pick && -1, "data-n": n }, word, renderWord(word)), word.includes("\n") ? el("br") : ""];
    const stands = standing.words.join("\0") === words.join("\0") && Boolean(standing.pick) === Boolean(pick);
    if (!stands) element.replaceChildren(...words.flatMap(one));
    standing = { words, pick };
    more.textContent = total > words.length ? `The first ${formatCount(words.length)} of ${formatCount(total)} tokens; Text shows all of them.` : "";
  }

  function mark(q, same) {
    element.querySelector("[aria-pressed]")?.removeAttribute("aria-pressed");
    element.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    const word = same && element.querySelector(`[data-n="${q}"]`);
    if (!word) return;
    const focused = element.contains(document.activeElement);
    word.setAttribute("aria-pressed", "true");
    word.setAttribute("tabindex", "0");
    if (focused) word.focus();
    bring(word);
  }

  // Scroll the least distance that makes a word visible.
  function bring(word) {
    const top = word.offsetTop - element.offsetTop;
    const bottom = top + word.offsetHeight;
    if (top < element.scrollTop) element.scrollTop = top - 8;
    else if (bottom > element.scrollTop + element.clientHeight) element.scrollTop = bottom + 8 - element.clientHeight;
  }

  // Shade the words by their numbers, null where one is hidden, in the colors of a quantity.
  function shadeWords(numbers, scale, { name, shade, isSigned, write, format }) {
    for (const word of element.querySelectorAll("[data-n]")) {
      const value = numbers[Number(word.dataset.n)] ?? null;
      const colour = value === null ? null : shade(scale, value);
      Object.assign(word.style, { backgroundColor: colour ? formatColor(colour) : "", color: colour ? chooseInk(colour) : "" });
      word.classList.toggle("type-unseen", !colour);
      word.title = colour ? `${name} ${(isSigned ? format : write)(value)}` : "hidden from the selected token";
    }
  }

  return { element, more, set, mark, shade: shadeWords };
}
