"""How long a request to Anthropic's Messages is, before anybody asks a model.

Source: the gateway's specification, pages 3 and 4;
Anthropic's reference of POST /v1/messages/count_tokens.
"""

from dialects.engine import count_only
from dialects.history import Ignored
from dialects.messages import read_prompt, refusal
from dialects.read import parse
from values import dumps

__all__ = ["read", "write", "refusal"]


def read(body, fleet):
    """A request's body, with or without max_tokens, as an Ask that is only counted."""
    ignored = Ignored()
    payload, *_ = read_prompt(parse(body), fleet, ignored)
    return count_only(payload, fleet, ignored)


def write(tokens, ask):
    """(the client's bytes, no usage) of a number of tokens."""
    return dumps({"input_tokens": tokens}), None
