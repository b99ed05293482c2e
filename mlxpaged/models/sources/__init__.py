"""Sources of models: directories, GGUF files, the folders of Ollama and LM Studio, and the hub.

`resolve` (resolve.py) finds the files of a model by its name. What it returns, ModelFiles (model_files.py), has the
config and the tensors, and loads them, so that the loader knows no source. preflight.py and weight_headers.py look at
files before they are loaded, and gguf/ reads those of llama.cpp.
"""
