// Notices of the page: the progress of a long wait, and errors next to the element that caused them.

import { el } from "../drawing/elements.js";

const PATIENCE = 300; // milliseconds before a wait is shown

export function createNotices(line, stage) {
  let timer = null;
  let said = null;
  const beside = new Map(); // element -> the error shown after it

  function draw() {
    line.hidden = false;
    const { text, share } = said;
    line.replaceChildren(el("progress", { max: 1, value: share, "aria-label": text }), `${text}${share === undefined ? "" : `, ${Math.round(100 * share)} %`} …`);
  }

  return {
    // Show a wait after PATIENCE milliseconds, with its progress from 0 to 1 if that is known.
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
    // Show a message above the stage.
    say(text) {
      this.fail(text, stage, "status");
    },
    // Show an error after an element, the stage by default; an empty text removes the error.
    fail(text, element = stage, role = "alert") {
      beside.get(element)?.remove();
      beside.delete(element);
      if (!text) return;
      const error = el("p", { class: role === "alert" ? "error" : "message", role }, text);
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
