"""KV blocks as plain integers: the pool, the tables, the prefix cache. Nothing here imports mlx."""
