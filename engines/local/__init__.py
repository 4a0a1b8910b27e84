"""llama.cpp's own server with a small chat model, and once more with an embedding model: engines
for a machine without one (`./run.sh --local`).

server.py   the server: a process of its own for each of the COMMANDS
process.py  the gateway's side: keeps such a process running
gguf.py     makes the embedding model's file

Here is what both sides know.
"""

import socket

from settings import EngineEntry, ModelEntry

COMMANDS = ("serve", "embed")  # one engine each, in the order of settings.engines
MODEL_ID = "smollm2-135m-instruct"
EMBEDDING_ID = "all-minilm-l6-v2"
HOST = "127.0.0.1"
SLOTS = 2

TRY_IT = """
{first_key}The model is loaded. Try it:

  curl -s {address}/v1/chat/completions -H "Authorization: Bearer {key}" \\
    -d '{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
"""


def free_port():
    """A port on which nothing listens on 127.0.0.1."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


def adopt(settings, upstream=None):
    """Turn the settings to engines of ours: those at `upstream`, or new ones on free ports."""
    settings.upstream = upstream or [f"http://{HOST}:{free_port()}" for _ in COMMANDS]
    settings.engines = [EngineEntry(url) for url in settings.upstream]
    settings.upstream_key = None
    settings.max_active = min(settings.max_active, SLOTS)
    if settings.models:
        return
    chat_id = settings.model or MODEL_ID
    settings.models = [
        ModelEntry(chat_id, engine=MODEL_ID, default=True, effort="qwen"),
        ModelEntry(
            EMBEDDING_ID, engine=EMBEDDING_ID, kind="embedding", aliases=["text-embedding-*"]
        ),
    ]


def greeting(address, first_key):
    """What to paste into a shell now that the model answers. `first_key`: a key that was made just
    now and is shown this once, or None."""
    if first_key:
        shown = f"Your first key, shown this once: {first_key}\n\n"
        return TRY_IT.format(address=address, first_key=shown, key=first_key)
    return TRY_IT.format(address=address, first_key="", key="$SPARKS_API_KEY")
