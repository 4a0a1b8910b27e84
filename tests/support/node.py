"""Programs that run on Node: their packages, and the SDKs that tests/support/oracle_node drives."""
import fcntl
import json
import shutil
import subprocess

import pytest

from support import SUPPORT
from support.processes import clean_environment


def npm_packages(folder):
    """The folder of a package.json whose packages, as its lock file pins them, are installed beside it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        pytest.fail("node or npm is missing; these tests need Node 20 or newer (apt install nodejs npm)", pytrace=False)
    pinned, mark = (folder / "package-lock.json").read_bytes(), folder / "node_modules" / ".installed"
    with open(folder / "package-lock.json") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)           # another worker of pytest-xdist may want them at the same time
        if not mark.exists() or mark.read_bytes() != pinned:
            _install(npm, folder)
            mark.write_bytes(pinned)
    return folder


def _install(npm, folder):
    done = subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, timeout=600,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"npm could not install what {folder.name} needs:\n{done.stderr[-2000:]}", pytrace=False)


def node_asker(script, address, key):
    """ask(case, retries=0, key=key, **fields of the request): what a script of oracle_node printed, as an object."""
    folder = npm_packages(SUPPORT / "oracle_node")
    usual = {name: value for name, value in clean_environment().items() if not name.startswith(("OPENAI_", "ANTHROPIC_", "NODE_"))}

    def ask(case, retries=0, key=key, **fields):
        environment = {**usual, "SPARKS_BASE_URL": address, "SPARKS_API_KEY": key, "RETRIES": str(retries)}
        done = subprocess.run([shutil.which("node"), script, case, json.dumps(fields)], cwd=folder, env=environment, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    return ask


def node_result(said):
    assert "result" in said, said
    return said["result"]
