"""The engine thread and its queue, the event loop's half, and how a model's engine is made of its parts."""
