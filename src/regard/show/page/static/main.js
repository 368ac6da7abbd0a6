// Start the page: read the link, load the list of recordings, mount the view in the link and redraw it when the link changes.

import { createOwnRecordings } from "./data/own_recordings.js";
import { createWordPages } from "./data/word_pages.js";
import { connectSource } from "./data/source.js";
import * as colour from "./drawing/color.js";
import { el } from "./drawing/elements.js";
import { drawLegend } from "./drawing/legend.js";
import { cutText, hasLetters } from "./drawing/words.js";
import { renderControls, makeInitialState, isCrossText, findAttention } from "./frame/controls.js";
import { createExporter } from "./frame/export.js";
import { isFindingComing, isPlaceComing, nameWait, openFinding, renderFinding } from "./frame/finding.js";
import { createKeyboard } from "./frame/keyboard.js";
import { openNamedRecordings, renderMissing } from "./frame/named_recordings.js";
import { clampIndex, parseLink, updateLink, formatLink, linkRequest } from "./frame/page_link.js";
import { createNotices } from "./frame/notices.js";
import { createSettings } from "./frame/setting_switch.js";
import { WITHOUT_FIRST, isFirstOut } from "./frame/sink_switch.js";
import { view as compare } from "./views/compare/compare.js";
import { view as generate } from "./views/generate/generate.js";
import { view as heads } from "./views/heads/heads.js";
import { hasImage, view as image } from "./views/image/image.js";
import { hasImplicit, view as implicit } from "./views/implicit/implicit.js";
import { view as map } from "./views/map/heat_map.js";
import { view as steps } from "./views/steps/steps.js";
import { view as text } from "./views/text/text.js";
import { view as type } from "./views/type/type.js";

const VIEWS = [type, image, text, heads, map, implicit, steps, compare, generate]; // in the order of the tabs
const ALONE = ["type", "steps", "generate"]; // views that work without a recording
const TAKES_FIRST_OUT = ["type", "text", "heads", "map"]; // views with the switch that takes the first word out
const NEAR = 12; // maximum number of words to go back to find one with letters
const LOADING_PERIOD = 500; // milliseconds between questions how far the models are loaded
const EMPTY = { image: null, text: null, words: null, heat: null, seed: null, word: null, example: null, q: null, k: null, x: null, y: null, zoom: null, way: null, at: null, token: null, find: null, off: null, mixer: null, channel: null }; // nothing selected
const find = (id) => document.getElementById(id);

async function bootPage() {
  const notice = createNotices(find("wait"), find("stage"));
  const source = connectSource();
  notice.wait("Loading the list of recordings");
  const start = await fetchStart(source, notice);
  const page = { source, start, own: createOwnRecordings(), shelf: [...start.recordings], books: new Map(), handle: null, mounted: null, notice };
  await loadOwnRecordings(page);
  notice.ready();
  const app = renderTools(page);
  page.keyboard = createKeyboard(app, () => page.handle?.keys ?? [], () => page.handle?.hands ?? []);
  find("tools").append(...renderRecordings(page, app), createExporter(app, { picture: () => ({ ...page.handle?.picture?.(), legend: page.legend }), table: () => page.handle?.table?.() }), page.keyboard.button);
  const follow = () => showState(page, app);
  addEventListener("popstate", follow);
  addEventListener("hashchange", follow);
  colour.onThemeChange(follow);
  if (!location.hash) updateLink({ ...parseLink(""), ...makeFirstState(page) }, { replace: true });
  follow();
}

// Return the initial state of the page, once the server has loaded its models; meanwhile say how far it is.
async function fetchStart(source, notice) {
  for (;;) {
    const start = await source.start();
    if (!start.loading) return start;
    notice.wait(`Loading ${start.loading.label}`, start.loading.share ?? undefined);
    await new Promise((resolve) => setTimeout(resolve, LOADING_PERIOD));
  }
}

// Add the recordings that this visitor made, as far as the server still has them.
async function loadOwnRecordings({ source, own, shelf }) {
  const asked = own.list().filter((id) => !shelf.some((one) => one.id === id));
  const found = asked.length ? await source.recordings(asked) : [];
  if (!source.file) own.set(found.map(({ id }) => id));
  shelf.push(...found);
}

