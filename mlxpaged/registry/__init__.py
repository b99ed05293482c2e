"""The models of a server: which names it serves, which models are loaded, and which one makes room for another."""
