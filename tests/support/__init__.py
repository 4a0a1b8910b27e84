"""What the tests stand on: the gateway as a process, clients, scripted and real engines, tiny models."""
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
