"""Controls access by API keys, rate limits, hosts and origins."""
