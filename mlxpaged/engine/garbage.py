"""The garbage of a model that has ended: its objects refer to each other, so only a collection frees its weights.

A full collection looks at the libraries' 100,000 objects for 0.1 to 0.2 s, and every stream waits. So what is loaded at
the start is frozen: no collection looks at it until it is unfrozen.
"""

from __future__ import annotations

import gc

import mlx.core as mx

_freezes = 0


def freezes() -> int:
    """How often objects have been frozen so far."""
    return _freezes


def freeze() -> None:
    """Free what is garbage by now, and freeze all other objects."""
    global _freezes
    gc.collect()
    gc.freeze()
    _freezes += 1


def free_garbage(since: int) -> None:
    """Free models that have ended, and the buffers of their arrays. since: `freezes()` when the first of them began to
    load. Frozen objects are looked at only if they can be among the garbage; otherwise it takes a few milliseconds."""
    if freezes() > since:
        gc.unfreeze()
        freeze()
    else:
        gc.collect()
    mx.clear_cache()
