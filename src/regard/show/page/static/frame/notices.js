// What the page says of itself: how far a long wait is, and errors beside the thing that caused them.

import { el } from "../drawing/elements.js";

const PATIENCE = 300; // milliseconds before a wait is spoken of

export function createNotices(line, stage) {
  let timer = null;
  let said = null;
  const beside = new Map(); // element -> the error that stands after it

  function draw() {
    line.hidden = false;
    const { text, share } = said;
    line.replaceChildren(el("progress", { max: 1, value: share, "aria-label": text }), `${text}${share === undefined ? "" : `, ${Math.round(100 * share)} %`} …`);
  }

  return {
    // Says what is waited for, after a moment, with its share from 0 to 1 where that is known.
    wait(text, share) {
      said = { text, share };
      if (!line.hidden) draw();
      else timer ??= setTimeout(draw, PATIENCE);
    },
    ready() {
      clearTimeout(timer);
      timer = null;
      line.hidden = true;
    },
    // Shows an error after an element, the stage by default; without text takes it away.
    fail(text, element = stage) {
      beside.get(element)?.remove();
      beside.delete(element);
      if (!text) return;
      const error = el("p", { class: "error", role: "alert" }, text);
      if (element === stage) stage.prepend(error);
      else element.after(error);
      beside.set(element, error);
    },
    clear() {
      for (const error of beside.values()) error.remove();
      beside.clear();
    },
  };
}
