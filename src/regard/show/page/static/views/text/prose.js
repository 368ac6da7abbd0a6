// A text of any length that scrolls: lines are measured a page of words at a time, and only those near the window are there.

import { el } from "../../drawing/el.js";
import { parts, shown } from "../../drawing/words.js";

const PAGE = 2000; // words measured together; each page begins a line
const NEAR = 500; // pixels above and below the window that are kept ready
const LONGEST = 80; // letters of a word that are shown

const cut = (word) => (word.length > LONGEST ? `${word.slice(0, LONGEST - 1)}…` : word);

// A text of `count` words of a list; tells the word under the pointer (or null) and the word that is picked.
export function prose(app, { list, count, label, hover, pick, scrolled }) {
  const paper = el("div", { class: "prose-paper" });
  const frame = el("div", { class: "prose", tabindex: 0, role: "group", "aria-label": label }, paper);
  const ruler = document.createElement("canvas").getContext("2d");
  const pages = Array.from({ length: Math.ceil(count / PAGE) }, () => ({ lines: null, asked: false }));
  const standing = new Map(); // "page line" -> its element
  const widths = new Map();
  let [dress, selected, linked, guess, planned, height, gone] = [null, null, null, 12, false, 28, false];
  let [held, guessed] = [null, false]; // the word that stays in sight until somebody scrolls; whether `guess` was measured

  const laidOut = () => resize.last !== undefined; // whether the paper has a width yet
  const lineCount = (n) => pages[n].lines?.length ?? Math.ceil(Math.min(PAGE, count - n * PAGE) / guess);

  // The pixel where a page begins.
  function top(n) {
    let lines = 0;
    for (let before = 0; before < n; before++) lines += lineCount(before);
    return lines * height;
  }

  function measured(word) {
    if (!widths.has(word)) {
      const seen = parts(cut(word)).map(([kind, text]) => (kind === "end" ? "↵" : kind === "code" ? `‹${text}›` : text));
      widths.set(word, ruler.measureText(seen.join("")).width + 4 * seen.filter((text) => text[0] === "‹").length);
    }
    return widths.get(word);
  }

  // Words into lines: [first, last + 1], no wider than the paper; a line end in a word ends its line.
  function broken(words, from) {
    const room = paper.clientWidth - 4;
    const lines = [];
    let [start, used] = [from, 0];
    words.forEach((word, n) => {
      const width = measured(word);
      if (used && used + width > room) {
        lines.push([start, from + n]);
        [start, used] = [from + n, 0];
      }
      used += width;
      if (word.endsWith("\n")) {
        lines.push([start, from + n + 1]);
        [start, used] = [from + n + 1, 0];
      }
    });
    if (start < from + words.length) lines.push([start, from + words.length]);
    return lines;
  }

  async function fill(n) {
    if (pages[n].words || pages[n].asked) return;
    pages[n].asked = true;
    try {
      const words = await app.words(list, n * PAGE, Math.min((n + 1) * PAGE, count));
      if (gone) return;
      const [was, from] = [lineCount(n), top(n)];
      Object.assign(pages[n], { words, lines: laidOut() ? broken(words, n * PAGE) : null });
      if (!guessed && pages[n].lines) [guess, guessed] = [Math.max(1, words.length / pages[n].lines.length), true];
      if (held !== null) bring(held);
      else if (from + was * height <= frame.scrollTop) frame.scrollTop += (lineCount(n) - was) * height;
      plan();
    } catch (fault) {
      pages[n].asked = false;
      if (!gone) app.fail(fault.message);
    }
  }

  function line(n, m, y) {
    const [from, to] = pages[n].lines[m];
    const spans = [];
    for (let place = from; place < to; place++) {
      const word = pages[n].words[place - n * PAGE];
      spans.push(el("span", { class: "word", "data-n": place }, shown(word, LONGEST)));
    }
    spans.forEach(colour);
    return el("div", { class: "prose-line", style: { transform: `translateY(${y}px)` } }, spans);
  }

  function colour(span) {
    const place = Number(span.dataset.n);
    const look = dress?.(place);
    span.style.backgroundColor = look?.paper ?? "";
    span.style.color = look?.ink ?? "";
    span.classList.toggle("hidden-word", look?.hidden ?? false);
    span.classList.toggle("selected", place === selected);
    span.classList.toggle("linked", place === linked);
  }

  // Sets the lines near the window and takes the others away.
  function render() {
    planned = false;
    if (gone) return;
    const [from, to] = [frame.scrollTop - NEAR, frame.scrollTop + frame.clientHeight + NEAR];
    const kept = new Set();
    let y = 0;
    for (let n = 0; n < pages.length; n++) {
      const tall = lineCount(n) * height;
      if (y + tall >= from && y <= to) {
        if (!pages[n].lines) fill(n);
        else for (let m = Math.max(0, Math.floor((from - y) / height)); m < pages[n].lines.length && y + m * height <= to; m++) put(n, m, y, kept);
      }
      y += tall;
    }
    paper.style.height = `${y}px`;
    for (const [name, element] of standing) if (!kept.has(name)) element.remove(), standing.delete(name);
    scrolled?.();
  }

  function put(n, m, y, kept) {
    const name = `${n} ${m}`;
    kept.add(name);
    const there = standing.get(name);
    if (there) return void (there.style.transform = `translateY(${y + m * height}px)`);
    const element = line(n, m, y + m * height);
    standing.set(name, element);
    paper.append(element);
  }

  function plan() {
    if (!planned) requestAnimationFrame(render);
    planned = true;
  }

  // Measures everything again, the first word in sight kept in place.
  function resize() {
    const look = getComputedStyle(paper);
    const font = `${look.fontWeight} ${look.fontSize} ${look.fontFamily}`;
    const size = `${font} ${look.lineHeight} ${paper.clientWidth}`;
    if (paper.clientWidth && size === resize.last && held !== null) bring(held); // the window may have become lower
    if (!paper.clientWidth || size === resize.last) return plan();
    const first = inSight()[0];
    resize.last = size;
    ruler.font = font;
    height = parseFloat(look.lineHeight);
    widths.clear();
    pages.forEach((page, n) => page.words && (page.lines = broken(page.words, n * PAGE)));
    for (const element of standing.values()) element.remove();
    standing.clear();
    if (held === null && first) frame.scrollTop = lineAt(first);
    render();
    if (held !== null) bring(held);
    return undefined;
  }

  const pageOf = (place) => Math.floor(place / PAGE);

  // The pixel of the line of a word, as well as it is known.
  function lineAt(place) {
    const n = pageOf(place);
    const lines = pages[n].lines;
    const m = lines ? lines.findIndex(([, to]) => place < to) : Math.floor((place % PAGE) / guess);
    return top(n) + m * height;
  }

  // Keeps a word in sight, also while the pages about it are measured, until somebody scrolls.
  function show(place) {
    held = place;
    fill(pageOf(place));
    bring(place);
    plan();
  }

  function bring(place) {
    if (gone || !laidOut()) return;
    const y = lineAt(place);
    paper.style.height = `${top(pages.length)}px`;
    const [from, to] = [frame.scrollTop, frame.scrollTop + frame.clientHeight];
    if (y < from || y + height > to) frame.scrollTop = y - frame.clientHeight / 3;
  }

  // The words that stand in the window: [first, last + 1].
  function inSight() {
    const edge = frame.getBoundingClientRect();
    const seen = [...standing.values()].filter((one) => {
      const { top: high, bottom } = one.getBoundingClientRect();
      return bottom > edge.top && high < edge.bottom;
    });
    const places = seen.flatMap((one) => [...one.children].map((word) => Number(word.dataset.n)));
    return places.length ? [Math.min(...places), Math.max(...places) + 1] : [0, 0];
  }

  // The word above or below a word.
  function beside(place, by) {
    const n = pageOf(place);
    const m = pages[n].lines?.findIndex(([, to]) => place < to) ?? -1;
    const here = standing.get(`${n} ${m}`);
    const next = m + by < 0 ? [n - 1, (pages[n - 1]?.lines?.length ?? 0) - 1] : m + by >= lineCount(n) ? [n + 1, 0] : [n, m + by];
    const there = standing.get(next.join(" "));
    if (!here || !there) return Math.min(Math.max(place + by * Math.round(guess), 0), count - 1);
    const middle = (one) => (one.getBoundingClientRect().left + one.getBoundingClientRect().right) / 2;
    const x = middle(here.querySelector(`[data-n="${place}"]`));
    const nearest = [...there.children].reduce((best, one) => (Math.abs(middle(one) - x) < Math.abs(middle(best) - x) ? one : best));
    return Number(nearest.dataset.n);
  }

  const under = (event) => {
    const word = event.target.closest?.(".word");
    return word ? Number(word.dataset.n) : null;
  };
  for (const hand of ["wheel", "pointerdown", "touchmove", "keydown"]) frame.addEventListener(hand, () => (held = null), { passive: true });
  frame.addEventListener("scroll", plan, { passive: true });
  frame.addEventListener("pointerover", (event) => event.pointerType !== "touch" && hover(under(event)));
  frame.addEventListener("pointerleave", () => hover(null));
  frame.addEventListener("click", (event) => under(event) !== null && pick(under(event)));
  const watch = new ResizeObserver(resize);
  watch.observe(paper);
  watch.observe(frame);

  return {
    element: frame,
    show,
    beside,
    inSight,
    // How every word looks: dressing(place) -> {paper, ink, hidden}; which is selected and which linked to it.
    dress(dressing, chosen, other) {
      [dress, selected, linked] = [dressing, chosen, other];
      for (const element of standing.values()) [...element.children].forEach(colour);
    },
    lines: () => [...standing.values()],
    scrollTo(share) {
      held = null;
      frame.scrollTop = share * (frame.scrollHeight - frame.clientHeight);
    },
    share: () => [frame.scrollTop / frame.scrollHeight, frame.clientHeight / frame.scrollHeight],
    leave() {
      gone = true;
      watch.disconnect();
    },
  };
}
