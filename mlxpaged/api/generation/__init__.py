"""All APIs for text share this: a request without a wire format, which is checked once, and its answers as deltas."""
