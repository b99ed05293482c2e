"""Encoders, embedding models and rerankers."""
