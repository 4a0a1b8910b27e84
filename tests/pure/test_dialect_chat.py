"""Chat completions as tables: a client's body in, the engine's payload out; an engine's answer in, the client's out."""
import contextlib
import copy
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from dialects import chat, chat_messages
from errors import InvalidRequest, Refusal, UpstreamError
from reasoning import FIELDS
from support.chat import FUNCTION, HELLO, PNG, TOOL
from support.dialect_tables import JSON, Fleet, check_refusal, sent

INSIDE = "http://169.254.169.254/latest/meta-data/"
MISSING = object()


def ask(**fields):
    return {"messages": copy.deepcopy(HELLO), **fields}


def read(body, **model):
    return chat.read(body if isinstance(body, (bytes, bytearray)) else json.dumps(body).encode(), Fleet(**model))


def payload(body, **model):
    """The engine's payload without what is the same in all of them."""
    out = dict(sent(read(body, **model)))
    assert out.pop("model") == "engine/model"
    return out


def refused(body, **model):
    with pytest.raises(Refusal) as caught:
        read(body, **model)
    return caught.value


# ---- what passes, and where to

def test_a_plain_ask():
    fleet = Fleet()
    one = chat.read(b'{"messages":[{"role":"user","content":"Hello"}]}', fleet)
    assert (one.path, one.model, one.stream, fleet.asked) == ("/v1/chat/completions", fleet.model, None, [None])
    assert sent(one) == {"model": "engine/model", "messages": HELLO}


def test_a_bytearray_is_a_body_too():
    assert sent(read(bytearray(b'{"messages":[{"role":"user","content":"Hello"}]}')))["messages"] == HELLO


def test_unknown_fields_pass_untouched():
    odd = {"n": 2, "logprobs": True, "top_logprobs": 5, "seed": 2 ** 53, "stop": ["a", "\u2028"], "temperature": 1e-7,
           "user": "x",
           "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$defs": {}, "a": None}}},
           "vllm_xargs": {"deep": [1, {"er": None}]}, "min_p": 0.1, "top_k": -1, "metadata": {},
           "tool_choice": "required",
           "parallel_tool_calls": False, "logit_bias": {"1": -100}, "cache_salt": "s",
           "chat_template_kwargs": {"custom": [1, 2]},
           "store": None, "functions": [], "": 0, "model": "known"}
    assert payload(ask(**odd)) == {name: value for name, value in ask(**odd).items() if name != "model"}


def test_fields_of_messages_and_parts_pass_too():
    messages = [{"role": "user", "name": "Ann", "odd": {"a": 1}, "content": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": PNG}, "uuid": "u"}]},
        {"role": "tool", "tool_call_id": "A", "content": "1", "odd": None}]
    assert payload({"messages": messages}) == {"messages": messages}


# ---- the body

NO_JSON = [
    b"", b" ", b"{", b"hello", b"{]", b'{"messages":[}', b'{"a":1}{', b"'a'", b"\xef\xbb\xbf{}", b"\x00",
    b'{"a":"\xff"}', b'{"\xc3\x28":1}',
    b'{"a":"\xed\xa0\xbd"}', rb'{"a":"\ud83d"}', rb'{"messages":[{"role":"user","content":"\udc00"}]}', b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":-Infinity}', b'{"a":1e999}', b'{"a":-1e999}', b'{"a":' + b"9" * 400 + b"}", b'{"a":01}', b'{"a":1,}',
    b'{"a":"\n"}', b'{a:1}',
    b"[" * 100000, b'{"a":' * 100000, b"[" * 100000 + b"]" * 100000, '{"a":1}'.encode("utf-16"),
]


def test_bodies_that_are_no_json(subtests):
    for body in NO_JSON:
        with subtests.test(repr(body[:20])):
            check_refusal(refused(body), None, "JSON")


def test_bodies_that_are_no_object(subtests):
    for body in [b"[]", b"null", b"1", b'"x"', b"true", b'[{"messages":[]}]']:
        with subtests.test(repr(body)):
            check_refusal(refused(body), None, "the body must be a JSON object")


def test_deep_nesting_is_read_or_refused(subtests):
    for depth in [50, 200, 253, 254, 255, 300, 900, 1000, 1015, 1020, 1024, 1030]:
        with subtests.test(depth):
            body = b'{"messages":[{"role":"user","content":"a"}],"x":' + b"[" * depth + b"]" * depth + b"}"
            try:
                assert sent(read(body))["x"] is not None
            except InvalidRequest as error:
                check_refusal(error, None)


def test_deep_nesting_in_arguments_is_sent_on_or_refused(subtests):
    for depth in [200, 254, 300, 900, 990, 1000, 1015, 1020, 1024, 2000, 100000]:
        with subtests.test(depth):
            arguments = "[" * depth + "]" * depth
            body = ask()
            body["messages"].append({"role": "assistant",
                                     "tool_calls": [{"id": "A", "function": {"name": "f", "arguments": arguments}}]})
            try:
                assert payload(body)["messages"][1]["tool_calls"]
            except InvalidRequest as error:
                check_refusal(error, "messages")


def test_of_double_keys_the_last_one_counts():
    assert payload(b'{"messages":[],"seed":1,"messages":[{"role":"user","content":"a"}],"seed":2}') == {
        "messages": [{"role": "user", "content": "a"}], "seed": 2}


def test_huge_numbers_are_no_fault_of_ours(subtests):
    for number in ("18446744073709551615", "18446744073709551616", "-9223372036854775809", "1e308", "-0.0", "1" * 300):
        with subtests.test(number):
            assert payload(b'{"messages":[{"role":"user","content":"a"}],"seed":' + number.encode()
                           + b"}")["seed"] == pytest.approx(float(number))


# ---- fields of the wrong type; null counts as absent

WRONG = [0, 1.5, "x", [], {}, True]


