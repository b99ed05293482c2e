"""Ends answers that repeat themselves."""
