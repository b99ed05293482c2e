"""Paged attention over KV pools: a step's metadata, one pool per layer, and the cache object that a model sees."""
