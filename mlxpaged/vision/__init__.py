"""Images in prompts: read, sized and counted without MLX; then encoded by a tower on the engine thread."""

MOST_PIXELS = 2_400_000
"""A screen of 1920 x 1080 has 2.1 million. The attention of a tower grows with the square: 12 million, a phone's photo,
take an M1 minutes in Qwen3-VL's, as computed from its sizes."""
