// Handle wheel, drag, pinch, double click and tap on a map.

import { getVisibleRange } from "./heat_map_drawing.js";

const STILL = 5; // maximum pixels that the pointer moves during a click

// Listen on a canvas; call moved() after the camera moved, point(cell or null) and pin(cell).
export function listenToPointer(canvas, at, { moved, point, pin }) {
  const down = new Map(); // pressed pointers: id -> [x, y]
  let travelled = 0;

  const spot = (event) => {
    const edge = canvas.getBoundingClientRect();
    return [event.clientX - edge.left, event.clientY - edge.top];
  };

  // Return the cell under a point, or the row or column of a word at the side.
  function cellAt([x, y]) {
    if (!at.camera) return null;
    const box = getVisibleRange(at);
    const [inX, inY] = [x >= box.x && x < box.x + box.width, y >= box.y && y < box.y + box.height];
    const q = inY ? Math.min(Math.floor(at.camera.query(y)), at.queries - 1) : undefined;
    const k = inX ? Math.min(Math.floor(at.camera.key(x)), at.keys - 1) : undefined;
    if (inX && inY) return { q, k };
    if (inY && x < box.x) return { q };
    return inX && y < box.y ? { k } : null;
  }

  function drag(event) {
    const now = spot(event);
    const before = down.get(event.pointerId);
    const other = [...down].find(([id]) => id !== event.pointerId)?.[1];
    down.set(event.pointerId, now);
    travelled += Math.hypot(now[0] - before[0], now[1] - before[1]);
    if (travelled < STILL) return;
    canvas.classList.add("held");
    if (other) {
      const measureDistance = (a) => Math.max(Math.hypot(a[0] - other[0], a[1] - other[1]), 1);
      at.camera.pan((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
      at.camera.zoom(measureDistance(now) / measureDistance(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else at.camera.pan(now[0] - before[0], now[1] - before[1]);
    moved();
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    if (!down.size) travelled = 0;
    down.set(event.pointerId, spot(event));
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (down.has(event.pointerId)) drag(event);
    const cell = cellAt(spot(event));
    point(cell?.q !== undefined && cell?.k !== undefined && event.pointerType !== "touch" ? cell : null);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!down.delete(event.pointerId)) return;
    canvas.classList.remove("held");
    const cell = cellAt(spot(event));
    if (travelled < STILL && cell && event.detail < 2) pin(cell);
  });
  canvas.addEventListener("pointercancel", (event) => {
    down.delete(event.pointerId);
    canvas.classList.remove("held");
  });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("dblclick", (event) => {
    at.camera.zoom(event.shiftKey ? 0.5 : 2, ...spot(event));
    moved();
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : 1);
    at.camera.zoom(Math.exp(-Math.max(-150, Math.min(150, pixels)) * (event.ctrlKey ? 0.01 : 0.0025)), ...spot(event));
    point(cellAt(spot(event))?.k === undefined ? null : at.pointed);
    moved();
  }, { passive: false });
}
