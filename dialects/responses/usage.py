"""The usage of a Response, made of a chat completion's.

Source: OpenAI's published schema (github.com/openai/openai-openapi), ResponseUsage.
"""

from values import as_dict, figure


def usage_of(usage, tokens, thoughts):
    """The usage for the client, whose schema leaves no figure out.

    usage             the engine's, or None
    tokens, thoughts  what was counted here: tokens of the answer, and those of them that are
                      reasoning; for what the engine doesn't say
    """
    usage = as_dict(usage)
    prompt = usage.get("prompt_tokens_details")
    completion = usage.get("completion_tokens_details")
    read = figure(usage, "prompt_tokens", 0)
    written = figure(usage, "completion_tokens", tokens)
    return {
        "input_tokens": read,
        "output_tokens": written,
        "total_tokens": read + written,
        "input_tokens_details": {
            "cached_tokens": min(figure(prompt, "cached_tokens", 0), read),
            "cache_write_tokens": figure(prompt, "created_cache_tokens", 0),
        },
        "output_tokens_details": {
            "reasoning_tokens": min(figure(completion, "reasoning_tokens", thoughts), written)
        },
    }
