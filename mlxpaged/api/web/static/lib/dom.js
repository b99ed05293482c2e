// Makes elements. Text is always text: nothing here parses HTML.

/** h("button", {class: "quiet", onclick: f}, "Stop"): properties that begin with "on" are listeners, others attributes.
 * An attribute that is null or false is left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : value);
  }
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  set(element, attributes);
  element.append(...children);
  return element;
}

export function button(text, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, text);
}

/** A label with its field. */
export function labelled(text, field, hint = null) {
  return h("label", { class: "field" }, h("span", {}, text), field, hint && h("small", {}, hint));
}

/** Screen readers say this when they are done with what they say now. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
