"""API keys: their file, from the command line."""
