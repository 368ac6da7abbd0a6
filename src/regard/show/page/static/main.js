// Start the page: read the link, load the list of recordings, mount the view in the link and redraw it when the link changes.

import { createWordPages } from "./data/word_pages.js";
import { connectSource } from "./data/source.js";
import * as colour from "./drawing/color.js";
import { el } from "./drawing/elements.js";
import { drawLegend } from "./drawing/legend.js";
import { hasLetters } from "./drawing/words.js";
import { renderControls, makeInitialState, isCrossText, findAttention } from "./frame/controls.js";
import { createExporter } from "./frame/export.js";
import { createKeyboard } from "./frame/keyboard.js";
import { parseLink, updateLink, formatLink } from "./frame/page_link.js";
import { createNotices } from "./frame/notices.js";
import { createSettings } from "./frame/setting_switch.js";
import { view as compare } from "./views/compare/compare.js";
import { view as generate } from "./views/generate/generate.js";
import { view as heads } from "./views/heads/heads.js";
import { view as map } from "./views/map/heat_map.js";
import { view as steps } from "./views/steps/steps.js";
import { view as text } from "./views/text/text.js";
import { view as type } from "./views/type/type.js";

const VIEWS = [type, text, heads, map, steps, compare, generate]; // in the order of the tabs
const ALONE = ["type", "steps", "generate"]; // views that work without a recording
const NEAR = 12; // maximum number of words to go back to find one with letters
const EMPTY = { text: null, example: null, q: null, k: null, x: null, y: null, zoom: null, way: null, at: null, token: null }; // nothing selected
const find = (id) => document.getElementById(id);

async function bootPage() {
  const notice = createNotices(find("wait"), find("stage"));
  const source = connectSource();
  notice.wait("Loading the list of recordings");
  const start = await source.start();
  notice.ready();
  const page = { source, start, shelf: [...start.recordings], books: new Map(), handle: null, mounted: null, notice };
  const app = renderTools(page);
  page.keyboard = createKeyboard(app, () => page.handle?.keys ?? [], () => page.handle?.hands ?? []);
  find("tools").append(renderRecordings(page, app), createExporter(app, () => ({ ...page.handle?.picture?.(), legend: page.legend })), page.keyboard.button);
  const follow = () => showState(page, app);
  addEventListener("popstate", follow);
  addEventListener("hashchange", follow);
  colour.onThemeChange(follow);
  if (!location.hash) updateLink({ ...parseLink(""), ...makeFirstState(page) }, { replace: true });
  if (start.translation && parseLink(location.hash).r === start.translation.id) await loadTranslation(page); // a link can name it before it is loaded
  follow();
}

// Return the state of a page that is opened without a link.
function makeFirstState({ shelf: [summary], start }) {
  return summary ? { view: "text", ...makeInitialState(summary) } : { view: start.model ? "type" : "text" };
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
    go(changes, options) {
      page.notice.clear();
      updateLink({ ...parseLink(location.hash), ...changes }, options);
      showState(page, app);
    },
    link: (changes) => formatLink({ ...parseLink(location.hash), ...changes }),
    summary: () => findSummary(page, app.state()),
    shelf: () => page.shelf,
    add(summary) {
      page.shelf = [...page.shelf.filter((one) => one.id !== summary.id), summary];
    },
    attention: () => findAttention(app.summary(), app.state()),
    ofTwoTexts: () => isCrossText(app.summary(), app.attention()),
    async translation(view) {
      const summary = await loadTranslation(page);
      if (summary) app.go({ ...EMPTY, step: null, view, r: summary.id, ...makeInitialState(summary) });
    },
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
    caption: (...parts) => find("caption").replaceChildren(...parts),
    legend(shown) {
      page.legend = shown;
      find("legend").replaceChildren(...(shown ? [drawLegend(shown)] : []));
    },
    wait: page.notice.wait,
    ready: page.notice.ready,
    fail: page.notice.fail,
    redraw: () => showState(page, app),
  };
  app.settings = createSettings(app);
  return app;
}

// List the views that this page can show: Type and Generate need a model.
const listViews = ({ start }) => VIEWS.filter((one) => one !== type || start.model).filter((one) => one !== generate || start.writes);
const findView = (page, state) => listViews(page).find((one) => one.name === state.view) ?? text;
const findSummary = (page, state) => page.shelf.find((one) => one.id === state.r) ?? page.shelf[0];

// Return a state whose view, recording, kind, part, layer, head and places exist.
function clampState(page, state) {
  const summary = findSummary(page, state);
  const found = { ...state, r: summary?.id, view: findView(page, state).name };
  const attention = summary && findAttention(summary, state);
  if (!attention) return found;
  const within = (value, count) => Math.min(Math.max(Math.trunc(value), 0), Math.max(count - 1, 0));
  found.kind = attention.kind;
  found.part = attention.part;
  found.b = within(state.b, summary.batch);
  found.layer = within(state.layer, attention.layers.length);
  const layer = attention.layers[found.layer];
  if (!state.example) found.head = within(state.head, layer.heads); // an example has its own heads
  if (state.q !== undefined) found.q = within(state.q, layer.queries);
  if (state.k !== undefined) found.k = within(state.k, layer.keys);
  if (state.at !== undefined) found.at = within(state.at, layer.queries);
  return found;
}

// Draw the state of the link; mount its view if another view is mounted.
function showState(page, app) {
  const state = app.state();
  const view = findView(page, state);
  const empty = !page.shelf.length && !ALONE.includes(view.name);
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
  const failed = (fault) => {
    if (fault.name === "AbortError") return;
    app.ready();
    app.fail(fault.message);
    if (fault.name !== "Fault") console.error(fault);
  };
  try {
    const result = work();
    result?.catch?.(failed);
    return result;
  } catch (fault) {
    return failed(fault);
  }
}

function showEmptyPage(page, app) {
  const way = page.start.model ? el("a", { href: app.link({ view: "type" }) }, "Type a sentence") : "Start regard serve with a recording";
  find("stage").append(el("p", { class: "empty" }, "There is no recording yet. ", way, " to see its attention here."));
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
  const two = [summary, findSummary({ shelf }, parseLink(location.hash))].some((one) => "source" in one.words);
  return two ? makeInitialState(summary) : {};
}

// Render the list of recordings, hidden if there is only one.
function renderRecordings(page, app) {
  const select = el("select", { "aria-label": "Recording", onchange: () => app.go({ ...EMPTY, r: select.value, ...choosePlace(page, select.value) }) });
  const fill = () => {
    const now = findSummary(page, parseLink(location.hash));
    select.hidden = page.shelf.length < 2;
    const stands = [...select.options].map((option) => option.value).join() === page.shelf.map((one) => one.id).join();
    if (!stands) select.replaceChildren(...page.shelf.map((one) => el("option", { value: one.id }, `${one.model}: ${one.text.slice(0, 32)}`)));
    if (now) select.value = now.id;
  };
  fill();
  new MutationObserver(fill).observe(find("bar"), { childList: true, subtree: true }); // the bar is redrawn whenever the link changes
  return select;
}

bootPage().catch((fault) => {
  find("wait").hidden = true;
  find("stage").replaceChildren(el("p", { class: "error", role: "alert" }, fault.message));
  if (fault.name !== "Fault") console.error(fault);
});
