// Elements of the page, made with text as text: nothing that a token holds is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes (a function is a listener, null and false are left out) and children (strings become text).
export function el(tag, attributes = {}, ...children) {
  return setAttributes(document.createElement(tag), attributes, children);
}

// The same for a picture inside the page.
export function svg(tag, attributes = {}, ...children) {
  return setAttributes(document.createElementNS(SVG, tag), attributes, children);
}

// Whether the page is used by fingers, which point at nothing before they touch it.
export const isTouch = () => matchMedia("(hover: none)").matches;

function setAttributes(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
