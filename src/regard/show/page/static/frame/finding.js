// The finding that the page opens on: one head, lit at one word, with sentences on what is seen and what to touch.

import { el } from "../drawing/elements.js";
import { linkRequest, parseLink, updateLink } from "./page_link.js";

const VIEWS = ["type", "text", "map"]; // those that show the sentences
const SHOWS_HEAD = ["text", "map"]; // those that show nothing but a head
const PLACE = ["layer", "head"];

// Load what `find` in a link names: an item of the gallery, or "clearest" of the recording of the link. A link without a place
// gets that of the finding; opened() is called once it is there.
export function openFinding(page, app, opened) {
  const state = parseLink(location.hash);
  if (!state.find || !(isGalleryItem(page.start, state.find) || findId(page, state))) return;
  page.findings ??= new Map(); // the finding by its key: null while it is loaded, undefined where there is none
  const key = makeKey(state);
  if (page.findings.has(key)) return;
  page.findings.set(key, null);
  const hash = location.hash;
  load(page, app, state).then((found) => {
    page.notice.ready();
    page.findings.delete(key); // a later link without a recording is loaded again
    page.findings.set(makeKey({ ...state, r: found.r }), found.finding ?? undefined);
    if (location.hash !== hash || isTyping()) return page.mounted === null ? opened() : undefined; // the visitor went on meanwhile
    if (!hasPlace(hash)) updateLink({ ...state, ...found.changes, ...(found.finding && { heads: null, ...found.finding.state }) }, { replace: true });
    return opened();
  }).catch((fault) => {
    if (page.mounted === null) {
      page.findings.set(key, undefined);
      opened();
    } else page.findings.delete(key);
    page.notice.ready();
    if (fault.name !== "AbortError") page.notice.fail(fault.message);
  });
}

// Return whether the finding of the link is still loaded.
export function isFindingComing(page) {
  const state = parseLink(location.hash);
  return Boolean(state.find) && page.findings?.get(makeKey(state)) === null;
}

// Return whether the head that a view shows is that of a finding that is still loaded. Type can be used meanwhile.
export const isPlaceComing = (page, { view }) => SHOWS_HEAD.includes(view) && isFindingComing(page) && !hasPlace(location.hash);

const findId = ({ start }, { r }) => r ?? start.recordings[0]?.id; // of the recording of a state
const makeKey = ({ r, find }) => `${r ?? ""} ${find}`;
const hasPlace = (hash) => new URLSearchParams(hash.slice(1)).has("q");
const isTyping = () => Boolean(document.querySelector(".type-page:has(.type-result[hidden]) textarea:focus")?.value);

async function load(page, app, { r, find }) {
  const { source, start } = page;
  if (!isGalleryItem(start, find)) {
    const id = findId(page, { r });
    page.notice.wait(nameWait(start, find));
    return { r: id, changes: { r: id }, finding: (await source.finding(id)).finding };
  }
  page.notice.wait(nameWait(start, find));
  const { recording, view, finding } = await source.gallery({ name: find });
  app.add(recording, false);
  return { r: recording.id, changes: { view, r: recording.id, ...linkRequest(recording) }, finding };
}

// Say what a visitor waits for until a finding is loaded.
export const nameWait = (start, find) => (isGalleryItem(start, find) ? `Running ${start.model}` : "Looking for the clearest head");

// Return whether a name is that of an item of the gallery, or of the one that the page opens with.
export const isGalleryItem = (start, name) => Boolean(name) && (name === start.opening || start.gallery.some((one) => one.name === name));

// Write the sentences of the finding of a state, or hide them where another head is shown.
export function renderFinding(element, page, state) {
  const finding = page.findings?.get(makeKey(state));
  const shown = Boolean(finding) && VIEWS.includes(state.view) && !state.heads && PLACE.every((name) => finding.state[name] === state[name]);
  element.hidden = !shown;
  if (!shown || element.dataset.of === finding.sentences.join("\n")) return;
  element.dataset.of = finding.sentences.join("\n");
  const [first, ...others] = finding.sentences;
  const shares = others.join(" ").split(/(\d+ %)/).map((part, n) => (n % 2 ? el("span", { class: "share" }, part) : part));
  element.replaceChildren(el("b", {}, first), " ", ...shares);
}
