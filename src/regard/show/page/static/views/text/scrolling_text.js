// A scrolling text of any length: its words are fetched and measured in pages, and only the lines near the window are elements.

import { el } from "../../drawing/elements.js";
import { createTextPages } from "./text_pages.js";
import { createVisibleLines } from "./visible_lines.js";

const HANDS = ["wheel", "pointerdown", "touchmove", "keydown"]; // events by which a user scrolls

// Create a text of `count` words of a list; hover(word or null) reports the word under the pointer, pick(word) a click.
export function createScrollingText(app, { list, count, label, hover, pick, scrolled }) {
  const paper = el("div", { class: "prose-paper" });
  const frame = el("div", { class: "prose", tabindex: 0, role: "group", "aria-label": label }, paper);
  const pages = createTextPages(count);
  const lines = createVisibleLines(frame, paper, pages);
  const asked = new Set(); // requested pages
  let [planned, gone] = [false, false];
  let held = null; // the word that stays visible until the user scrolls
  let size = null; // font and width for which the lines were broken

  async function fill(n) {
    if (asked.has(n)) return;
    asked.add(n);
    try {
      const words = await app.words(list, ...pages.span(n));
      if (gone) return;
      const before = pages.top(n) + pages.lineCount(n) * pages.height();
      const was = pages.lineCount(n);
      pages.set(n, app.book().known(list) && app.unit() === "token" ? words : words.map((word) => ` ${word}`)); // numbers and names of patches stand apart
      if (held !== null) bring(held);
      else if (before <= frame.scrollTop) frame.scrollTop += (pages.lineCount(n) - was) * pages.height();
      plan();
    } catch (fault) {
      asked.delete(n);
      if (!gone) app.fail(fault.message);
    }
  }

  function render() {
    planned = false;
    if (gone) return;
    lines.render(fill);
    scrolled?.();
  }

  function plan() {
    if (!planned) requestAnimationFrame(render);
    planned = true;
  }

  // Measure the text again if its font or width changed, and keep the first visible word in place.
  function resize() {
    const look = getComputedStyle(paper);
    const font = `${look.fontWeight} ${look.fontSize} ${look.fontFamily}`;
    const now = `${font} ${look.lineHeight} ${paper.clientWidth}`;
    if (paper.clientWidth && now === size && held !== null) bring(held); // the height of the window may have changed
    if (!paper.clientWidth || now === size) return plan();
    const [first] = lines.inSight();
    size = now;
    pages.measure(font, parseFloat(look.lineHeight), paper.clientWidth - 4);
    lines.clear();
    if (held === null && first) frame.scrollTop = pages.lineAt(first);
    render();
    if (held !== null) bring(held);
    return undefined;
  }

  // Keep a word visible, also while the pages around it are measured, until the user scrolls.
  function show(place) {
    held = place;
    fill(pages.of(place));
    bring(place);
    plan();
  }

  function bring(place) {
    if (gone || size === null) return;
    const y = pages.lineAt(place);
    paper.style.height = `${pages.top(pages.length)}px`;
    const [from, to] = [frame.scrollTop, frame.scrollTop + frame.clientHeight];
    if (y < from || y + pages.height() > to) frame.scrollTop = y - frame.clientHeight / 3;
  }

  const under = (event) => {
    const word = event.target.closest?.(".word");
    return word ? Number(word.dataset.n) : null;
  };
  for (const hand of HANDS) frame.addEventListener(hand, () => (held = null), { passive: true });
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
    // Return the word above or below a word; estimate it if its line is not rendered.
    beside: (place, by) => lines.beside(place, by) ?? Math.min(Math.max(place + by * Math.round(pages.perLine()), 0), count - 1),
    inSight: lines.inSight,
    dress: lines.dress,
    lines: lines.all,
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
