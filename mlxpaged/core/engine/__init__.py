"""A step of the engine, and requests in it."""