@pytest.mark.parametrize("field, right, hint", [
    ("stream", (bool,), "true or false"), ("stream_options", (dict,), "an object"), ("model", (str,), "a text"),
    ("tools", (list,), "a list"),
    ("chat_template_kwargs", (dict,), "an object"), ("reasoning", (dict,), "an object"),
    ("think", (bool,), "true or false"),
    ("reasoning_effort", (), "one of"),
])
def test_wrong_types(field, right, hint):
    for value in WRONG:
        if not isinstance(value, right):
            check_refusal(refused(ask(**{field: value})), field, field, hint)


@pytest.mark.parametrize("value", [0, 1, "yes", "false", [], {}])
def test_include_usage_of_the_wrong_type(value):
    check_refusal(refused(ask(stream=True, stream_options={"include_usage": value})), "stream_options.include_usage",
                  "stream_options.include_usage must be true or false")


NULLS = ["stream", "stream_options", "model", "tools", "tool_choice", "max_tokens",
         "max_completion_tokens",
         "repeat_penalty", "reasoning_effort", "reasoning", "think", "chat_template_kwargs",
         "n"]


def test_null_counts_as_absent(subtests):
    for field in NULLS:
        with subtests.test(field):
            for streams in (False, True):
                rest = {"stream": True} if streams and field != "stream" else {}
                left = {name: value for name, value in payload(ask(**rest, **{field: None})).items() if value is not None}
                assert left == payload(ask(**rest))


def test_null_in_messages_counts_as_absent():
    message = {"role": "assistant", "content": None, "tool_calls": None, "reasoning": None, "reasoning_content": None,
               "name": None}
    out, = payload({"messages": [message]})["messages"]
    assert {name: value for name, value in out.items() if value is not None} == {"role": "assistant"}


def test_a_null_penalty_does_not_hide_the_other_name():
    assert payload(ask(repeat_penalty=1.1, repetition_penalty=None))["repetition_penalty"] == 1.1


# ---- stream and its options

@pytest.mark.parametrize("options, asked, usage", [
    (MISSING, {"include_usage": True}, False),
    (None, {"include_usage": True}, False),
    ({}, {"include_usage": True}, False),
    ({"include_usage": None}, {"include_usage": True}, False),
    ({"include_usage": False}, {"include_usage": True}, False),
    ({"include_usage": True}, {"include_usage": True}, True),
    ({"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True, "continuous_usage_stats": True},
     True),
    ({"odd": [1]}, {"include_usage": True, "odd": [1]}, False),
])
def test_usage_is_always_asked(options, asked, usage):
    one = read(ask(stream=True, **({} if options is MISSING else {"stream_options": options})))
    assert sent(one)["stream_options"] == asked and sent(one)["stream"] is True
    assert one.stream.wants_usage is usage


@pytest.mark.parametrize("stream", [MISSING, None, False])
def test_options_without_a_stream(stream):
    given = {} if stream is MISSING else {"stream": stream}
    check_refusal(refused(ask(**given, stream_options={"include_usage": True})), "stream_options",
                  "stream_options needs stream: true")
    check_refusal(refused(ask(**given, stream_options={})), "stream_options")
    assert read(ask(**given, stream_options=None)).stream is None


@pytest.mark.parametrize("field", FIELDS)
def test_the_stream_has_the_models_names(field):
    assert read(ask(stream=True), reasoning_field=field).stream.names == FIELDS[field]
    assert read(ask(), reasoning_field=field).extra["names"] == FIELDS[field]


@pytest.mark.parametrize("n", [2, 3, 2.0, "2"])
def test_a_stream_of_several_choices_looks_into_every_event(n):
    """vLLM also takes 2.0 and "2" for 2: a choice whose finish is overlooked makes a whole answer look broken off."""
    stream = read(ask(stream=True, n=n)).stream

    def event(*choices):
        return b"data: " + json.dumps({"choices": choices}, separators=(",", ":")).encode() + b"\n\n"

    a, b = ({"index": index, "delta": {"content": "a"}, "finish_reason": None} for index in (0, 1))
    stream.feed(event(a) + event(b) + event({**a, "finish_reason": "stop"}, b) + event({**b, "finish_reason": "stop"})
                + b"data: [DONE]\n\n")
    assert stream.end()
    stream = read(ask(stream=True, n=n)).stream
    stream.feed(event(a) + event({**a, "finish_reason": "stop"}, b) + event(b))
    with pytest.raises(UpstreamError):
        stream.end()


# ---- the model

def test_models():
    assert sent(read(ask(model="known")))["model"] == "engine/model"
    error = refused(ask(model="other"))
    assert (error.status, error.param) == (404, "model")


def test_a_mistake_in_the_body_is_told_before_the_model_is_looked_for():
    assert refused({"model": "other", "messages": []}).param == "messages"


# ---- messages

NO_MESSAGES = [
    (MISSING, ["messages is missing"]), (None, ["messages is missing"]), ([], ["at least one message"]),
    ("Hello", ["must be a list"]),
    ({}, ["must be a list"]), (5, ["must be a list"]), (True, ["must be a list"]),
    (["Hello"], ["messages[0]", "object"]), ([None], ["messages[0]", "object"]), ([[]], ["messages[0]", "object"]),
    ([{}], ["messages[0].role"]), ([{"role": None}], ["messages[0].role"]),
    ([{"role": "owner"}], ["messages[0].role", "user", "assistant"]),
    ([{"role": "User", "content": "a"}], ["messages[0].role"]), ([{"role": 5}], ["messages[0].role"]),
    ([{"role": ["user"]}], ["messages[0].role"]),
    ([{"role": {}}], ["messages[0].role"]), (HELLO + [{"role": "bot", "content": "a"}], ["messages[1].role"]),
    ([{"role": "user", "content": 5}], ["messages[0].content"]),
    ([{"role": "user", "content": {}}], ["messages[0].content"]),
    ([{"role": "user", "content": True}], ["messages[0].content"]),
    ([{"role": "user", "content": [5]}], ["messages[0].content[0]"]),
    ([{"role": "user", "content": [None]}], ["messages[0].content[0]"]),
    ([{"role": "user", "content": [[]]}], ["messages[0].content[0]"]),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}], ["messages[0].content[1].text"]),
]


