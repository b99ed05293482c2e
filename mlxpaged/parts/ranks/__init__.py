"""A model on several machines: what the engine has of it. cluster/ has the processes."""
