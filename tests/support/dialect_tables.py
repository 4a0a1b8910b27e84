"""What the tables of several dialects need: a fleet of one model, what goes to the engine, any JSON."""
import json

from hypothesis import strategies as st

from engines.models import Model
from errors import ModelNotFound

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["role", "content", "type", "text", "image_url", "url", "tool_calls",
                                         "function", "name", "arguments", "id",
                                         "effort", "include_usage", "enable_thinking", "detail", "reasoning"])
                        | st.text(max_size=3), inner, max_size=4),
                    max_leaves=12)


class Fleet:
    """Knows the default model, "known", and remembers what it was asked for."""

    def __init__(self, **model):
        self.model, self.asked = Model(**{"id": "model", "engine_id": "engine/model", **model}), []

    def models(self):
        return [self.model]

    def find(self, name):
        self.asked.append(name)
        if name in (None, "known"):
            return self.model
        raise ModelNotFound(f"there is no model {name!r} here", "model")


def sent(one):
    """What goes to the engine."""
    return json.loads(b"".join(part if isinstance(part, bytes) else part.encode() for part in one.body))


def check_refusal(error, param, *words):
    assert (error.status, error.code, error.type) == (400, "invalid_request", "invalid_request_error")
    assert error.param == param
    assert all(word in error.message for word in words), error.message
