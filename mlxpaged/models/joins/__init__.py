"""Fewer kernels a step: joined and fused layers."""
