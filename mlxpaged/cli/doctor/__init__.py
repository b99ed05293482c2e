"""`mlxpaged doctor`: describes this machine, checks the kernels that a model needs, and measures what they cost."""
