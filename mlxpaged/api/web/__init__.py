"""The page in the browser: its files are in static/."""

from mlxpaged.api.web.files import PATHS, docs, index, routes