def test_messages_that_are_none(subtests):
    for messages, words in NO_MESSAGES:
        with subtests.test(str(messages)):
            check_refusal(refused({} if messages is MISSING else {"messages": messages}), "messages", *words)


@pytest.mark.parametrize("role, sent", [(role, role) for role in ("system", "user", "assistant", "tool")]
                         + [("developer", "system"), ("function", "tool")])
def test_roles(role, sent):
    message = {"role": role, "content": "a", "tool_call_id": "A"}
    assert payload({"messages": [message]})["messages"] == [{**message, "role": sent}]


@pytest.mark.parametrize("content", ["", "a", None, [], "\u2028\x00", [{"type": "text", "text": ""}]])
def test_contents_that_pass(content):
    messages = [{"role": "user", "content": content}]
    assert payload({"messages": messages})["messages"] == messages


def test_system_messages_stay_where_they_stand():
    messages = [{"role": role, "content": role} for role in ("user", "system", "assistant", "developer", "user")]
    roles = [message["role"] for message in payload({"messages": messages})["messages"]]
    assert roles == ["user", "system", "assistant", "system", "user"]


# -- parts

def part(given):
    """A content part as the engine gets it."""
    message, = payload({"messages": [{"role": "user", "content": [given]}]})["messages"]
    out, = message["content"]
    return out


def image(url=PNG, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


PARTS = [
    ({"type": "text", "text": "a"}, {"type": "text", "text": "a"}),
    ({"type": "input_text", "text": "a"}, {"type": "text", "text": "a"}),
    ({"type": "output_text", "text": "a", "annotations": []}, {"type": "text", "text": "a", "annotations": []}),
    (image(), image()),
    (image(detail="low"), image(detail="low")),
    ({"type": "image_url", "image_url": PNG}, image()),
    ({"type": "input_image", "image_url": PNG}, image()),
    ({"type": "input_image", "image_url": {"url": PNG}}, image()),
    ({"type": "input_image", "image_url": PNG, "detail": "high"}, image(detail="high")),
    ({"type": "input_image", "image_url": {"url": PNG, "detail": "low"}, "detail": "high"}, image(detail="low")),
    ({"type": "input_image", "image_url": PNG, "detail": None}, image()),
    ({"type": "image_url", "image_url": {"url": PNG.replace("data:", "DATA:")}}, image(PNG.replace("data:", "DATA:"))),
    ({"type": "image_url", "image_url": {"url": PNG}, "uuid": "u"}, {**image(), "uuid": "u"}),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}},
     {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}),
    ({"type": "refusal", "refusal": "no"}, {"type": "text", "text": "no"}),
    *(({"type": kind, field: None}, {"type": "text", "text": ""}) for kind, field in chat_messages.TEXTS.items()),
    ({"type": "thinking", "thinking": "hm"}, {"type": "thinking", "thinking": "hm"}),
    # beside a uuid vLLM would go by the address, whatever the type says
    *(({"type": kind, kind: "a", "uuid": "u", "image_url": INSIDE, "video_url": {"url": INSIDE}, "audio_url": INSIDE},
       {"type": kind, kind: "a", "uuid": "u"}) for kind in ("text", "thinking", "image_embeds")),
    ({"type": "image_url", "image_url": {"url": PNG}, "uuid": "u", "video_url": INSIDE}, {**image(), "uuid": "u"}),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}, "uuid": "u", "image_url": INSIDE},
     {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}, "uuid": "u"}),
    ("a", {"type": "text", "text": "a"}),
]


def test_parts(subtests):
    for given, wanted in PARTS:
        with subtests.test(str(given)):
            assert part(given) == wanted


ADDRESSES = ["http://127.0.0.1:8000/metrics", "https://example.org/a.png", "HTTP://169.254.169.254/"]
URLS = ["file:///etc/passwd",
        "ftp://a/b", "/etc/passwd",
        "//example.org/a.png", "a.png", "", " data:image/png;base64,AA==", "\tdata:image/png;base64,AA==", "\ndata:,",
        "dat", "data", "blob:abc", "javascript:1",
        "http:data:image/png", "iVBORw0KGgo=", "httpdata:", "\u0000data:,", "ＤＡＴＡ:image/png"]


def test_addresses_are_refused(subtests):
    """The engine would fetch them, on its own network."""
    for url in URLS:
        with subtests.test(url):
            for given in (image(url), {"type": "image_url", "image_url": url}, {"type": "input_image", "image_url": url},
                          {"type": "input_image", "image_url": {"url": url}}, image(url, detail="low")):
                check_refusal(refused({"messages": [{"role": "user", "content": [given]}]}), "messages",
                              "messages[0].content[0].image_url", "data")


