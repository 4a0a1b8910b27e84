"""The one table of what Sparks serves.

The front finds a path's dialect in it, the small views are registered from it, /help and the 404
message list it.
"""

from types import ModuleType
from typing import NamedTuple

from dialects import chat, completions, embeddings, messages
from dialects.messages import count
from dialects.responses import Responses


class Route(NamedTuple):
    """A way in.

    path     with its parameters in braces
    purpose  one line of Markdown for people
    dialect  for a route that asks a model, what reads its requests and writes its answers (see
             dialects/__init__.py): a module; or the class Responses, which front.app makes one of
    """

    method: str
    path: str
    purpose: str
    dialect: ModuleType | type | None = None

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
    Route("POST", "/v1/chat/completions", "Chat, streaming, tools, images", chat),
    Route(
        "POST",
        "/v1/messages",
        "Anthropic's Messages: chat, streaming, tools, images, thinking",
        messages,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "How many tokens such a request has; no model runs, no limit counts it",
        count,
    ),
    Route(
        "POST",
        "/v1/responses",
        "OpenAI's Responses, for Codex and the Agents SDK; nothing is stored",
        Responses,
    ),
    Route("POST", "/v1/completions", "Text completions of a prompt, streaming", completions),
    Route(
        "POST",
        "/v1/embeddings",
        "Vectors for texts, where an embedding model is loaded",
        embeddings,
    ),
    Route("GET", "/v1/usage", "What your own key has used, and its limits"),
    Route("GET", "/metrics", "For Prometheus; from this machine, or with an admin's key"),
    Route("GET", "/help", "This document (no key needed)"),
    Route("GET", "/llms.txt", "This document (no key needed)"),
    Route("GET", "/healthz", 'Liveness only: `{"ok": true}` (no key needed)'),
]
NOT_SUPPORTED = ["audio", "image generation", "files", "batches", "fine-tuning", "moderation"]


def existing():
    """All routes in a line, for whoever asked for another one."""
    return ", ".join(f"{route.method} {route.path}" for route in ROUTES)
