"""How long a request to Anthropic's Messages is, before anybody asks a model.

Source: the gateway's specification, pages 3 and 4; Anthropic's reference of POST /v1/messages/count_tokens.
"""

from dialects.engine import count_only
from dialects.read import parse
from dialects.messages import read_prompt
from dialects.messages.events import refusal  # noqa: F401, part of a dialect
from stream import dumps


def read(body, fleet):
    """The body of a message, with or without max_tokens, as an Ask that is only counted. Raises Refusal."""
    payload, *_ = read_prompt(parse(body), fleet)
    return count_only(payload, fleet)


def write(tokens, ask):
    return dumps({"input_tokens": tokens}), None
