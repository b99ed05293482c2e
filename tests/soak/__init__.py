"""Long runs against a server process: mixed load with checked answers, and memory for each kind of request."""
