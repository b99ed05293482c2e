"""Decodes images in child processes: decoders are native code for files that anyone writes, they hold Python's
interpreter lock, and what they take of memory goes back to the system with the process."""
