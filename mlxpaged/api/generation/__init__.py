"""What all APIs for text share: a request without a wire format, checked once, and its answers as deltas."""
