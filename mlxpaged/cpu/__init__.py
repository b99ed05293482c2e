"""Everything that exists only for MLX's CPU backend. Importing this package does not import mlx.

Two functions connect it to the rest: `kv_pool.CpuPool`, which LayerKVCache uses as its "cpu" backend, and
`optimize.optimize_for_cpu`, which the model loader calls. `blas` runs before mlx is imported.
"""
