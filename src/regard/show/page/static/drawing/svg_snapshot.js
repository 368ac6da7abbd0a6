// Convert a part of the page to SVG: its words, their backgrounds, outlines and small pictures.

import { readBackground } from "./color.js";
import { createSvgPen } from "./canvas_pen.js";

const EDGE = 16; // pixels of margin

// Return the SVG of an element; `without` selects the parts that a saved picture omits.
export function snapshotAsSvg(root, without = "nav") {
  const edge = root.getBoundingClientRect();
  const isKept = (one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(without);
  const marks = [...root.querySelectorAll("*")].filter(isKept).map((one) => measureElement(one, root));
  const texts = marks.flatMap(({ texts }) => texts);
  const reach = [...texts, ...marks.filter(({ one }) => one.matches("canvas")).flatMap(({ boxes }) => boxes)];
  const bottom = Math.max(edge.top, ...reach.map((box) => box.bottom)); // without the empty space below
  const pen = createSvgPen(Math.ceil(edge.width) + 2 * EDGE, Math.ceil(bottom - edge.top) + 2 * EDGE, readBackground("--paper"));
  const spot = ({ left, top, width, height }) => [left - edge.left + EDGE, top - edge.top + EDGE, width, height];
  for (const mark of marks) for (const box of mark.boxes) if (box.top < bottom) fillBox(pen, mark, spot(box));
  for (const { look, texts } of marks) for (const box of texts) writeText(pen, box.text, look, spot(box));
  for (const { look, boxes } of marks) if (/solid|dashed/.test(look.outlineStyle)) boxes.forEach((box) => pen.frame(...spot(box), look.outlineColor, parseFloat(look.outlineWidth)));
  return pen.done();
}

// Return an element with its style and its visible boxes and words.
function measureElement(one, root) {
  const isSeenIn = (about) => (box) => box.width > 0 && isVisible(box, about, root);
  return { one, look: getComputedStyle(one), boxes: [...one.getClientRects()].filter(isSeenIn(one.parentElement)), texts: measureWords(one).filter(isSeenIn(one)) };
}

function fillBox(pen, { one, look }, [x, y, width, height]) {
  const stops = look.backgroundImage.startsWith("linear-gradient") ? look.backgroundImage.match(/rgb\([^)]*\)/g) : [];
  if (!/, 0\)$|transparent/.test(look.backgroundColor)) pen.rect(x, y, width, height, look.backgroundColor);
  stops.forEach((stop, n) => pen.rect(x + (n * width) / stops.length, y, width / stops.length + 0.3, height, stop));
  if (one.matches("canvas") && one.width) pen.image(one, [0, 0, one.width, one.height], [x, y, width, height]);
}

function writeText(pen, text, look, [x, y, width, height]) {
  const letters = { size: parseFloat(look.fontSize), fill: look.color, weight: look.fontWeight, font: look.fontFamily };
  if (look.writingMode.startsWith("vertical")) pen.text(text, x + width / 2, y + height, { ...letters, turn: -90 }); // words over columns read upward
  else pen.text(text, x, y + height / 2, letters);
}

// Return a box for each word of an element's own text, because the text can break into lines anywhere.
function measureWords(one) {
  if (one.matches("select")) return [locateSelectedOption(one)];
  const found = [];
  const range = document.createRange();
  for (const node of one.childNodes) {
    if (node.nodeType !== Node.TEXT_NODE || one.matches("option")) continue;
    for (const { 0: text, index } of node.data.matchAll(/\S+/g)) {
      range.setStart(node, index);
      range.setEnd(node, index + text.length);
      found.push(Object.assign(range.getBoundingClientRect(), { text }));
    }
  }
  return found;
}

function locateSelectedOption(select) {
  const { left, top, width, height } = select.getBoundingClientRect();
  const inset = parseFloat(getComputedStyle(select).paddingLeft);
  return Object.assign(new DOMRect(left + inset, top, width, height), { text: select.selectedOptions[0]?.textContent ?? "" });
}

// Return whether the center of a box is inside all scrolling elements around it.
function isVisible(box, one, root) {
  const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  for (let about = one; about && about !== root.parentElement; about = about.parentElement) {
    if (getComputedStyle(about).overflowY === "visible") continue;
    const { top, bottom, left, right } = about.getBoundingClientRect();
    if (y < top || y > bottom || x < left || x > right) return false;
  }
  return true;
}
