"""Text of answers: stop strings, thoughts and calls."""
