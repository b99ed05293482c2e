"""Batches: files of requests that run while the server has spare capacity, and survive a restart of the server."""
