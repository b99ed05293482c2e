"""Structured output: what a schema allows, as a grammar."""
