"""What fails in each suite, and why that is right. docs/compatibility.md has the same for people."""

OPTIONAL_MODEL = "a request without a model is answered by the default model, where the suite wants a 400"

MISSES = {
    "llm-comply openai-chat": {"chat-error-handling": OPTIONAL_MODEL},
    "llm-comply open-responses": {"error-handling": OPTIONAL_MODEL},
}
