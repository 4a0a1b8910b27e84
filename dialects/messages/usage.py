"""Anthropic's usage, made of a chat completion's.

Source: Anthropic's reference of POST /v1/messages, `usage`.
"""

from values import as_dict, figure

# What the reference always has, and has as null where nothing is known: of a message's usage, in
# which two figures are never null, and of a message_delta's.
UNKNOWN = {
    **dict.fromkeys(
        (
            "cache_creation",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
            "inference_geo",
            "output_tokens_details",
            "server_tool_use",
            "service_tier",
            "speed",
        )
    ),
    "input_tokens": 0,
    "output_tokens": 0,
}
UNKNOWN_IN_DELTA = dict.fromkeys(
    (
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens_details",
        "server_tool_use",
    )
)


# What it says of a service tier, see dialects.Ask.
TIERS = {None: None, "default": "standard", "flex": "batch"}


def usage_of(usage, own_figures):
    """The usage for the client.

    usage        the engine's: an object, or anything else where it gave none
    own_figures  what was counted here, in the same names, for what the engine doesn't say; what
                 isn't there either is left out
    """
    usage = as_dict(usage)
    out = {}
    prompt_tokens = figure(usage, "prompt_tokens", own_figures.get("prompt_tokens"))
    if prompt_tokens is not None:
        out |= input_figures(prompt_tokens, usage.get("prompt_tokens_details"))
    completion_tokens = figure(usage, "completion_tokens", own_figures.get("completion_tokens"))
    if completion_tokens is not None:
        out["output_tokens"] = completion_tokens
    thoughts = figure(usage.get("completion_tokens_details"), "reasoning_tokens")
    if thoughts is not None:
        out["output_tokens_details"] = {"thinking_tokens": thoughts}
    return out


def input_figures(prompt_tokens, details):
    """Three figures that add up to the prompt: what the cache gave, what it took in, the rest."""
    cached = figure(details, "cached_tokens")
    read = min(cached or 0, prompt_tokens)
    created = min(figure(details, "created_cache_tokens", 0), prompt_tokens - read)
    figures = {
        "input_tokens": prompt_tokens - read - created,
        "cache_creation_input_tokens": created,
    }
    if cached is not None:
        figures["cache_read_input_tokens"] = read
    return figures
