// Elements without a framework: `h` for HTML, `s` for SVG. Text always goes in as text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Set the text of an element, and touch the page only when it differs. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A bar of `share` (0 to 1), with its meaning in words beside it. */
export function meter(label, share, words, level = "") {
  const bar = h("span", { class: "fill" });
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("div", { class: `meter ${level}` }, h("span", { class: "what" }, label), h("span", { class: "much" }, words), h("span", { class: "track" }, bar));
}

/** The sign of a choice: a circle for local, a diamond for split, never by colour alone. */
export function mark(choice) {
  return h("span", { class: `mark ${choice}`, "aria-hidden": "true" });
}
