"""Reads GGUF, the file format of llama.cpp (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

file.py reads the header, blocks.py makes MLX arrays of tensors, config.py, names.py and tokenizer.py say what the
metadata means, and directory.py and weights.py give the loader what an MLX model's directory would have.
"""
