"""What Sparks serves: the views are registered from this table, /help and the 404 message list it."""

from typing import NamedTuple


class Route(NamedTuple):
    """A way in. `path` names its parameters in braces; `purpose` is one line of Markdown for people."""

    method: str
    path: str
    purpose: str

    @property
    def rule(self):
        """The path as Flask's router takes it; a model's id may hold slashes."""
        return self.path.replace("{id}", "<path:id>")

    @property
    def keyed(self):
        """Whether it wants a key."""
        return self.path.startswith("/v1/")


ROUTES = [
    Route("GET", "/v1/models", "Lists the models that are loaded; an empty list while none is"),
    Route("GET", "/v1/models/{id}", "One model of that list"),
    Route("POST", "/v1/chat/completions", "Chat, streaming, tools, images"),
    Route("POST", "/v1/messages", "Anthropic's Messages: chat, streaming, tools, images, thinking"),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "How many tokens such a request has; no model runs, no limit counts it",
    ),
    Route(
        "POST",
        "/v1/responses",
        "OpenAI's Responses, for Codex and the Agents SDK; nothing is stored",
    ),
    Route("POST", "/v1/completions", "Text completions of a prompt, streaming"),
    Route("POST", "/v1/embeddings", "Vectors for texts, where an embedding model is loaded"),
    Route("GET", "/v1/usage", "What your own key has used, and its limits"),
    Route("GET", "/metrics", "For Prometheus; from this machine, or with an admin's key"),
    Route("GET", "/help", "This document (no key needed)"),
    Route("GET", "/llms.txt", "This document (no key needed)"),
    Route("GET", "/healthz", 'Liveness only: `{"ok": true}` (no key needed)'),
]
NOT_SUPPORTED = ["audio", "image generation", "files", "batches", "fine-tuning", "moderation"]
