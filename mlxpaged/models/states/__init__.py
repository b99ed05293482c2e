"""Recurrent states: their blocks, and how they go back."""
