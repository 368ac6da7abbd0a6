// The search for a word in a recording of any length.

import { el } from "../drawing/elements.js";
import { formatCount } from "../drawing/number_format.js";
import { formatPlainWord } from "../drawing/words.js";

const MOST = 50; // maximum number of words listed
const PAGE = 2000;

// Return a function that opens the search; the selected word becomes the query.
export function createSearch(app) {
  return () => {
    if (!app.summary()) return;
    const { list, first, total } = app.queries();
    let running = 0;
    const input = el("input", { type: "search", "aria-label": app.inUnits("Find a token"), placeholder: app.inUnits("a token or its number"), autofocus: true, oninput: () => look() });
    const found = el("div", { class: "found" });
    const told = el("p", { class: "note", role: "status" });
    const close = (q) => {
      dialog.close();
      if (q !== undefined) app.go({ q });
    };
    const form = el("form", { method: "dialog", onsubmit: (event) => {
      event.preventDefault();
      found.querySelector("button")?.click();
    } }, input);
    const dialog = el("dialog", { "aria-label": app.inUnits("Find a token"), onclose: () => { running++; dialog.remove(); } }, form, told, found);

    async function look() {
      const run = ++running;
      const wanted = input.value.toLowerCase();
      found.replaceChildren();
      told.textContent = "";
      if (!wanted) return;
      const book = app.book();
      const number = /^\d+$/.test(wanted) && Number(wanted) < total ? [Number(wanted)] : [];
      for (const place of number) found.append(row(place, (await book.words(list, first + place, first + place + 1))[0]));
      let hits = number.length;
      for (let from = 0; from < total && hits < MOST; from += PAGE) {
        const words = await book.words(list, first + from, first + Math.min(from + PAGE, total));
        if (run !== running) return;
        told.textContent = app.inUnits(`${formatCount(Math.min(from + PAGE, total))} of ${formatCount(total)} tokens searched`);
        for (const [n, word] of words.entries()) {
          if (hits < MOST && word.toLowerCase().replaceAll("\u00a0", " ").includes(wanted)) hits += found.append(row(from + n, word, words[n - 1], words[n + 1])) ?? 1;
        }
      }
      told.textContent = hits ? `${hits === MOST ? `the first ${MOST}` : hits} found` : app.inUnits("No token contains these letters.");
    }

    // A word stands apart from the one before it if it begins with a space, or is no part of a text: a number, or the name of a patch.
    const separate = (word) => (/^\s/.test(word ?? "") || !app.book().known(list) || app.unit() !== "token" ? " " : "");
    const row = (place, word, before, after) => el("button", { type: "button", onclick: () => close(place) },
      el("span", { class: "numbers" }, formatCount(place)),
      el("span", {}, el("span", { class: "note" }, before ?? ""), separate(word), el("b", {}, formatPlainWord(word, 40)), separate(after), el("span", { class: "note" }, after ?? "")));

    document.body.append(dialog);
    dialog.showModal();
  };
}
