"""Compiles a grammar in a child process before this one does: the compiler is native code, and a text that is too much
for its stack, its memory or its time would end this process, not only its request."""
