"""Streams with events of their own: the same reading and mending, other bytes out."""
import json

import pytest

from errors import UpstreamError
from support.cuts import however_cut
from support.engine import chat_chunks, llama_chunks
from support.plain_dialect import PlainStream


def fed(arrived):
    stream = PlainStream()
    return stream, b"".join(map(stream.feed, arrived))


def said(out):
    """[(kind, text or value)], texts that follow each other joined."""
    found = []
    for block in out.decode().split("\n\n")[:-1]:
        value = json.loads(block.split("data: ", 1)[1])
        kind, what = value["kind"], value.get("text", value.get("value"))
        if found and "text" in value and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + what)
        else:
            found.append((kind, what))
    return found


def whole(arrived):
    stream, out = fed(arrived)
    return out, stream.usage, stream.end()


@pytest.mark.parametrize("chunks", [chat_chunks, llama_chunks])
def test_reasoning_text_finish_usage(chunks):
    sent = b"".join(chunks('Say "hi"\n\\ ü 🌍 \u2028', reasoning="Let me think", usage=True))
    out, usage, end = however_cut(sent, whole)
    found = said(out)
    assert found[:3] == [("reasoning", "Let me think"), ("text", 'Say "hi"\n\\ ü 🌍 \u2028'), ("finish", "stop")]
    assert found[3][0] == "usage" and found[3][1]["prompt_tokens"] == usage["prompt_tokens"]
    assert end == b"event: end\ndata: {}\n\n"


def test_leaked_thinking_and_calls():
    sent = b"".join(chat_chunks(["<thi", "nk>hm</think>\n\nwell"], tools=[("f", {"a": 1}), ("g", {})]))
    found = said(however_cut(sent, whole)[0])
    assert found[:2] == [("reasoning", "hm"), ("text", "well")]
    calls = [value for kind, value in found if kind == "tool"]
    assert [call["index"] for call in calls if "name" in call["function"]] == [0, 1]
    assert found[-1] == ("finish", "tool_calls")


def test_an_event_with_nothing_to_say_is_read_once():
    """A dialect may keep a text back, or leave it out."""
    class Silent(PlainStream):
        heard = ()

        def text(self, kind, text):
            self.heard += (kind, text)
            return b""

    stream = Silent()
    for event in chat_chunks("a b", reasoning="c d e", usage=True):
        stream.feed(event)
    assert stream.heard == ("reasoning", b"c", "reasoning", b" d", "reasoning", b" e", "text", b"a", "text", b" b")
    assert (stream.tokens, stream.thoughts) == (6, 3)


def test_a_broken_stream_is_no_end():
    stream, out = fed(chat_chunks("a b c", done=False)[:3])
    with pytest.raises(UpstreamError):
        stream.end()
    assert stream.fail(UpstreamError("gone")).startswith(b'event: error\ndata: {"error":')


def test_most_events_are_never_parsed(monkeypatch):
    """The second text in a row goes through as bytes."""
    import stream as module
    one = PlainStream()
    one.feed(b"".join(chat_chunks("a b c", done=False)[:3]))
    monkeypatch.setattr(module, "loads", None)
    assert said(one.feed(one.template.before + b"more" + one.template.after)) == [("text", "more")]
