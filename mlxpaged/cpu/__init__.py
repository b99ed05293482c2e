"""What exists only for the CPU backend of MLX."""
