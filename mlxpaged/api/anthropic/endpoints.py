"""The endpoints of Anthropic's API."""

from __future__ import annotations

from mlxpaged.api.anthropic import messages
from mlxpaged.api.anthropic.errors import ERRORS
from mlxpaged.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxpaged.api.endpoint import Api, generates, reads

ENDPOINTS = (
    generates("/v1/messages", messages.respond, "Answer a conversation, as Anthropic's API does", MessagesRequest),
    reads("/v1/messages/count_tokens", messages.count_tokens, "Count a conversation's tokens", CountTokensRequest),
)

API = Api(ENDPOINTS, ERRORS)
