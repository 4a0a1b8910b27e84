"""The usage of a Response, made of a chat completion's.

Source: OpenAI's published schema (github.com/openai/openai-openapi), ResponseUsage.
"""

from values import as_dict, figure


def usage_of(usage, own_figures):
    """The usage for the client, whose schema leaves no figure out.

    usage        the engine's, or None
    own_figures  what was counted here, for what the engine doesn't say: prompt_tokens,
                 completion_tokens, reasoning_tokens; 0 where these aren't there either
    """
    usage = as_dict(usage)
    prompt = usage.get("prompt_tokens_details")
    completion = usage.get("completion_tokens_details")
    read = figure(usage, "prompt_tokens", own_figures.get("prompt_tokens", 0))
    written = figure(usage, "completion_tokens", own_figures.get("completion_tokens", 0))
    thoughts = figure(completion, "reasoning_tokens", own_figures.get("reasoning_tokens", 0))
    return {
        "input_tokens": read,
        "output_tokens": written,
        "total_tokens": read + written,
        "input_tokens_details": {
            "cached_tokens": min(figure(prompt, "cached_tokens", 0), read),
            "cache_write_tokens": figure(prompt, "created_cache_tokens", 0),
        },
        "output_tokens_details": {"reasoning_tokens": min(thoughts, written)},
    }
