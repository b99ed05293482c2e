"""Loading and checking what sees."""
