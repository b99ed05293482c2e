"""How much fits, growing and shrinking pools, swap space."""
