"""Download every wheel that requirements.txt pins, for each machine and Python that Sparks supports."""
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent.parent / "requirements.txt"
MACHINES = ["x86_64", "aarch64"]
PYTHONS = ["3.11", "3.12", "3.13"]
NEWEST_GLIBC = 35                                   # 2.35, of Ubuntu 22.04; Debian 12 and DGX OS have later ones


def platforms(machine):
    names = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(5, NEWEST_GLIBC + 1))]
    return [f"--platform={name}_{machine}" for name in names]


def download(machine, python):
    """pip's word on what is missing, or "" when all wheels are there."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes",
             "--no-deps", "--only-binary=:all:", f"--python-version={python}", *platforms(machine),
             "-d", folder, "-r", REQUIREMENTS], stderr=subprocess.PIPE, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def main():
    missing = 0
    for machine in MACHINES:
        for python in PYTHONS:
            trouble = download(machine, python)
            missing += bool(trouble)
            print(f"{machine} Python {python}: {trouble or 'all wheels are there'}", flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
