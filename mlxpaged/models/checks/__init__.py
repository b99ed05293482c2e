"""Whether a loaded model computes what mlx-lm's does."""
