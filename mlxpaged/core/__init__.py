"""The core: what every request of every model runs. It names no optional part."""