// Return the state of a page that is opened without a link: the finding of the recording that the server was given, or of a text
// of the gallery; the welcome where the model can read none of them.
function makeFirstState({ start }) {
  const [summary] = start.recordings;
  if (!summary) return { view: start.model ? "type" : "text", find: start.opening };
  if (!hasSoftmax(summary)) return { view: "implicit" };
  return hasImage(summary) ? { view: "image", ...makeInitialState(summary), ...summary.state } : { view: "text", ...makeInitialState(summary), find: "clearest" };
}

// Return the recording of the example translation; run the translator the first time.
async function loadTranslation({ source, start, notice, shelf }) {
  const known = shelf.find((one) => one.id === start.translation.id);
  if (known) return known;
  notice.wait("Translating a sentence");
  try {
    const summary = await source.translation();
    shelf.push(summary);
    return summary;
  } catch (fault) {
    notice.fail(fault.message);
    return null;
  } finally {
    notice.ready();
  }
}

// Return the object through which a view uses the page.
function renderTools(page) {
  const app = {
    source: page.source,
    start: page.start,
    colour,
    el,
    state: () => clampState(page, parseLink(location.hash)),
    // Change the link and show what it states; without `dismiss`, for a change that the visitor did not ask for, errors stay.
    go(changes, { dismiss = true, ...options } = {}) {
      if (dismiss) page.notice.clear();
      updateLink({ ...parseLink(location.hash), ...changes }, options);
      showState(page, app);
    },
    link: (changes) => formatLink({ ...parseLink(location.hash), ...changes }),
    summary: () => findSummary(page, app.state()),
    shelf: () => page.shelf.filter(hasSoftmax),
    // Add a recording to the list; one that the visitor made is also there at the next visit.
    add(summary, isOwn = true) {
      if (isOwn && !page.start.recordings.some((one) => one.id === summary.id)) page.own.add(summary.id);
      page.shelf = [...page.shelf.filter((one) => one.id !== summary.id), summary];
    },
    attention: () => findAttention(app.summary(), app.state()),
    // Return the list of the words of the queries, their number, and the place of the first one in the list.
    queries() {
      const [summary, state] = [app.summary(), app.state()];
      const { words, offset, queries } = state.view === "implicit" ? summary.implicit[state.mixer] : { words: app.attention().rows, offset: 0, ...app.attention().layers[state.layer] };
      return { list: words, first: offset, total: queries };
    },
    // Return what is shown: "token", or "patch" of an image or "frame" of sound without words; Generate and examples have tokens.
    unit() {
      const { view, example } = app.state();
      return (view === "generate" || (view === "steps" && example) ? null : app.summary() && app.attention()?.unit) ?? "token";
    },
    // Return one of our sentences about tokens for what is shown.
    inUnits(text) {
      const unit = app.unit();
      if (unit === "token") return text;
      return text.replace(/\bpatch or (a )?token\b/g, unit).replace(/\btokens\b/g, unit === "patch" ? "patches" : `${unit}s`).replace(/\btoken\b/g, unit);
    },
    ofTwoTexts: () => isCrossText(app.summary(), app.attention()),
    async translation(view) {
      const summary = await loadTranslation(page);
      if (summary) app.go({ ...EMPTY, step: null, view, r: summary.id, ...makeInitialState(summary) });
    },
    // Return the recording whose weights are requested: that of the state, without its first word if the switch says so.
    shownId: () => app.summary().id + (isFirstOut(app, app.state()) ? WITHOUT_FIRST : ""),
    place() {
      const { kind, part, b, layer, head } = app.state();
      return { kind, part, b, layer, head };
    },
    book(r = app.summary().id, b = app.state().b) {
      const name = `${r} ${b}`;
      if (!page.books.has(name)) page.books.set(name, createWordPages(page.source, page.shelf.find((one) => one.id === r), b));
      return page.books.get(name);
    },
    words: (list, from, to) => app.book().words(list, from, to),
    word: (list, place) => app.book().word(list, place),
    // Return the last of the NEAR words up to a place that has a letter or a digit; without one, return the place.
    telling(list, place) {
      for (let n = place; n >= 0 && n > place - NEAR; n--) if (hasLetters(app.word(list, n))) return n;
      return place;
    },
    caption: (...parts) => find("caption").replaceChildren(...parts, isFirstOut(app, app.state()) && app.summary() && TAKES_FIRST_OUT.includes(app.state().view) ? app.inUnits(" · without the first token") : ""),
    legend(shown) {
      page.legend = shown;
      find("legend").replaceChildren(...(shown ? [drawLegend(shown)] : []));
    },
    wait: page.notice.wait,
    ready: page.notice.ready,
    fail: (text, element) => page.notice.fail(text, element),
    say: (text) => page.notice.say(text),
    redraw: () => showState(page, app),
  };
  app.settings = createSettings(app);
  return app;
}

