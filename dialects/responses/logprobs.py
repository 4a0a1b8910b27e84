"""Logprobs of a message, with the fields that OpenAI's schema wants.

Source: OpenAI's published schema (github.com/openai/openai-openapi), LogProb.
"""

import steps
from values import as_list, objects_in

UNLIKELY = -9999.0  # OpenAI's logprob for what is hardly possible: JSON has no infinity


def logprobs_of(text, tokens):
    """The logprobs of a text (a list of dicts).

    tokens  those of its chunk (dicts), where reasoning and the end of the turn stand too
    """
    texts = [str(token.get("token")) for token in steps.paced(tokens)]
    begin = "".join(texts).rfind(text)
    found = []
    position = 0
    for token, token_text in zip(steps.paced(tokens), texts, strict=True):
        if begin < 0 or begin <= position < begin + len(text):
            top = [logprob_of(other) for other in objects_in(token, "top_logprobs")]
            found.append({**logprob_of(token), "top_logprobs": top})
        position += len(token_text)
    return found


def logprob_of(token):
    """A token without its alternatives."""
    text = str(token.get("token"))
    logprob = token.get("logprob")
    if not isinstance(logprob, (int, float)):
        logprob = 0
    raw = as_list(token.get("bytes")) or list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": max(logprob, UNLIKELY), "bytes": raw}
