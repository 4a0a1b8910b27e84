"""An engine's streams, and what Messages makes of them: for tables, and for the SDK that must read the same.

Rows that name an address are public reports of other translations that got the case wrong.
"""
from support.engine import DONE, chat_chunks, chunk, llama_chunks, sse

BEGIN = [("start", 7), ("ping",)]


def block(index, kind, words):
    """The events of a block of text or thinking."""
    signature = [(index, "+signature", "")] * (kind == "thinking")
    return [(index, kind), (index, f"+{kind}", words), *signature, (index, "stop")]


def call(index, ident, name, arguments):
    return [(index, "tool_use", ident, name), *[(index, "+input", arguments)] * bool(arguments), (index, "stop")]


def chunks(*deltas, finish="stop", **end):
    last = chunk({}, finish)
    last["choices"][0].update(end)
    return [*(sse(chunk(delta)) for delta in deltas), *[sse(last)] * bool(finish), DONE]


def says(words):
    return {"content": words}


def thinks(words):
    return {"reasoning": words}


def calls(*pieces):
    return {"tool_calls": [{name: value for name, value in zip(("index", "id", "function"), piece, strict=False) if value is not None}
                           for piece in pieces]}


def f(name=None, arguments=None):
    return {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}


ROLE = {"role": "assistant", "content": ""}
A, B = f("f", ""), f("g", "")

