// Create elements of the page with text as text: a token is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Create an element with attributes (functions are listeners, null and false are omitted) and children (strings are text).
export function el(tag, attributes = {}, ...children) {
  return setAttributes(document.createElement(tag), attributes, children);
}

// Create an SVG element with attributes and children, as `el` does.
export function svg(tag, attributes = {}, ...children) {
  return setAttributes(document.createElementNS(SVG, tag), attributes, children);
}

// Return whether the page is used on a touch screen, where nothing can hover.
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