const hasSoftmax = (summary) => summary.attentions.length > 0;

// List the views that this page can show: Type and Generate need a model, Image a recording with an image, others one with a softmax
// or with layers without one.
function listViews({ start, shelf }) {
  const softmax = !shelf.length || shelf.some(hasSoftmax);
  const shown = { type: Boolean(start.model), generate: start.writes, image: shelf.some(hasImage), implicit: shelf.some(hasImplicit), steps: true };
  return VIEWS.filter((one) => shown[one.name] ?? softmax);
}

const findRecording = (page, { r }) => (r ? page.shelf.find((one) => one.id === r) : page.start.recordings[0]);

// Return the view of a state, or one that can show its recording.
function findView(page, state) {
  const [summary, found] = [findRecording(page, state), listViews(page).find((one) => one.name === state.view) ?? text];
  if (!summary || ALONE.includes(found.name)) return found;
  if (!hasSoftmax(summary)) return implicit;
  return found === implicit && !hasImplicit(summary) ? text : found;
}

// Return the recording of a state; one without a softmax is not shown by views that work without a recording, but for what was
// written in Generate.
function findSummary(page, state) {
  const [summary, { name }] = [findRecording(page, state), findView(page, state)];
  return summary && !hasSoftmax(summary) && ALONE.includes(name) && !(name === "generate" && summary.generated) ? undefined : summary;
}

// Return a state whose view, recording, kind, part, layer, head and places exist.
function clampState(page, state) {
  const summary = findSummary(page, state);
  const found = { ...state, r: summary?.id, view: findView(page, state).name };
  if (found.view === "implicit" && summary) return clampImplicit(summary, found);
  const attention = summary && findAttention(summary, state);
  if (!attention) return found;
  found.kind = attention.kind;
  found.part = attention.part;
  found.b = clampIndex(state.b, summary.batch);
  found.layer = clampIndex(state.layer, attention.layers.length);
  const layer = attention.layers[found.layer];
  if (!state.example) found.head = clampIndex(state.head, layer.heads); // an example has its own heads
  if (state.q !== undefined) found.q = clampIndex(state.q, layer.queries);
  if (state.k !== undefined) found.k = clampIndex(state.k, layer.keys);
  if (state.at !== undefined) found.at = clampIndex(state.at, layer.queries);
  return found;
}

// Return a state of the layers without a softmax whose layer, head, batch row and places exist.
function clampImplicit(summary, state) {
  const mixer = clampIndex(state.mixer, summary.implicit.length);
  const { heads, batch, queries, keys } = summary.implicit[mixer];
  const found = { ...state, mixer, channel: clampIndex(state.channel, heads), b: clampIndex(state.b, batch) };
  if (state.q !== undefined) found.q = clampIndex(state.q, queries);
  if (state.k !== undefined) found.k = clampIndex(state.k, keys);
  return found;
}

// Draw the state of the link; mount its view if another view is mounted.
function showState(page, app) {
  const missing = openNamedRecordings(page, parseLink(location.hash), { loadTranslation: () => loadTranslation(page), opened: () => showState(page, app) });
  if (missing !== null) return showMissing(page, app, missing);
  openFinding(page, app, () => showState(page, app));
  const state = app.state();
  if (isPlaceComing(page, state)) return showWaiting(page, app);
  const view = findView(page, state);
  renderFinding(find("finding"), page, state);
  const empty = !app.summary() && !ALONE.includes(view.name);
  renderTabs(page, app, view);
  runGuarded(app, () => renderControls(find("bar"), view, empty ? null : app, state));
  const mounted = `${view.name} ${empty}`;
  if (page.mounted !== mounted) {
    leaveView(page);
    app.caption();
    app.legend(null);
    document.title = `${view.title} · regard`;
    page.mounted = mounted;
    page.handle = runGuarded(app, () => (empty ? showEmptyPage(page, app) : view.mount(find("stage"), app)));
  }
  runGuarded(app, () => page.handle?.draw?.(state));
  if (isFindingComing(page)) waitForFinding(page);
}

const waitForFinding = ({ notice, start }) => notice.wait(nameWait(start, parseLink(location.hash).find));

