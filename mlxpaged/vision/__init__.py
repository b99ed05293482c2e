"""Pictures in prompts: read, sized and counted without MLX; then encoded by a tower on the engine thread."""
