// What is on screen as a picture to keep: PNG, or SVG where lines and letters stay lines and letters.

import { el } from "./el.js";

const FINER = 2; // pixels of a PNG for each of the screen's

// The menu of a view's picture; handle() is the view that stands.
export function exporter(app, handle) {
  const save = (kind) => async () => {
    close();
    try {
      const picture = handle()?.picture?.();
      if (!picture) return app.fail("There is no picture here yet: this view draws one once something is shown.");
      const name = `regard-${app.state().view}.${kind}`;
      return keep(kind === "svg" ? new Blob([vector(picture)], { type: "image/svg+xml" }) : await raster(picture), name);
    } catch (fault) {
      return app.fail(`The picture could not be made: ${fault.message}`);
    }
  };
  const items = el("div", { hidden: true, role: "menu", id: "save-menu" },
    el("button", { role: "menuitem", onclick: save("png") }, "PNG, as pixels"),
    el("button", { role: "menuitem", onclick: save("svg") }, "SVG, as lines"));
  const button = el("button", { class: "quiet", "aria-haspopup": "menu", "aria-expanded": "false", "aria-controls": "save-menu", onclick: () => (items.hidden ? open() : close()) }, "Save", el("span", { class: "long" }, " picture"));
  const menu = el("div", { class: "menu" }, button, items);

  function open() {
    items.hidden = false;
    button.setAttribute("aria-expanded", "true");
    items.firstChild.focus();
  }

  function close() {
    items.hidden = true;
    button.setAttribute("aria-expanded", "false");
  }

  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !items.hidden) close(), button.focus(), event.stopPropagation();
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || items.hidden) return;
    const all = [...items.children];
    all.at((all.indexOf(document.activeElement) + by) % all.length).focus();
    event.preventDefault();
  });
  document.addEventListener("pointerdown", (event) => menu.contains(event.target) || close());
  return menu;
}

function vector({ svg, canvas }) {
  if (svg) return svg;
  const { width, height } = canvas;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"><image width="${width}" height="${height}" href="${canvas.toDataURL()}"/></svg>\n`;
}

async function raster({ svg, canvas }) {
  const sheet = canvas ?? (await drawn(svg));
  return new Promise((resolve, reject) => sheet.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("it has no pixels."))), "image/png"));
}

// SVG on a canvas, finer than the screen.
async function drawn(svg) {
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = el("canvas", { width: FINER * image.naturalWidth, height: FINER * image.naturalHeight });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas;
  } finally {
    URL.revokeObjectURL(address);
  }
}

function keep(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
