"""Prefixes that outlive the server, in files."""
