// The recordings that a link names: those that are not loaded are asked for, or made again from the text in the link.

import { el } from "../drawing/elements.js";
import { isGalleryItem } from "./finding.js";
import { COLD, formatLink, parseLink } from "./page_link.js";

const LOST = "This link is about a recording that is not on this server. It was made on another one, or had to make room for newer ones, and the link does not hold the text from which it could be made again.";

// Return null if all recordings that a state names are loaded; "" while one is asked for; else why it cannot be shown, as
// {why, text}. Once one is loaded, or cannot be, opened() is called.
export function openNamedRecordings(page, state, { loadTranslation, opened }) {
  const missing = [["r", state], ["r2", { text: state.text2, model: state.model2 }]].find(([key]) => isMissing(page, state, key));
  if (!missing) return null;
  const [key, from] = missing;
  page.asked ??= new Map(); // id -> "" while it is asked for, or why it is not there
  const id = state[key];
  if (!page.asked.has(id)) {
    page.asked.set(id, "");
    openRecording(page, id, key, from, loadTranslation).catch((fault) => ({ why: fault.message })).then((lost) => {
      if (lost) page.asked.set(id, lost);
      else page.asked.delete(id); // it may be removed and be opened again
      page.notice.ready();
      opened();
    });
  }
  return page.asked.get(id);
}

const isMissing = ({ shelf }, state, key) => Boolean(state[key]) && (key === "r" || state.view === "compare") && !shelf.some((one) => one.id === state[key]);

// Load a recording, or make it again; return null, or why that is not possible.
async function openRecording(page, id, key, from, loadTranslation) {
  const { source, start, shelf } = page;
  if (id === start.translation?.id) return (await loadTranslation()) ? null : { why: LOST };
  const [found] = await source.recordings([id]);
  const item = !found && key === "r" && isGalleryItem(start, from.find) ? await source.gallery({ name: from.find }) : null;
  const summary = found ?? item?.recording ?? (from.text && start.model && !source.file ? await makeAgain(page, from) : null);
  if (!summary) return { why: LOST };
  if (summary.id !== id) return { why: `This link is about what another model than this server’s ${start.model} did with a text.`, text: from.text };
  if (!isGalleryItem(start, from.find)) page.own.add(id);
  shelf.push(summary);
  return null;
}

// Run the model on the text of a link, or let it continue the text in the same way.
async function makeAgain({ source, start }, { text, words, heat, seed, model, chat }) {
  if (words === undefined) return source.type({ text, model });
  if (!start.writes) return null;
  for await (const line of source.generate({ text, tokens: words, temperature: Number(heat ?? COLD), seed: seed ?? 0, model, chat })) {
    if (line.recording) return line.recording;
  }
  return null;
}

// Render why the recording of a link cannot be shown, with links to the start page, and to what this model does with the text.
export function renderMissing({ why, text }, start) {
  const again = text && [el("a", { href: formatLink({ ...parseLink(""), view: "type", text }) }, "See what this model does with it"), ", or "];
  return el("p", { class: "empty", role: "alert" }, why, " ", again, el("a", { href: start }, again ? "go to the start page" : "Go to the start page"), ".");
}
