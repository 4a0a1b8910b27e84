"""OpenAI's Agents SDK against the gateway, over Responses, with nothing stored."""
import asyncio
import json

import pytest

from support.engine import Json, chat_chunks, completion
from support.real_engines import EXACT

pytestmark = pytest.mark.clients
MODEL = "GLM-5.3-Flash-EXL3"


@pytest.fixture
def agent(shared, monkeypatch):
    """agent(**fields): an Agent whose model is behind the gateway."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    import agents
    from openai import AsyncOpenAI
    from openai.types.shared import Reasoning

    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(store=False, response_include=["reasoning.encrypted_content"],
                                    reasoning=Reasoning(effort="high", summary="auto"))

    def agent(front=shared, model=MODEL, **fields):
        client = AsyncOpenAI(base_url=front.url + "/v1", api_key=front.key, max_retries=0)
        return agents.Agent(name="Helper", instructions="Be brief.", model_settings=settings,
                            model=agents.OpenAIResponsesModel(model=model, openai_client=client), **fields)
    return agent


def weather():
    import agents

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"
    return get_weather


def test_a_prompt(shared, agent):
    import agents
    result = asyncio.run(agents.Runner.run(agent(), "Hello"))
    assert result.final_output == "Hello there"
    assert shared.engine.requests[-1].json()["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.input_tokens, usage.output_tokens) == (1, 15, 7)


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_and_reasoning(shared, agent, streamed):
    import agents
    call = {"reasoning": "I look", "tools": [("get_weather", {"city": "Paris"})]}
    shared.engine.play(*(chat_chunks(None, **call, usage=True) if streamed else [Json(completion(None, **call))]))

    async def run():
        if not streamed:
            return await agents.Runner.run(agent(tools=[weather()]), "Weather?")
        result = agents.Runner.run_streamed(agent(tools=[weather()]), "Weather?")
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(run())
    assert result.final_output == "Hello there"
    turn, answer = shared.engine.requests[-1].json()["messages"][2:]
    assert turn["reasoning_content"] == "I look" and json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert (answer["tool_call_id"], answer["content"]) == (turn["tool_calls"][0]["id"], "sunny in Paris")


def test_a_handoff_and_a_second_turn(shared, agent):
    import agents
    other = agent(handoff_description="Knows the weather")
    other.name = "Weather"
    shared.engine.play(Json(completion(None, tools=[("transfer_to_weather", "{}")])))

    async def run():
        result = await agents.Runner.run(agent(handoffs=[other]), "Weather?")
        assert result.last_agent.name == "Weather"
        return await agents.Runner.run(result.last_agent, [*result.to_input_list(), {"role": "user", "content": "And then?"}])

    assert asyncio.run(run()).final_output == "Hello there"
    roles = [message["role"] for message in shared.engine.requests[-1].json()["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


def test_a_typed_answer(shared, agent):
    import agents
    import pydantic

    class Place(pydantic.BaseModel):
        city: str

    shared.engine.play(Json(completion(['{"city": "Paris"}'])))
    result = asyncio.run(agents.Runner.run(agent(output_type=Place), "Where?"))
    assert result.final_output == Place(city="Paris")
    assert shared.engine.requests[-1].json()["response_format"]["type"] == "json_schema"


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_real_vllm(gateway, vllm, agent):
    """A prompt, and a turn with a tool. With --run-clients and --run-vllm."""
    import agents
    front = gateway(upstream=vllm, wait="alive", config=EXACT).wait_ready()

    async def run():
        plain = await agents.Runner.run(agent(front, "glm-tiny"), "say @answer")
        return plain, await agents.Runner.run(agent(front, "glm-tiny", tools=[weather()]), "say @tool")
    plain, turn = asyncio.run(run())
    assert "PINEAPPLE-4711" in plain.final_output
    assert [item.type for item in turn.new_items].count("tool_call_output_item") == 1 and turn.final_output
