"""Fixtures of the interpreter's own tests, which need the interpreter: none of them is collected on a Mac."""

from . import is_supported
from .fixtures import metal_on_cpu

__all__ = ["metal_on_cpu"]

collect_ignore_glob = [] if is_supported() else ["test_*.py"]
