"""Fixtures for what several clients need."""
import pytest


@pytest.fixture
def client(shared, no_proxy):
    """OpenAI's SDK."""
    import openai
    with openai.OpenAI(base_url=shared.url + "/v1", api_key=shared.key, max_retries=0, timeout=20) as client:
        yield client
