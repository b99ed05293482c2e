"""Optional parts of the engine, a folder each."""
