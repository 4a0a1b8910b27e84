"""LangChain's chat models as langchain-tests wants to be told of them. Runs in the suite's own virtual environment, with
SPARKS_URL, SPARKS_KEY and SPARKS_MODEL_ID in the environment."""
import base64
import os

import httpx
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["SPARKS_URL"]
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
# The suite fetches its pictures from the internet with this.
httpx.get = lambda *_, **__: httpx.Response(200, content=PNG)


class Chat(ChatModelIntegrationTests):
    supports_image_inputs = supports_image_tool_message = supports_json_mode = True
    supports_model_override = True
    model_override_value = os.environ["SPARKS_MODEL_ID"]

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": "gpt-5", "base_url": f"{URL}/v1", "api_key": os.environ["SPARKS_KEY"], "max_retries": 0}


class TestCompletions(Chat):
    @property
    def chat_model_params(self):
        return {**super().chat_model_params, "use_responses_api": False, "stream_usage": True}


class TestResponses(Chat):
    @property
    def chat_model_params(self):
        return {**super().chat_model_params, "use_responses_api": True}


class TestMessages(Chat):
    supports_json_mode = False
    supports_anthropic_inputs = True

    @property
    def chat_model_class(self):
        return ChatAnthropic

    @property
    def chat_model_params(self):
        return {"model": "claude-sonnet-4-5", "base_url": URL, "api_key": os.environ["SPARKS_KEY"], "max_retries": 0}