def test_only_images_are_fetched(subtests):
    for url in [*URLS, *ADDRESSES, "data:", "data:,", "data:text/html,<b>", "data:text/html;base64,PGI+", "data:video/mp4,x", "data:audio/wav;base64,"]:
        with subtests.test(url):
            for kind in ("video_url", "audio_url"):
                check_refusal(refused({"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]}),
                              "messages", kind)


@pytest.mark.parametrize("role", ["system", "developer", "assistant", "tool", "function"])
def test_addresses_are_refused_in_every_role(role):
    messages = [{"role": role, "content": [image(URLS[0])]}]
    if role in chat_messages.MADE:                  # that is history
        one = read({"messages": messages})
        assert sent(one)["messages"][0]["content"] == "" and one.ignored == "messages[0].content[0] image_url"
    else:
        check_refusal(refused({"messages": messages}), "messages")


def with_images(*urls, role="user", **fields):
    return {"messages": [{"role": role, "content": [{"type": "text", "text": "look"}, *(image(url) for url in urls)]}], **fields}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_addresses_of_images_are_taken_out(role, streams):
    """They are for the gateway to fetch: a str between the bytes, where the data URL goes."""
    one = read(with_images(*ADDRESSES, PNG, ADDRESSES[0], role=role, stream=streams))
    assert one.images == [*ADDRESSES, ADDRESSES[0]]
    one.fill_in({url: [b"<", b"%b>" % url.encode()] for url in ADDRESSES})
    filled = b"".join(one.body)
    wanted = with_images(*(f"<{url}>" for url in ADDRESSES), PNG, f"<{ADDRESSES[0]}>", role=role)["messages"]
    assert [message["content"] for message in json.loads(filled)["messages"]] == [wanted[0]["content"]]
    assert json.loads(filled)["messages"][0]["content"][1]["image_url"]["url"] == f"<{ADDRESSES[0]}>"


def test_no_words_are_taken_for_an_image():
    text = "image:" + "0" * 64 + " \ue000 " + ADDRESSES[0]
    one = read({"messages": [{"role": "user", "content": [{"type": "text", "text": text}, image(ADDRESSES[0], detail="low")]},
                             {"role": "user", "content": text}]})
    assert one.images == [ADDRESSES[0]]
    filled = json.loads(b"".join(part if isinstance(part, bytes) else b"here" for part in one.body))
    assert filled["messages"] == [{"role": "user", "content": [{"type": "text", "text": text}, image("here", detail="low")]},
                                  {"role": "user", "content": text}]


def test_an_address_beside_numbers_that_only_json_itself_writes():
    one = read({**with_images(ADDRESSES[0]), "seed": 10 ** 30, "messages": with_images(ADDRESSES[0])["messages"]})
    assert one.images == [ADDRESSES[0]]


NO_PARTS = [
    ({"image_url": "http://127.0.0.1/"}, ["type"]), ({"image_url": {"url": "http://127.0.0.1/"}}, ["type"]),
    ({"image_url": PNG}, ["type"]),
    ({"type": None, "image_url": "http://127.0.0.1/"}, ["type"]),
    ({"type": "", "image_url": "http://127.0.0.1/"}, ["type"]),
    ({"type": ["image_url"], "image_url": "http://127.0.0.1/"}, ["type"]), ({"type": {}, "image_url": PNG}, ["type"]),
    ({"video_url": {"url": "http://127.0.0.1/"}}, ["type"]), ({"audio_url": {"url": "http://127.0.0.1/"}}, ["type"]),
    ({"text": "a"}, ["type"]),
    ({"type": "image_url"}, ["image_url", "data URL"]), ({"type": "input_image"}, ["image_url", "data URL"]),
    ({"type": "image_url", "image_url": None}, ["data URL"]), ({"type": "image_url", "image_url": {}}, ["data URL"]),
    ({"type": "image_url", "image_url": {"url": None}}, ["data URL"]),
    ({"type": "image_url", "image_url": {"url": 5}}, ["data URL"]),
    ({"type": "image_url", "image_url": [PNG]}, ["data URL"]), ({"type": "image_url", "image_url": 5}, ["data URL"]),
    ({"type": "input_image", "file_id": "file-1"}, ["data URL"]), ({"type": "image_url", "url": PNG}, ["data URL"]),
    ({"type": "text"}, ["text"]), ({"type": "text", "text": 5}, ["text"]),
    ({"type": "text", "text": ["a"]}, ["text"]), ({"type": "input_text"}, ["text"]),
    ({"type": "output_text", "text": {}}, ["text"]),
    ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, ["audio is not supported"]),
    ({"type": "file", "file": {"file_id": "file-1"}}, ["files are not supported"]),
    ({"type": "file"}, ["files are not supported"]),
    ({"type": "image"}, ["image", "unknown"]), ({"type": "Text", "text": "a"}, ["Text", "unknown"]),
    ({"type": "tool_use"}, ["tool_use", "unknown"]),
    ({"type": "x" * 10000}, ["unknown"]), ({}, ["type"]),
]


def test_parts_that_are_refused(subtests):
    for given, words in NO_PARTS:
        with subtests.test(str(given)[:80]):
            error = refused({"messages": [{"role": "user", "content": ["a", given]}]})
            check_refusal(error, "messages", "messages[0].content[1]", *words)
            assert len(error.message) < 500


def test_a_known_part_does_not_bring_addresses_along():
    """Only the field that the type names is looked at, by us and by the engine."""
    assert part({"type": "text", "text": "a", "image_url": {"url": "http://127.0.0.1/"}})["type"] == "text"
    assert part({**image(), "url": "http://127.0.0.1/"})["image_url"] == {"url": PNG}


# -- a client's own history

REASONED = [
    ({"reasoning": "hm"}, {"reasoning_content": "hm"}),
    ({"reasoning_content": "hm"}, {"reasoning_content": "hm"}),
    ({"reasoning": "hm", "reasoning_content": "hm"}, {"reasoning_content": "hm"}),
    ({"reasoning": None, "reasoning_content": "hm"}, {"reasoning_content": "hm"}),
    ({"reasoning": "hm", "reasoning_content": None}, {"reasoning_content": "hm"}),
    ({"reasoning": "", "reasoning_content": ""}, {}),
    ({"reasoning": None}, {}),
    ({"reasoning": 5}, {"reasoning_content": "5"}), ({"reasoning": {"effort": "low"}}, {}),
    ({"reasoning_content": ["hm"]}, {"reasoning_content": "hm"}),
    ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
     {"content": [{"type": "text", "text": "a"}], "reasoning_content": "hm"}),
]


