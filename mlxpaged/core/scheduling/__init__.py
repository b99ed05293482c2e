"""Decides which tokens run in the next step. Plain Python on plain integers: nothing here imports mlx."""
