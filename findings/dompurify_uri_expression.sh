#!/usr/bin/env bash
# DOMPurify holds ALLOWED_URI_REGEXP against every attribute, not only against addresses.
#
# An expression that allows only https: and mailto: for links also removes `align` of a table's cell and `start` of a
# numbered list, although ALLOWED_ATTR names them: their values are no such addresses. `class` stays, because it is
# on DOMPurify's own list of attributes that hold no address. The default expression hides this: it lets
# values without a scheme pass. ADD_URI_SAFE_ATTR names more attributes that hold none.
# Seen with dompurify 3.5.0 and jsdom 26.1.0. It needs node and npm. It fails if the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" dompurify@3.5.0 jsdom@26.1.0

cd "$folder"
cat >clean.mjs <<'JS'
import createDOMPurify from "dompurify";
import { JSDOM } from "jsdom";

const purify = createDOMPurify(new JSDOM("").window);
const text = '<ol start="3" class="x"><li>a</li></ol><table><tbody><tr><td align="right">1</td></tr></tbody></table>';
const attributes = { ALLOWED_ATTR: ["align", "class", "start"] };
const strict = { ...attributes, ALLOWED_URI_REGEXP: /^(?:https:|mailto:)/i };
const shown = {
  byDefault: purify.sanitize(text, attributes),
  strict: purify.sanitize(text, strict),
  named: purify.sanitize(text, { ...strict, ADD_URI_SAFE_ATTR: ["align", "start"] }),
};
console.log(JSON.stringify(shown, null, 1));
const keeps = (html) => [/start="3"/, /align="right"/, /class="x"/].map((each) => each.test(html)).join();
const all = "true,true,true";
process.exit(
  keeps(shown.byDefault) === all && keeps(shown.strict) === "false,false,true" && keeps(shown.named) === all ? 0 : 1,
);
JS
node clean.mjs