def test_reasoning_in_history(subtests):
    for given, wanted in REASONED:
        with subtests.test(str(given)):
            message = {"role": "assistant", "content": "a"}
            assert payload({"messages": [*HELLO, {**message, **given}]})["messages"][1] == {**message, **wanted}


def mended(arguments):
    """The arguments of a call in the history, as the engine gets them."""
    function = {"name": "f"} if arguments is MISSING else {"name": "f", "arguments": arguments}
    message = {"role": "assistant", "content": None,
               "tool_calls": [{"id": "A", "type": "function", "function": function, "odd": 1}]}
    out = payload({"messages": [*HELLO, message]})["messages"][1]
    call, = out["tool_calls"]
    arguments = call["function"].pop("arguments")
    assert call == {"id": "A", "type": "function", "function": {"name": "f"}, "odd": 1}
    return arguments


@pytest.mark.parametrize("arguments", ['{}', '{"a": 1}', ' {"a":\n1} ', '{"a":"é\\u2028"}', '{"a":{"b":[null]}}',
                                       '{"a":1,"a":2}'])
def test_sound_arguments_keep_their_bytes(arguments):
    assert mended(arguments) == arguments


BROKEN_ARGUMENTS = [
    (MISSING, {}), (None, {}), ("", {}), (" \n", {}), ("\u00a0", {}),
    ({"a": "é"}, {"a": "é"}), ({}, {}),
    ('{"a":', {"input": '{"a":'}), ('{"a":1}}', {"input": '{"a":1}}'}), ("rm -rf", {"input": "rm -rf"}),
    ("{'a':1}", {"input": "{'a':1}"}),
    ("[1]", {"input": [1]}), ("5", {"input": 5}), ('"a"', {"input": "a"}), ("true", {"input": True}),
    ("null", {"input": None}),
    ([1], {"input": [1]}), ([], {"input": []}), (5, {"input": 5}), (0, {"input": 0}), (1.5, {"input": 1.5}),
    (True, {"input": True}), (False, {"input": False}),
    ('{"a":1}{"b":2}', {"input": '{"a":1}{"b":2}'}),
]


def test_broken_arguments_are_mended(subtests):
    for arguments, wanted in BROKEN_ARGUMENTS:
        with subtests.test(str(arguments)):
            out = mended(arguments)
            assert isinstance(out, str) and json.loads(out) == wanted


HOSTILE_ARGUMENTS = ["[" * 100000, '{"a":' * 100000, "9" * 5000, r'["\ud83d"]', r'"\ud83d"', "NaN",
                     "[NaN]", "-Infinity", "1e999",
                     '{"a":NaN}', "\x00", "\ufeff{}"]


def test_hostile_arguments_are_no_fault_of_ours(subtests):
    for arguments in HOSTILE_ARGUMENTS:
        with subtests.test(arguments[:20]):
            assert isinstance(json.loads(mended(arguments)), dict)


@hypothesis.given(st.text(max_size=20) | st.recursive(st.none() | st.booleans() | st.integers(-9, 9)
                                                      | st.text(max_size=3),
                                                      lambda inner: st.lists(inner, max_size=3)
                                                      | st.dictionaries(st.text(max_size=3), inner, max_size=3)))
def test_any_arguments_become_an_object(arguments):
    assert isinstance(json.loads(mended(arguments)), dict)


NO_CALLS = ["x", 5, [5], [None], [{}], [{"function": None}], [{"function": "f"}], [{"function": {}}],
            [{"function": {"name": None}}], [{"function": {"name": 5}}], [{"id": "B", "type": "custom", "custom": {"input": "x"}}]]


def test_calls_that_are_none(subtests):
    """They are left out, and named."""
    for calls in NO_CALLS:
        with subtests.test(str(calls)):
            one = read({"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]})
            assert sent(one)["messages"][1] == {"role": "assistant", "content": None}
            assert one.ignored == "messages[1].tool_calls[0] tool_call"


# ---- tools

TOOLS = [
    (TOOL, TOOL),
    ({"function": FUNCTION}, TOOL),
    ({"type": "function", **FUNCTION}, TOOL),
    (FUNCTION, TOOL),
    ({**TOOL, "odd": 1}, {**TOOL, "odd": 1}),
    ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ({"type": None, "function": FUNCTION}, TOOL),
    ({"type": None, **FUNCTION}, TOOL),
    ({"type": "function", "function": None, **FUNCTION}, TOOL),
]


def test_tools(subtests):
    for given, wanted in TOOLS:
        with subtests.test(str(given)):
            assert payload(ask(tools=[given]))["tools"] == [wanted]


NO_TOOLS = [
    (5, ["tools[1]"]), (None, ["tools[1]"]), ("f", ["tools[1]"]), ([], ["tools[1]"]), ({}, ["tools[1]", "name"]),
    ({"type": "web_search"}, ["tools[1]", "only function tools"]),
    ({"type": "custom", "name": "f"}, ["only function tools"]),
    ({"type": "file_search", "function": FUNCTION}, ["only function tools"]),
    ({"type": 5, "function": FUNCTION}, ["tools[1]"]),
    ({"type": "function"}, ["tools[1]", "name"]), ({"type": "function", "function": {}}, ["name"]),
    ({"type": "function", "function": "f"}, ["name"]),
    ({"type": "function", "function": {"name": ""}}, ["name"]),
    ({"type": "function", "function": {"name": 5}}, ["name"]),
    ({"type": "function", "function": {"name": None}}, ["name"]), ({"type": "function", "name": ["f"]}, ["name"]),
]


def test_tools_that_are_refused(subtests):
    for tool, words in NO_TOOLS:
        with subtests.test(str(tool)):
            check_refusal(refused(ask(tools=[TOOL, tool])), "tools", *words)


@pytest.mark.parametrize("choice", ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, None])
def test_empty_tools_are_none(choice):
    assert payload(ask(tools=[], tool_choice=choice)) == ask()
    assert payload(ask(tools=[])) == ask()


@pytest.mark.parametrize("choice, sent", [
    ("auto", "auto"), ("required", "required"),
    ({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
    ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}), ({"odd": 1}, {"odd": 1}),
])
def test_tool_choices(choice, sent):
    assert payload(ask(tools=[TOOL], tool_choice=choice))["tool_choice"] == sent


# ---- numbers

@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limits(field):
    for value in (0, -1, 1.5, 0.0, 1e300, True, False, "5", "", [], {}, -10 ** 30, 10 ** 30):
        check_refusal(refused(ask(**{field: value})), field, f"{field} must be a positive whole number")
    for value in (1, 5, 50.0, 10 ** 9):
        made = payload(ask(**{field: value}))[field]
        assert made == value and type(made) is int


def test_max_completion_tokens_wins():
    """Whichever of the two an engine reads."""
    assert payload(ask(max_completion_tokens=3, max_tokens=9)) == ask(max_completion_tokens=3, max_tokens=3)
    assert payload(ask(max_completion_tokens=3)) == ask(max_completion_tokens=3, max_tokens=3)
    assert payload(ask(max_completion_tokens=None, max_tokens=9))["max_tokens"] == 9


@pytest.mark.parametrize("given, sent", [
    ({"repeat_penalty": 1.1}, 1.1), ({"repetition_penalty": 1.2}, 1.2), ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, 1.2),
    ({"repeat_penalty": 1.1, "repetition_penalty": None}, 1.1)])