// Show nothing until the place of a finding is known, rather than another head first.
function showWaiting(page, app) {
  showMissing(page, app, "");
  waitForFinding(page);
}

// Show that the recording of the link is on its way, or why it is not here; no other one is shown in its place.
function showMissing(page, app, why) {
  leaveView(page);
  page.mounted = null;
  app.caption();
  app.legend(null);
  renderTabs(page, app, findView(page, parseLink(location.hash)));
  find("bar").replaceChildren();
  find("finding").hidden = true;
  if (why) find("stage").append(renderMissing(why, formatLink({ ...parseLink(""), ...makeFirstState(page) })));
  else page.notice.wait("Opening the recording of this link");
}

function leaveView(page) {
  page.handle?.leave?.();
  page.handle = null;
  page.notice.ready();
  find("stage").replaceChildren();
  find("stage").className = "";
  find("stage").scrollTop = 0;
}

// Run a function of a view, and show its error, also if it is asynchronous.
function runGuarded(app, work) {
  const reportFault = (fault) => {
    if (fault.name === "AbortError") return;
    app.ready();
    app.fail(fault.message);
    if (fault.name !== "Fault") console.error(fault);
  };
  try {
    const result = work();
    result?.catch?.(reportFault);
    return result;
  } catch (fault) {
    return reportFault(fault);
  }
}

function showEmptyPage(page, app) {
  const way = page.start.model ? el("a", { href: app.link({ view: "type" }) }, "Type a sentence") : "Start regard serve with a recording";
  const own = page.shelf.length > 0 && " Those that you made are listed above.";
  find("stage").append(el("p", { class: "empty" }, "There is no recording here. ", way, " to see its attention.", own));
  return {};
}

function renderTabs(page, app, view) {
  const focused = document.activeElement?.getAttribute("data-view");
  find("views").replaceChildren(...listViews(page).map((one) =>
    el("a", { href: app.link({ view: one.name }), "data-view": one.name, title: one.question, "aria-current": one === view && "page" }, one.title)));
  if (focused) find("views").querySelector(`[data-view="${focused}"]`)?.focus();
  const current = find("views").querySelector("[aria-current]");
  if (current) find("views").scrollLeft = current.offsetLeft - find("views").offsetLeft - 60;
}

// Return the changes of the link for another recording: none, or the initial place if either recording has two texts.
function choosePlace({ shelf }, id) {
  const summary = shelf.find((one) => one.id === id);
  const now = shelf.find((one) => one.id === parseLink(location.hash).r);
  const two = !now || [summary, now].some((one) => "source" in one.words);
  return two ? makeInitialState(summary) : {};
}

// Render the list of recordings, hidden if there is no choice, and the button that clears the visitor's own.
function renderRecordings(page, app) {
  const choose = (id) => app.go({ ...EMPTY, r: id, ...linkRequest(findRecording(page, { r: id })), ...choosePlace(page, id) });
  const select = el("select", { "aria-label": "Recording", onchange: () => choose(select.value) });
  const clear = el("button", { class: "quiet", title: "Clear the list of the recordings that you made", onclick: () => clearRecordings(page, app) }, "Clear");
  const fill = () => {
    const now = findSummary(page, parseLink(location.hash));
    select.hidden = page.shelf.length < (now ? 2 : 1);
    clear.hidden = !page.own.list().length || page.source.file;
    const choices = [...(now ? [] : [["", "choose a recording"]]), ...page.shelf.map((one) => [one.id, `${one.model}: ${cutText(one.text, 32)}`])];
    const stands = [...select.options].map((option) => option.value).join() === choices.map(([id]) => id).join();
    if (!stands) select.replaceChildren(...choices.map(([id, text]) => el("option", { value: id, disabled: !id, selected: !id }, text)));
    if (now) select.value = now.id;
  };
  fill();
  new MutationObserver(fill).observe(find("bar"), { childList: true, subtree: true }); // the bar is redrawn whenever the link changes
  return [select, clear];
}

// Forget the recordings that this visitor made, and show the start.
function clearRecordings(page, app) {
  page.own.clear();
  page.shelf = [...page.start.recordings];
  updateLink({ ...parseLink(""), ...makeFirstState(page) });
  showState(page, app);
}

bootPage().catch((fault) => {
  find("wait").hidden = true;
  find("stage").replaceChildren(el("p", { class: "error", role: "alert" }, fault.message));
  if (fault.name !== "Fault") console.error(fault);
});
