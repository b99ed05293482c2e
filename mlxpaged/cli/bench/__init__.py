"""`mlxpaged bench`: how fast this machine serves a model, one request at a time and many at once."""
