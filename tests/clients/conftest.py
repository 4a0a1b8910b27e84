"""Fixtures for what several clients need."""
import os

import pytest


@pytest.fixture
def no_proxy(monkeypatch):
    """An environment from which no SDK takes an address or a key."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith(("OPENAI_", "ANTHROPIC_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def client(shared, no_proxy):
    """OpenAI's SDK."""
    import openai
    with openai.OpenAI(base_url=shared.url + "/v1", api_key=shared.key, max_retries=0, timeout=20) as client:
        yield client
