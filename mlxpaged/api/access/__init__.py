"""Access control: API keys, rate limits, origins."""