def test_repetition_penalty(given, sent):
    """vLLM reads one name, llama.cpp the other."""
    assert payload(ask(**given)) == ask(repetition_penalty=sent, repeat_penalty=sent)


def test_prompt_cache_key_is_no_salt():
    assert payload(ask(prompt_cache_key="alice")) == ask(prompt_cache_key="alice")


SCHEMA = {"type": "object"}


FORMATS = [
    ({"type": "json_object"}, {"type": "json_object"}), ({"type": "text"}, {"type": "text"}),
    ({"type": "json_schema"}, {"type": "json_object"}), ({"type": "json_schema", "json_schema": None}, {"type": "json_object"}),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": None}}, {"type": "json_object"}),
    ({"type": "json_schema", "json_schema": {"name": "a", "strict": True}}, {"type": "json_object"}),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}},
     {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "answer"}}),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}, "odd": 1},
     {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}, "odd": 1}),
    ({"type": "structural_tag", "structures": []}, {"type": "structural_tag", "structures": []}), (None, None),
]


def test_response_formats(subtests):
    for given, wanted in FORMATS:
        with subtests.test(str(given)):
            assert payload(ask(response_format=given)) == ask(response_format=wanted)


NO_FORMATS = ["json", 1, True, [], {}, {"type": None}, {"type": 1},
              {"type": "json_schema", "json_schema": []}, {"type": "json_schema", "json_schema": "x"}]


def test_response_formats_that_are_none(subtests):
    for form in NO_FORMATS:
        with subtests.test(str(form)):
            check_refusal(refused(ask(response_format=form)), "response_format")


# ---- what is particular about a model

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("messages, sent", [
    (HELLO, [SYSTEM, *HELLO]), ([{"role": "assistant", "content": "a"}], [SYSTEM, {"role": "assistant", "content": "a"}]),
    ([{"role": "system", "content": "x"}, *HELLO], [{"role": "system", "content": "x"}, *HELLO]),
    ([{"role": "developer", "content": "x"}, *HELLO], [{"role": "system", "content": "x"}, *HELLO]),
    ([*HELLO, {"role": "system", "content": ""}], [*HELLO, {"role": "system", "content": ""}]),
])
def test_a_models_own_system_prompt(messages, sent):
    assert payload({"messages": messages}, system="Be brief.")["messages"] == sent
    assert payload({"messages": HELLO}, system="")["messages"] == HELLO


DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_tokens": 100, "repetition_penalty": 1.1}
SENT = {**DEFAULTS, "repeat_penalty": 1.1}


@pytest.mark.parametrize("given, sent", [
    ({}, SENT), ({"temperature": None}, SENT), ({"temperature": 0}, {**SENT, "temperature": 0}),
    ({"repeat_penalty": 1.3}, {**SENT, "repetition_penalty": 1.3, "repeat_penalty": 1.3}),
    ({"max_tokens": 5}, {**SENT, "max_tokens": 5}),
    ({"max_completion_tokens": 5}, {**SENT, "max_completion_tokens": 5, "max_tokens": 5}), ({"seed": 1}, {**SENT, "seed": 1}),
])
def test_a_models_own_sampling(given, sent):
    assert payload(ask(**given), sampling=DEFAULTS) == ask(**sent)


def test_an_embedding_model_is_for_no_chat():
    check_refusal(refused(ask(), purpose="embedding"), "model", "model is an embedding model", "none is loaded here")


# ---- reasoning: the tables have their own tests; here is that they are used

