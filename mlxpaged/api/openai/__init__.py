"""OpenAI's API: chat completions, completions, responses, embeddings, models."""
