// Pens with the same methods for a canvas on screen and for an SVG file.

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";

// Create a pen that draws on a canvas; coordinates are CSS pixels.
export function createCanvasPen(context) {
  return {
    rect(x, y, width, height, fill) {
      context.fillStyle = fill;
      context.fillRect(x, y, width, height);
    },
    line(x1, y1, x2, y2, stroke, width = 1) {
      context.strokeStyle = stroke;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
      context.stroke();
    },
    frame(x, y, width, height, stroke, thick = 1) {
      context.strokeStyle = stroke;
      context.lineWidth = thick;
      context.strokeRect(x, y, width, height);
    },
    area(points, fill) {
      context.fillStyle = fill;
      context.beginPath();
      for (const [x, y] of points) context.lineTo(x, y);
      context.fill();
    },
    text(text, x, y, { anchor = "start", size = 12, fill, turn = 0, weight = 400, font = FONT } = {}) {
      context.save();
      context.translate(x, y);
      if (turn) context.rotate((turn * Math.PI) / 180);
      context.font = `${weight} ${size}px ${font}`;
      context.textAlign = anchor === "middle" ? "center" : anchor;
      context.textBaseline = "middle";
      context.fillStyle = fill;
      context.fillText(text, 0, 0);
      context.restore();
    },
    image(canvas, from, to) {
      context.imageSmoothingEnabled = false;
      context.drawImage(canvas, ...from, ...to);
    },
    clip(x, y, width, height, draw) {
      context.save();
      context.beginPath();
      context.rect(x, y, width, height);
      context.clip();
      draw();
      context.restore();
    },
  };
}

// Create a pen that writes an SVG of a size; whole(svg) embeds another SVG, done() returns the file.
export function createSvgPen(width, height, paper) {
  const marks = [];
  let clips = 0;
  const number = (value) => String(Number(value.toFixed(2)));
  const mark = (tag, pairs, text = "") => {
    const attributes = Object.entries(pairs).map(([name, value]) => ` ${name}="${escapeXml(typeof value === "number" ? number(value) : value)}"`);
    marks.push(`<${tag}${attributes.join("")}${text === "" ? "/>" : `>${escapeXml(text)}</${tag}>`}`);
  };
  const pen = {
    rect: (x, y, w, h, fill) => mark("rect", { x, y, width: w, height: h, fill }),
    line: (x1, y1, x2, y2, stroke, thick = 1) => mark("line", { x1, y1, x2, y2, stroke, "stroke-width": thick }),
    frame: (x, y, w, h, stroke, thick = 1) => mark("rect", { x, y, width: w, height: h, fill: "none", stroke, "stroke-width": thick }),
    area: (points, fill) => mark("polygon", { points: points.map(([x, y]) => `${number(x)},${number(y)}`).join(" "), fill }),
    text(text, x, y, { anchor = "start", size = 12, fill, turn = 0, weight = 400, font = FONT } = {}) {
      const look = { x, y, fill, "font-size": size, "font-weight": weight, "font-family": font, "text-anchor": anchor, "dominant-baseline": "central", "xml:space": "preserve" };
      mark("text", turn ? { ...look, transform: `rotate(${turn} ${number(x)} ${number(y)})` } : look, text);
    },
    image(canvas, [sx, sy, sw, sh], [x, y, w, h]) {
      const part = document.createElement("canvas");
      Object.assign(part, { width: Math.max(1, Math.ceil(sw)), height: Math.max(1, Math.ceil(sh)) });
      part.getContext("2d").drawImage(canvas, sx, sy, part.width, part.height, 0, 0, part.width, part.height);
      const look = { x, y, width: (w * part.width) / sw, height: (h * part.height) / sh, preserveAspectRatio: "none" };
      mark("image", { ...look, style: "image-rendering:pixelated", href: part.toDataURL() });
    },
    clip(x, y, w, h, draw) {
      const name = `clip${clips++}`;
      marks.push(`<clipPath id="${name}"><rect x="${number(x)}" y="${number(y)}" width="${number(w)}" height="${number(h)}"/></clipPath><g clip-path="url(#${name})">`);
      draw();
      marks.push("</g>");
    },
    whole: (svg) => marks.push(svg.trim()),
    done: () => `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">${marks.join("\n")}</svg>\n`,
  };
  pen.rect(0, 0, width, height, paper);
  return pen;
}

// Escape a text for XML, without the characters that XML does not allow.
const escapeXml = (text) =>
  String(text)
    .replace(/[^\t\n\r\u{20}-\u{D7FF}\u{E000}-\u{FFFD}\u{10000}-\u{10FFFF}]/gu, "")
    .replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