@pytest.mark.parametrize("effort, given, sent", [
    ("glm", {"reasoning_effort": "low"},
     {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}}),
    ("glm", {"think": False, "chat_template_kwargs": {"a": 1}},
     {"chat_template_kwargs": {"a": 1, "enable_thinking": False}}),
    ("glm", {"reasoning": {"effort": "max"}, "chat_template_kwargs": {"enable_thinking": False}},
     {"chat_template_kwargs": {"enable_thinking": False}}),
    ("gpt-oss", {"reasoning": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ("none", {"reasoning_effort": "low"}, {}),
])
def test_effort(effort, given, sent):
    assert payload(ask(**given), effort=effort) == ask(**sent)


def test_a_word_that_is_none():
    error = refused(ask(reasoning_effort="turbo"))
    check_refusal(error, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max")
    assert json.loads(chat.refusal(error))["error"]["param"] == "reasoning_effort"


# ---- anything at all

OWNED = ["messages", "model", "stream", "stream_options", "tools", "tool_choice", "max_tokens", "max_completion_tokens",
         "repeat_penalty", "n",
         "repetition_penalty", "response_format", "reasoning", "reasoning_effort", "think", "chat_template_kwargs"]


@hypothesis.given(st.fixed_dictionaries({}, optional=dict.fromkeys(OWNED, JSON)), st.booleans())
def test_any_body_is_sent_on_or_refused(fields, good):
    try:
        one = read({**fields, **(ask(model=None) if good else {})})
    except Refusal as error:
        assert 400 <= error.status < 500 and error.message
    else:
        sent(one)


PART_TYPES = st.sampled_from([*chat_messages.TEXTS, *chat_messages.MEDIA, *chat_messages.REFUSED, *chat_messages.PASSED, "x"])
PART = st.fixed_dictionaries({"type": PART_TYPES | JSON}, optional={"text": JSON, "image_url": JSON, "detail": JSON})
PIECE = st.fixed_dictionaries({"name": st.text()}, optional={"arguments": JSON})
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from([*chat_messages.ROLES, "x"]) | JSON}, optional={
    "content": JSON | st.lists(PART, max_size=3),
    "tool_calls": JSON | st.lists(st.fixed_dictionaries({"function": JSON | PIECE}))})


@hypothesis.given(st.lists(MESSAGE, max_size=3))
def test_any_messages_are_sent_on_or_refused(messages):
    try:
        one = read({"messages": messages})
    except Refusal as error:
        assert (error.status, error.param) == (400, "messages")
    else:
        sent(one)


# ---- the plain answer

def answer(message, finish="stop", **more):
    return {"id": "c1", "object": "chat.completion", "created": 1, "model": "model",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
            "usage": {"total_tokens": 5}, **more}


def written(given, field="both"):
    one = read(ask(), reasoning_field=field)
    return without(json.loads(chat.write(copy.deepcopy(given), one)[0]), given)


def without(out, given):
    """An answer without the nulls that OpenAI's schema wants in it, where they were not given."""
    befores = given["choices"] if isinstance(given.get("choices"), list) else []
    for choice, before in zip(out["choices"] if befores else [], befores, strict=True):
        if isinstance(before, dict) and "logprobs" not in before:
            assert choice.pop("logprobs") is None
        message = choice.get("message") if isinstance(choice, dict) else None
        if isinstance(message, dict) and "refusal" not in (before.get("message") or {}):
            assert message.pop("refusal") is None
    return out


def test_what_the_schema_wants_and_forbids():
    """OpenAI's schema requires `refusal` and `logprobs`, and has no null for what vLLM sends beside them."""
    out = json.loads(chat.write({"choices": [{"message": {
        "role": "assistant", "content": "a", "annotations": None, "audio": None, "function_call": None, "tool_calls": None},
        "finish_reason": "stop"}], "service_tier": None, "system_fingerprint": None,
        "usage": {"prompt_tokens": 1, "prompt_tokens_details": None}}, read(ask()))[0])
    assert out == {"choices": [{"message": {"role": "assistant", "content": "a", "refusal": None}, "logprobs": None,
                                "finish_reason": "stop"}],
                   "model": out["model"], "usage": {"prompt_tokens": 1}}


def written_message(message, field="both"):
    out = written(answer(message), field)
    assert {**out, "choices": [{**out["choices"][0], "message": message}]} == answer(message)
    return out["choices"][0]["message"]


REASONING = [{"reasoning": "hm"}, {"reasoning_content": "hm"},
             {"reasoning": "hm", "reasoning_content": "hm"},
             {"reasoning": None, "reasoning_content": "hm"},
             {"reasoning": "hm", "reasoning_content": None},
             {"reasoning": "", "reasoning_content": "hm"}]


def test_reasoning_of_an_answer(subtests):
    for field, names in FIELDS.items():
        for given in REASONING:
            with subtests.test(field, given=given):
                message = {"role": "assistant", "content": "Hello", "refusal": None}
                assert written_message({**message, **given}, field) == {**message, **dict.fromkeys(names, "hm")}


NO_REASONING = [{}, {"reasoning": None}, {"reasoning_content": None},
                {"reasoning": "", "reasoning_content": ""}]


def test_no_reasoning_no_field(subtests):
    for field in FIELDS:
        for given in NO_REASONING:
            with subtests.test(field, given=given):
                message = {"role": "assistant", "content": "Hello"}
                assert written_message({**message, **given}, field) == message


TAGGED = [
    ("<think>hm</think>Hello", "hm", "Hello"), ("\n<think>\nhm\n</think>\n\nHello", "hm", "Hello"),
    ("hm</think>\n\nHello", "hm", "Hello"),
    ("<think>hm", "hm", ""), ("<think>hm</think>", "hm", ""), ("</think>Hello", "", "Hello"),
    ("<think></think>Hello", "", "Hello"),
    ("Hello", "", "Hello"), ("The tag `</think>` ends it", "", "The tag `</think>` ends it"),
    ("a <think>b</think>", "", "a <think>b</think>"),
    ("", "", ""), (None, "", None), (" ", "", " "),
]


def test_tags_in_an_answer(subtests):
    for content, reasoning, rest in TAGGED:
        for field, names in FIELDS.items():
            with subtests.test(content, field=field):
                out = written_message({"role": "assistant", "content": content}, field)
                assert out == {"role": "assistant", "content": rest, **(dict.fromkeys(names, reasoning) if reasoning else {})}


