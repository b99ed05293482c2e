"""The endpoints of Ollama's API."""

from __future__ import annotations

from mlxpaged.api.endpoint import HTML, Access, Api, answers, delete, get, post, reads
from mlxpaged.api.ollama import models as ollama_models
from mlxpaged.api.ollama import pull as ollama_pull
from mlxpaged.api.ollama import renderer as ollama_renderer
from mlxpaged.api.ollama import routes as ollama
from mlxpaged.api.ollama import schema as ollama_schema
from mlxpaged.api.ollama.errors import ERRORS
from mlxpaged.api.streaming import LINES

ENDPOINTS = (
    answers(
        "/api/chat",
        ollama.chat,
        "Answer a conversation, as Ollama's API does",
        ollama_schema.OllamaChatRequest,
        begin=ollama_renderer.ChatBeginning,
    ),
    answers(
        "/api/generate",
        ollama.generate,
        "Answer a prompt, as Ollama's API does",
        ollama_schema.OllamaGenerateRequest,
        begin=ollama_renderer.GenerateBeginning,
    ),
    reads("/api/embed", ollama.embed_inputs, "Embed texts", ollama_schema.OllamaEmbedRequest, cancellable=True),
    reads(
        "/api/embeddings", ollama.embed_prompt, "Embed a text", ollama_schema.OllamaEmbeddingsRequest, cancellable=True
    ),
    get("/api/tags", ollama_models.tags, "The models that are served, and those on this machine"),
    get("/api/ps", ollama_models.ps, "The models that are loaded"),
    reads("/api/show", ollama_models.show, "One model", ollama_schema.OllamaShowRequest),
    get("/api/version", ollama_models.version, "The version of Ollama's API"),
    reads(
        "/api/pull",
        ollama_pull.pull,
        "Download a model, with --allow-downloads",
        ollama_schema.OllamaPullRequest,
        answer_type=LINES,
    ),
    post("/api/push", ollama_models.refuse, "Always refused"),
    post("/api/create", ollama_models.refuse, "Always refused"),
    post("/api/copy", ollama_models.refuse, "Always refused"),
    delete("/api/delete", ollama_models.refuse, "Always refused"),
    get(
        "/",
        ollama_models.root,
        "The page; on the port of --ollama-port: whether Ollama runs",
        answer_type=HTML,
        access=Access.OPEN,
    ),
)

API = Api(ENDPOINTS, ERRORS)
