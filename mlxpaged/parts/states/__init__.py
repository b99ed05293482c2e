"""Blocks and checkpoints of recurrent states, for the scheduler. models/states/ has the states."""
