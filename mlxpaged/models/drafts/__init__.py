"""Models and heads that draft tokens for another model."""
