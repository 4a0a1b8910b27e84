"""Other gateways from PyPI, each in an environment of its own in .venv-peers/.

They stand in front of the same engine, set up as their own pages say for one engine, one worker and
a key. They do less or more than Sparks, so their figures say what people pay elsewhere, not who is
better. What cannot be installed or started is said and left out.
"""

import json
import os
import subprocess
import sys
import urllib.request

from .stage import HOME, Missing, free_port

FOLDER = HOME / ".venv-peers"
SECONDS = 300  # for installing one


def install(name, package):
    """The bin folder of an environment that has the package. Raises Missing."""
    home = FOLDER / name
    if (home / "installed").exists():
        return home / "bin"
    print(f"installing {package}", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=60)
        subprocess.run(
            [
                home / "bin" / "python",
                "-m",
                "pip",
                "install",
                "--quiet",
                "--only-binary",
                ":all:",
                "--disable-pip-version-check",
                package,
            ],
            check=True,
            timeout=SECONDS,
            capture_output=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise Missing(f"{package} cannot be installed: {error}") from None
    (home / "installed").touch()
    return home / "bin"


def litellm(stage):
    bin, port, conf = (
        install("litellm", "litellm[proxy]"),
        free_port(),
        stage.folder / "litellm.yaml",
    )
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": f"openai/{name}",
                "api_key": "none",
                "api_base": f"http://127.0.0.1:{stage.engine_port}/v1",
            },
        }
        for name in ("fake", "fake@50")
    ]
    conf.write_text(
        json.dumps({"model_list": models, "general_settings": {"master_key": stage.key}})
    )
    command = [
        bin / "litellm",
        "--config",
        conf,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--num_workers",
        1,
    ]
    stage.serve("litellm", command, "/health/liveliness", port, environment(bin), stage.folder)


def vllm_router(stage):
    bin, port = install("vllm-router", "vllm-router"), free_port()
    command = [
        bin / "vllm-router",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--policy",
        "round_robin",
        "--worker-urls",
        f"http://127.0.0.1:{stage.engine_port}",
        "--prometheus-port",
        free_port(),
    ]
    stage.serve("vllm-router", command, "/health", port, environment(bin), stage.folder)


def smol(stage):
    bin, port = install("smol-llm-proxy", "smol-llm-proxy"), free_port()
    engine = {
        "name": "engine",
        "url": f"http://127.0.0.1:{stage.engine_port}",
        "models": ["fake", "fake@50"],
    }
    (stage.folder / "config.yaml").write_text(json.dumps({"servers": [engine], "aliases": {}}))
    env = {
        **environment(bin),
        "ADMIN_KEY": stage.key,
        "PROXY_HOST": "127.0.0.1",
        "PROXY_PORT": str(port),
        "CONFIG_PATH": str(stage.folder / "config.yaml"),
        "DB_PATH": str(stage.folder / "smol.db"),
    }
    command = [bin / "smol-llm-proxy"]
    target = stage.serve("smol-llm-proxy", command, "/health", port, env, stage.folder)
    made = admin(target, "POST", "/admin/keys", {"name": "bench"})
    admin(
        target,
        "PUT",
        f"/admin/keys/{made.get('id', 1)}/limits",
        {"rpm_limit": 10**9, "tpm_limit": 10**9},
    )
    target.key = made["key"]


def admin(target, method, path, body):
    headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:{target.port}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        request, timeout=10
    ) as answer:
        return json.load(answer)


def environment(bin):
    """Without what would lead elsewhere: proxies, Sparks' own settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SPARKS_") and not name.lower().endswith("_proxy")
    }
    return {**kept, "PATH": f"{bin}:{kept.get('PATH', '')}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


ALL = (litellm, vllm_router, smol)