def test_tags_beside_reasoning():
    """As in a stream: at the beginning they are a leak all the same; one that was never opened is a quotation."""
    message = {"role": "assistant", "content": "<think>a</think>b", "reasoning": "hm", "reasoning_content": "hm"}
    assert written_message(message) == {**message, "content": "b", "reasoning": "hma", "reasoning_content": "hma"}
    message["content"] = "a</think>b"
    assert written_message(message) == message


@pytest.mark.parametrize("message", [
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "A", "type": "function", "function": {"name": "f", "arguments": '"a": '}}]},
    {"role": "assistant", "content": "", "tool_calls": [], "odd": {"a": [1]}, "null": None},
    {"role": "assistant", "content": "\u2028\ud83d", "audio": {"id": "x"}},
    {},
])
def test_the_rest_of_a_message_is_untouched(message):
    assert written_message(message) == message


def test_the_rest_of_an_answer_is_untouched():
    given = answer({"role": "assistant", "content": "a"}, "length", metrics=None, system_fingerprint="x",
                   prompt_logprobs=None, odd=[{"a": 10 ** 30}])
    given["choices"].append({"index": 1, "message": {"role": "assistant", "content": "<think>hm</think>b"},
                             "finish_reason": "stop", "stop_reason": 7})
    expected = copy.deepcopy(given)
    expected["choices"][1]["message"] = {"role": "assistant", "content": "b", "reasoning": "hm",
                                         "reasoning_content": "hm"}
    assert written(given) == expected


ODD_CHOICES = [None, [], [None], ["x"], [{}], [{"message": None}], [{"message": "x"}], {}, "x", 5,
               True]


def test_odd_answers_pass_or_are_the_engines_fault(subtests):
    for choices in ODD_CHOICES:
        with subtests.test(str(choices)):
            given = {"id": "c1", "choices": choices}
            with contextlib.suppress(UpstreamError):
                assert written(given) == given


# ---- a stream that nobody asked for

def events(*chunks, done=True):
    end = ["[DONE]"] if done else []
    return "".join(f"data: {data}\n\n" for data in [*map(json.dumps, chunks), *end]).encode()


def chunk(delta, finish=None, index=0, **more):
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "model",
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}], **more}


def collected(*chunks, field="both", **options):
    out = json.loads(chat.write(events(*chunks, **options), read(ask(), reasoning_field=field))[0])
    for choice in out["choices"]:
        assert choice["message"].pop("refusal") is None
    return out


USAGE = {"id": "c1", "choices": [], "usage": {"total_tokens": 5}}


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("field, names", FIELDS.items())
def test_a_stream_is_collected(done, field, names):
    out = collected(chunk({"role": "assistant", "content": ""}), chunk({"reasoning": "h"}), chunk({"reasoning": "m"}),
                    chunk({"content": "Hel"}),
                    chunk({"content": "lo"}), chunk({}, "stop"), USAGE, field=field, done=done)
    assert out == answer({"role": "assistant", "content": "Hello", **dict.fromkeys(names, "hm")})


def test_calls_of_a_stream_are_collected():
    calls = [{"tool_calls": [{"id": "A", "type": "function", "index": 0, "function": {"name": "f"}}]},
             {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
             {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
             {"tool_calls": [{"id": "B", "type": "function", "index": 0,
                              "function": {"name": "g", "arguments": "{}"}}]}]
    out = collected(chunk({"role": "assistant", "content": None}), *map(chunk, calls), chunk({}, "tool_calls"), USAGE)
    assert out == answer({"role": "assistant", "content": None, "tool_calls": [
        {"id": "A", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "B", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}, "tool_calls")


def test_choices_of_a_stream_are_collected():
    out = collected(chunk({"content": "b"}, index=1), chunk({"content": "<think>hm</think>a"}), chunk({}, "length", 1),
                    chunk({}, "stop"))
    assert [(choice["index"], choice["message"]["content"], choice["finish_reason"]) for choice in out["choices"]] == [
        (0, "a", "stop"), (1, "b", "length")]
    assert out["choices"][0]["message"]["reasoning"] == "hm" and "usage" not in out


def test_a_collected_stream_keeps_its_logprobs():
    """The client asked for them."""
    def probable(token):
        one = chunk({"content": token})
        one["choices"][0]["logprobs"] = {"content": [{"token": token, "logprob": -0.5}]}
        return one

    out = collected(chunk({"role": "assistant", "content": ""}), probable("a"), probable("b"), chunk({}, "stop"))
    assert [entry["token"] for entry in out["choices"][0]["logprobs"]["content"]] == ["a", "b"]


NOT_WHOLE = [
    b"", b"data: [DONE]\n\n", b": x\n\n", events(chunk({"content": "a"})),
    events(chunk({"content": "a"}), {"error": "it died"}),
    events(chunk({"content": "a"}, "stop"))[:60], b"data: hello\n\n", events(chunk({"content": "a"}), done=False)
    + b'data: {"cho',
]


def test_a_stream_that_is_not_whole(subtests):
    for body in NOT_WHOLE:
        with subtests.test(str(body)):
            with pytest.raises(Refusal) as caught:
                chat.write(body, read(ask()))
            assert (caught.value.status, caught.value.code) == (502, "upstream_error")


ODD_DELTAS = [
    {"tool_calls": [{"id": "A", "index": 0, "function": {"name": "f", "arguments": "{}", "odd": "x"}}]},
    {"tool_calls": [{"id": "A", "index": 0, "function": {"name": "f", "arguments": {"a": 1}}}]},
    {"tool_calls": [{"id": "A", "index": 0, "function": None}]},
    {"tool_calls": None}, {"tool_calls": [None]}, {"content": ["a"]},
]


def test_odd_deltas_pass_or_are_the_engines_fault(subtests):
    for delta in ODD_DELTAS:
        with subtests.test(str(delta)), contextlib.suppress(UpstreamError):
            assert collected(chunk(delta), chunk({"content": "a"}, "stop"))["choices"][0]["message"]["content"] == "a"
