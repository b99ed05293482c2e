"""The HTTP side of the server: it reads requests, and writes text, errors and events. It never touches tensors."""
