"""Everything that exists only for MLX's CPU backend. Importing this package does not import mlx.

The model loader imports `optimize` and calls `optimize_for_cpu`. The import also makes `kv_pool.CpuPool` the "cpu"
backend of LayerKVCache. `blas` runs before mlx is imported.
"""
