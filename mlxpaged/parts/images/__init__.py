"""Images of prompts, encoded once."""
