"""Chat completions: what a client sends, and what is in an answer."""

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
# What the routes that answer in words are asked, at least.
ROUTES = {PATH: {"messages": HELLO}, "/v1/completions": {"prompt": "Hello"}, "/v1/messages": {"messages": HELLO, "max_tokens": 9},
          "/v1/responses": {"input": "Hello"}}
PNG = "data:image/png;base64,iVBORw0KGgo="
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}


def deltas(answer):
    """The chunks' deltas, to the end of the stream, which must be [DONE]."""
    events = [event for event in answer.events() if event.comment is None]
    assert events[-1].data == "[DONE]"
    return [choice["delta"] for event in events[:-1] for choice in event.json()["choices"]]


def text_of(answer, name="content"):
    return "".join(delta.get(name) or "" for delta in deltas(answer))


def failure(answer):
    """The error that ends a stream, which must be its last event."""
    events = [event for event in answer.events() if event.comment is None]
    return events[-1].json()["error"], events[:-1]
