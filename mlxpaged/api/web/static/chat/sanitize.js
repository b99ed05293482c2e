// What a model's text may become in the page. Nothing in it may run, load or look like a part of the page.
import DOMPurify from "../vendor/dompurify/purify.es.mjs";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const COMMON = { ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };
const MARKDOWN = {
  ...COMMON,
  ALLOWED_TAGS: (
    "a b blockquote br code del details em h1 h2 h3 h4 h5 h6 hr i kbd li ol p pre s small span strong sub summary sup " +
    "table tbody td th thead tr u ul"
  ).split(" "),
  ALLOWED_ATTR: "align class href start title".split(" "),
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start"], // the expression is for all attributes but those that are named safe
};
const FORMULA = {
  ...COMMON,
  ALLOWED_TAGS: (
    "math menclose merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt " +
    "mstyle msub msubsup msup mtable mtd mtext mtr munder munderover none"
  ).split(" "),
  ALLOWED_ATTR: (
    "accent accentunder class columnalign columnlines columnspacing columnspan depth dir display displaystyle fence form " +
    "height largeop linethickness lspace mathcolor mathsize mathvariant maxsize minsize movablelimits notation rowlines " +
    "rowspacing rowspan rspace scriptlevel separator stretchy style symmetric voffset width"
  ).split(" "),
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
  }
  if (node.namespaceURI === MATHML) return; // no text of a model becomes MathML, except by Temml
  // The only classes are the language of a code block and the mark of a formula: others would borrow the page's looks.
  if (node.hasAttribute?.("class") && !/^(?:language-[\w+#.-]+|formula(?: open)?)$/.test(node.getAttribute("class"))) {
    node.removeAttribute("class");
  }
});

/** A fragment of the HTML that marked made. */
export function cleanMarkdown(html) {
  return DOMPurify.sanitize(html, MARKDOWN);
}

/** A fragment of what Temml made. Its styles come from its own code, which checks lengths and colours. */
export function cleanFormula(element) {
  return DOMPurify.sanitize(element, FORMULA);
}
