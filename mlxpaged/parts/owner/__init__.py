"""Leaves the machine to the person who uses it: what says that somebody does, and pauses between steps."""