# name -> (chunks, what comes of them between message_start and message_stop)
STREAMS = {
    "text": (chunks(ROLE, says("Hello"), says(" there")), [*block(0, "text", "Hello there"), ("end_turn",)]),
    "no role chunk": (chunks(says("Hello"), says(" there")), [*block(0, "text", "Hello there"), ("end_turn",)]),
    "nothing": (chunks(ROLE), [("end_turn",)]),
    "quotes, lines, other alphabets": (chunks(ROLE, says('"\\\n'), says('\u2028é🌍"}}')),
        [*block(0, "text", '"\\\n\u2028é🌍"}}'), ("end_turn",)]),
    # BerriAI/litellm/issues/31560, /32357, /29518, sgl-project/sglang/issues/26795: thinking lost, or inside a text block
    "thinking, text": (chunks(ROLE, thinks("Let"), thinks(" me"), says("Hello")),
                       [*block(0, "thinking", "Let me"), *block(1, "text", "Hello"), ("end_turn",)]),
    "thinking under its other name": (chunks(ROLE, {"reasoning_content": "Let"}, says("Hello")),
        [*block(0, "thinking", "Let"), *block(1, "text", "Hello"), ("end_turn",)]),
    # BerriAI/litellm/pull/30023: the first delta of each block that follows another was lost
    "both in one delta, with the finish": ([sse({**chunk({"reasoning": "Ok", "content": "Yes "}, "stop")}), DONE],
        [*block(0, "thinking", "Ok"), *block(1, "text", "Yes "), ("end_turn",)]),
    "leaked tags": (chunks(ROLE, says("<thi"), says("nk>hm</think>\n\nwell")),
                    [*block(0, "thinking", "hm"), *block(1, "text", "well"), ("end_turn",)]),
    # ollama/ollama/issues/14816, BerriAI/litellm/issues/34692: a call without a text before it
    "one call": (chunks(ROLE, calls((0, "t1", A)), calls((0, None, f(None, '{"a"'))), calls((0, None, f(None, ":1}"))),
                        finish="tool_calls"),
                 [*call(0, "t1", "f", '{"a":1}'), ("tool_use",)]),
    "a call at once": (chunks(ROLE, calls((0, "t1", f("f", '{"a":1}'))), finish="tool_calls"),
                       [*call(0, "t1", "f", '{"a":1}'), ("tool_use",)]),
    "a call without arguments": (chunks(ROLE, calls((0, "t1", f("f"))), finish="tool_calls"),
                                 [*call(0, "t1", "f", ""), ("tool_use",)]),
    # BerriAI/litellm/issues/34692, vLLM's forced calls: they end with "stop"
    "a call that ends with stop": (chunks(ROLE, calls((0, "t1", f("f", "{}"))), finish="stop"),
                                   [*call(0, "t1", "f", "{}"), ("tool_use",)]),
    "tool_calls without a call": (chunks(ROLE, says("Hello"), finish="tool_calls"), [*block(0, "text", "Hello"), ("end_turn",)]),
    # maximhq/bifrost/issues/3638, QuantumNous/new-api/issues/5482: several kinds in one message
    "thinking, text, two calls": (
        chunks(ROLE, thinks("hm"), says("Both."), calls((0, "t1", A)), calls((0, None, f(None, "{}"))), calls((1, "t2", B)),
               calls((1, None, f(None, '{"b":2}'))), finish="tool_calls"),
        [*block(0, "thinking", "hm"), *block(1, "text", "Both."), *call(2, "t1", "f", "{}"), *call(3, "t2", "g", '{"b":2}'),
         ("tool_use",)]),
    # the SDKs raise at arguments that are no JSON; the engine's own mistakes reach the client as a tool's input does
    "arguments that are no JSON": (
        chunks(ROLE, calls((0, "t1", f("f", " no"))), calls((0, None, f(None, "pe"))), finish="tool_calls"),
        [*call(0, "t1", "f", '{"input":" nope"}'), ("tool_use",)]),
    "arguments of another language": (
        chunks(ROLE, calls((0, "t1", f("f", "{"))), calls((0, None, f(None, "'a': 1}"))), says("Done"), finish="tool_calls"),
        [*call(0, "t1", "f", """{"input":"{'a': 1}"}"""), *block(1, "text", "Done"), ("tool_use",)]),
    "arguments that are a list": (chunks(ROLE, calls((0, "t1", f("f", [1]))), finish="tool_calls"),
                                  [*call(0, "t1", "f", '{"input":[1]}'), ("tool_use",)]),
    # the client gets as much as its SDK can parse; strings are mended
    "arguments that go on as no JSON": (
        chunks(ROLE, calls((0, "t1", f("f", '{"a": "say "'))), calls((0, None, f(None, 'no""}'))), says("Done"), finish="tool_calls"),
        [*call(0, "t1", "f", '{"a": "say "'), *block(1, "text", "Done"), ("max_tokens",)]),
    "arguments with a comma too many": (chunks(ROLE, calls((0, "t1", f("f", '{"a":1,}'))), finish="tool_calls"),
                                        [*call(0, "t1", "f", '{"a":1,'), ("max_tokens",)]),
    "strings with line ends, wrong escapes, halves of characters": (
        chunks(ROLE, calls((0, "t1", f("f", '{"a":"\n\\x\\ud83d'))), calls((0, None, f(None, '","b":NaN}'))), finish="tool_calls"),
        [*call(0, "t1", "f", r'{"a":"\u000a\\x\ufffd","b":null}'), ("tool_use",)]),
    "more behind the arguments": (
        chunks(ROLE, calls((0, "t1", f("f", '{"a":"}\\'))), calls((0, None, f(None, '"}{"} and'))),
               calls((0, None, f(None, ' more"}'))), finish="tool_calls"),
        [*call(0, "t1", "f", '{"a":"}\\"}{"}'), ("tool_use",)]),
    "an empty object before the arguments": (
        chunks(ROLE, calls((0, "t1", f("f", "{}"))), calls((0, None, f(None, '{"a":1}'))), finish="tool_calls"),
        [*call(0, "t1", "f", r'{"input":"{}{\"a\":1}"}'), ("tool_use",)]),
    "more of a call behind the next one": (
        chunks(ROLE, calls((0, "t1", f("f", "{}"))), calls((1, "t2", f("g", "{"))), calls((0, None, f(None, "x"))),
               calls((1, None, f(None, "}"))), finish="tool_calls"),
        [*call(0, "t1", "f", "{}"), *call(1, "t2", "g", "{}"), ("tool_use",)]),
    "two calls in one delta": (chunks(ROLE, calls((0, "t1", f("f", "{}")), (1, "t2", f("g", "{}"))), finish="tool_calls"),
                               [*call(0, "t1", "f", "{}"), *call(1, "t2", "g", "{}"), ("tool_use",)]),
    # orangeboyChen/codebuddy2api/pull/11: a block was opened while another one was open
    "calls that mix": (chunks(ROLE, calls((0, "t1", A)), calls((1, "t2", B)), calls((0, None, f(None, '{"a"'))),
                              calls((1, None, f(None, '{"b"'))),
                              calls((0, None, f(None, ":1}"))), calls((1, None, f(None, ":2}"))), finish="tool_calls"),
                       [*call(0, "t1", "f", '{"a":1}'), *call(1, "t2", "g", '{"b":2}'), ("tool_use",)]),
    "one id for two calls": (
        chunks(ROLE, calls((0, "t1", f("f", '{"a":1}'))), calls((1, "t1", f("f", '{"a"'))), calls((1, "t1", f(None, ":2}"))),
               finish="tool_calls"),
        [*call(0, "t1", "f", '{"a":1}'), *call(1, "call_chatcmpl-a4d799bba2c27bd4_1", "f", '{"a":2}'), ("tool_use",)]),
    "several choices": (
        [sse(chunk(delta, finish, index=index)) for index, delta, finish in (
            (0, ROLE, None), (0, says("He"), None), (1, ROLE, None), (1, says("Good"), None), (0, says("llo"), None),
            (1, calls((0, "t1", A)), None), (1, {}, "length"), (0, {}, "stop"))] + [DONE],
        [*block(0, "text", "Hello"), ("end_turn",)]),
    "a refusal": (chunks(ROLE, {"refusal": "I won't"}, {"refusal": " say."}), [*block(0, "text", "I won't say."), ("refusal",)]),
    "three that mix, the first one never whole": (
        chunks(ROLE, calls((0, "t1", f("f", '{"a'))), calls((1, "t2", f("g", "{"))), calls((2, "t3", f("h", "{}"))),
               calls((1, None, f(None, "}"))),
               finish="tool_calls"),
        [*call(0, "t1", "f", '{"a'), *call(1, "t2", "g", "{}"), *call(2, "t3", "h", "{}"), ("max_tokens",)]),
    "text amid a call": (chunks(ROLE, calls((0, "t1", f("f", '{"a"'))), says("so"), calls((0, None, f(None, ":1}"))), says("!"),
                                finish="tool_calls"),
                         [*call(0, "t1", "f", '{"a":1}'), *block(1, "text", "so!"), ("tool_use",)]),
    "no index": (chunks(ROLE, calls((None, "t1", A)), calls((None, None, f(None, "{}"))), calls((None, "t2", B)),
                        calls((None, None, f(None, "{}"))), finish="tool_calls"),
                 [*call(0, "t1", "f", "{}"), *call(1, "t2", "g", "{}"), ("tool_use",)]),
    "one index for two": (chunks(ROLE, calls((0, "t1", f("f", "{}"))), calls((0, "t2", f("g", "{}"))), finish="tool_calls"),
                          [*call(0, "t1", "f", "{}"), *call(1, "t2", "g", "{}"), ("tool_use",)]),
    "id and name again with each piece": (
        chunks(ROLE, calls((0, "t1", f("f", "{"))), calls((0, "t1", f("f", "}"))), finish="tool_calls"),
        [*call(0, "t1", "f", "{}"), ("tool_use",)]),
    "no id": (chunks(ROLE, calls((0, None, f("f", "{}"))), finish="tool_calls"),
              [*call(0, "call_chatcmpl-a4d799bba2c27bd4_0", "f", "{}"), ("tool_use",)]),
    "a name that comes late": (chunks(ROLE, calls((0, "t1", f(None, ""))), calls((0, None, f("f", "{}"))), finish="tool_calls"),
                               [*call(0, "t1", "f", "{}"), ("tool_use",)]),
    "a call without a name": (chunks(ROLE, says("so"), calls((0, "t1", f(None, "{}"))), finish="tool_calls"),
                              [*block(0, "text", "so"), ("end_turn",)]),
    "arguments as an object": (chunks(ROLE, calls((0, "t1", f("f", {"a": 1}))), finish="tool_calls"),
                               [*call(0, "t1", "f", '{"a":1}'), ("tool_use",)]),
    "white space between calls": (chunks(ROLE, says("\n"), calls((0, "t1", f("f", "{}"))), says("\n \n"),
                                         calls((1, "t2", f("g", "{}"))), says(" "),
                                         finish="tool_calls"),
                                  [*call(0, "t1", "f", "{}"), *call(1, "t2", "g", "{}"), ("tool_use",)]),
    # looplj/axonhub/pull/1677: a line end before the thinking opened a text block
    "white space before thinking": (chunks(ROLE, says("\n"), thinks("hm"), says("\n\n"), says("well")),
        [*block(0, "thinking", "hm"), *block(1, "text", "\n\n\nwell"), ("end_turn",)]),
    "white space alone": (chunks(ROLE, says("\n"), says(" ")), [("end_turn",)]),
    "white space inside a text": (chunks(ROLE, says("a"), says("\n\n"), says("b")), [*block(0, "text", "a\n\nb"), ("end_turn",)]),
    # musistudio/claude-code-router/issues/1725, Wei-Shaw/sub2api/pull/4286: later thinking went into the block before it
    "thinking again after a call": (chunks(ROLE, thinks("a"), calls((0, "t1", f("f", "{}"))), thinks("b"), says("c"),
                                           finish="tool_calls"),
        [*block(0, "thinking", "a"), *call(1, "t1", "f", "{}"), *block(2, "thinking", "b"),
                                     *block(3, "text", "c"),
    ("tool_use",)]),
    "text, late thinking, call": (chunks(ROLE, says("a"), thinks("b"), calls((0, "t1", f("f", "{}"))), finish="tool_calls"),
                                  [*block(0, "text", "a"), *block(1, "thinking", "b"), *call(2, "t1", "f", "{}"), ("tool_use",)]),
    "cut by max_tokens": (chunks(ROLE, says("Hello"), finish="length"), [*block(0, "text", "Hello"), ("max_tokens",)]),
    "cut amid a call": (chunks(ROLE, calls((0, "t1", f("f", '{"a'))), finish="length"),
                        [*call(0, "t1", "f", '{"a'), ("max_tokens",)]),
    "cut amid thinking": (chunks(ROLE, thinks("a"), finish="length"), [*block(0, "thinking", "a"), ("max_tokens",)]),
    "a stop sequence": (chunks(ROLE, says("Yes "), stop_reason="indeed"),
                        [*block(0, "text", "Yes "), ("stop_sequence", "indeed")]),
    "the number of a stop token": (chunks(ROLE, says("Yes"), stop_reason=319), [*block(0, "text", "Yes"), ("end_turn",)]),
    "refused": (chunks(ROLE, says("I"), finish="content_filter"), [*block(0, "text", "I"), ("refusal",)]),
    "an unknown end": (chunks(ROLE, says("I"), finish="eos"), [*block(0, "text", "I"), ("end_turn",)]),
    "vLLM": (chat_chunks("Hello there", reasoning="Let me", tools=[("f", ['{"a"', ":1}"])], usage=True), None),
    "llama.cpp": (llama_chunks("Hello there", reasoning="Let me", tools=[("f", ['{"a"', ":1}"])], usage=True), None),
}
WHOLE = [*block(0, "thinking", "Let me"), *block(1, "text", "Hello there"), (2, "tool_use", None, "f"), (2, "+input", '{"a":1}'),
         (2, "stop"),
         ("tool_use",)]
