"""Compiled decode steps."""
