"""Leaves the machine to the person who uses it: what says that it is in use, and pauses between steps."""
