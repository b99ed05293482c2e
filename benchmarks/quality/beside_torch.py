"""Logits of transformers, computed by torch in float32: DIRECTORY NUMBERS.npz

The file has `tokens` [texts, length] and `ids` [texts, length - 1, k]. It is written anew with `own`, the
log-probability of each token after the first one, `at`, those of the ids, and `best`, the most likely token.
"""

from __future__ import annotations

import sys

import numpy as np
import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM


def main() -> None:
    directory, path = sys.argv[1:]
    given = np.load(path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    own, at, best = [], [], []
    for tokens, ids in zip(given["tokens"], given["ids"], strict=True):
        rows = torch.from_numpy(tokens.astype(np.int64))
        with torch.inference_mode():
            found = torch.log_softmax(model(rows[None]).logits[0, :-1].float(), dim=-1)
        own.append(found.gather(1, rows[1:, None])[:, 0].numpy())
        at.append(found.gather(1, torch.from_numpy(ids.astype(np.int64))).numpy())
        best.append(found.argmax(dim=-1).numpy())
    np.savez(path, own=np.array(own), at=np.array(at), best=np.array(best))


if __name__ == "__main__":
    main()
