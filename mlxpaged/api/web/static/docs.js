// The OpenAPI document of this server, shown by Swagger UI.
/* global SwaggerUIBundle */
import { get } from "./lib/api.js";
import { h } from "./lib/dom.js";
import { key } from "./lib/key.js";
import { isDark, startTheme } from "./lib/theme.js";

// Swagger UI has a class for its dark colours.
document.addEventListener("theme-changed", () => document.documentElement.classList.toggle("dark-mode", isDark()));
startTheme(document.getElementById("theme-button"));

function withKey(request) {
  if (key() !== null) request.headers.Authorization ??= `Bearer ${key()}`;
  return request;
}

try {
  SwaggerUIBundle({
    spec: await get("openapi.json"),
    dom_id: "#document",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    requestInterceptor: withKey,
    validatorUrl: null,
  });
} catch (error) {
  document.getElementById("main").prepend(h("p", { class: "notice error", role: "alert" }, error.message));
}
