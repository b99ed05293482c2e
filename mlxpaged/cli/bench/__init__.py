"""`mlxpaged bench` measures how fast this machine serves a model, one request at a time and many at once."""
