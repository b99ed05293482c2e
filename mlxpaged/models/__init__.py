"""Models: loading, their layers, output head and tokenizer, and the bundled demo model."""
