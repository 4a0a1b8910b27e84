"""OpenAI's Responses API, stateless: what a request says is all that is known.

    read     input.py and tools.py make a chat of the request, fields.py and echo.py read the rest
    write    events.py: a plain answer is the Response that a stream's events add up to
    refusal  OpenAI's shape

Source: OpenAI's published schema (github.com/openai/openai-openapi), CreateResponse;
what Codex sends.
"""

from dialects import sampling
from dialects.chat import collected
from dialects.engine import engine_chat
from dialects.history import Ignored
from dialects.read import hold_back, parse, typed
from dialects.responses.compaction import CompactionStream, ask_for_summary, is_asked
from dialects.responses.echo import echo_of, written_echo
from dialects.responses.events import Options, ResponseStream
from dialects.responses.fields import chat_fields, read_include, read_reasoning
from dialects.responses.input import messages_of
from dialects.responses.tools import Toolbox
from errors import InvalidRequest, error_body
from values import dumps

NOT_KEPT = (
    "nothing is stored here, so an answer cannot be built on an earlier one; "
    "send all items in `input`, with store: false"
)
STORED = {  # fields that only make sense where answers are stored
    "previous_response_id": NOT_KEPT,
    "conversation": NOT_KEPT,
    "background": "nothing is stored here, so there would be nowhere to fetch the answer; "
    "set stream: true instead",
    "prompt": "prompt templates are not stored here; send their text as `instructions` and `input`",
}
# What the engine gets in other words or not at all; every other field goes through as it is.
OWN = (
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "max_output_tokens",
    "top_logprobs",
    "include",
    "store",
    "metadata",
    "client_metadata",
    "truncation",
    "service_tier",
    "max_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "context_management",
    "moderation",
    "stream",
    "stream_options",
    "reasoning",
    "n",
    "messages",
    *STORED,
)
PARAMS = {  # a field of the engine's request -> the client's name of it
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


class Responses:
    """The dialect. It is given what it must not fetch by itself:

    clock       gives the time, in epoch seconds
    new_token   gives hexadecimal digits, others each time
    seal        encrypts and decrypts reasoning that a client keeps, with encrypt(text) and
                decrypt(token); None: none is given and none is read
    """

    def __init__(self, clock, new_token, seal=None):
        self.clock = clock
        self.new_token = new_token
        self.seal = seal

    def read(self, body, fleet):
        """A request's body (bytes) as an Ask. Raises Refusal."""
        return self.read_payload(parse(body), fleet)

    def read_payload(self, payload, fleet):
        """The same of a body that was parsed."""
        refuse_stored(payload)
        streams = typed(payload, "stream", bool, "true or false") or False
        typed(payload, "stream_options", dict, "an object")
        typed(payload, "model", str, "a text")
        ignored = Ignored()
        hold_back(payload, ignored)
        box = Toolbox(payload, ignored)
        reasoning = read_reasoning(payload)
        include = read_include(payload)
        chat = {
            "messages": messages_of(payload, box, self.seal and self.seal.decrypt, ignored),
            **box.fields,
            **chat_fields(payload, include),
            "service_tier": payload.get("service_tier"),
        }
        if payload.get("reasoning"):
            chat["reasoning"] = payload["reasoning"]
        echo = echo_of(payload, box, reasoning)
        options = self.options(box, reasoning, include, chat)
        stream = self.stream_for(payload, options, chat)
        passed = passed_on(payload, chat)
        if streams:
            passed["stream"] = True
        ask = engine_chat(
            passed | chat,
            fleet,
            ignored,
            (lambda names, model: stream) if streams else None,
            response_stream=stream,
        )
        echo = {"model": ask.model.id, **echo, "service_tier": ask.tier or "default"}
        stream.echo = ask.echo = written_echo(echo)
        return ask

    def stream_for(self, payload, options, chat):
        """What writes the answer. A chat that is to be made short is changed to ask for it."""
        if not self.seal or not is_asked(payload):
            return ResponseStream(self.new_token(), options)
        ask_for_summary(chat)
        return CompactionStream(self.new_token(), options._replace(encrypt=self.seal.encrypt))

    def options(self, box, reasoning, include, chat):
        """What the request asks of the writing."""
        encrypted = self.seal and "reasoning.encrypted_content" in include
        return Options(
            clock=self.clock,
            tools=box.names,
            summary=reasoning["summary"] is not None,
            encrypt=self.seal.encrypt if encrypted else None,
            logprobs="logprobs" in chat,
        )

    def write(self, answer, ask):
        """(the client's bytes, the usage) of an engine's answer.

        answer  a chat completion (a dict), or the bytes of a stream that nobody asked for
        """
        stream = ask.extra["response_stream"]
        if not isinstance(answer, dict):
            answer = collected(answer, ask.oddities)
        stream.oddities = ask.oddities
        stream.own_figures = ask.own_figures
        stream.writer.plain = True
        stream.feed_plain(answer)
        stream.end()
        return stream.response, stream.usage

    def refusal(self, error):
        """The body for a Refusal, which names the field as the client knows it."""
        body = error_body(error)
        body["error"]["param"] = PARAMS.get(error.param, error.param)
        return dumps(body)


def refuse_stored(payload):
    for name, reason in STORED.items():
        if payload.get(name) not in (None, False):
            raise InvalidRequest(f"{name} is not supported: {reason}", name)


def passed_on(payload, chat):
    """The fields of the request that go to the engine as they are.

    chat  those that it gets anew: beside a length of its own no other name of the length may stay
    """
    own = OWN
    if "max_tokens" in chat:
        own += sampling.LENGTH_NAMES
    return {name: value for name, value in payload.items() if name not in own}
