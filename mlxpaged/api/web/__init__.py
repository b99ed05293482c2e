"""The page in the browser: its files are in static/."""
