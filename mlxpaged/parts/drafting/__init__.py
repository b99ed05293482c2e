"""Speculative decoding: who drafts, how many drafts are verified, which are accepted."""
