"""Decisions: typed questions about one input, answered with probabilities. `endpoints.py` has the APIs."""
