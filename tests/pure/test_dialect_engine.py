"""What becomes of every chat, whatever its API: the engine's own words in it."""
import json

import pytest

from dialects import chat, messages
from dialects.responses import Responses
from engines.fleet import Model
from engines.kinds import OTHER, Kind

HELLO = {"role": "user", "content": "Hello"}
EARLIER = {
    chat: {"messages": [HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}, HELLO]},
    messages: {"max_tokens": 9, "messages": [HELLO, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Hi"}]}, HELLO]},
    Responses(lambda: 0, lambda: "00"): {"input": [HELLO, {"type": "reasoning", "summary": [
        {"type": "summary_text", "text": "hm"}]}, {"role": "assistant", "content": "Hi"}, HELLO]},
}


class Thoughtful(Kind):
    earlier_reasoning = "thoughts"


class Fleet:
    def __init__(self, kind):
        self.model = Model(id="m", engine_id="engine/m", engine_kind=kind)

    def find(self, name):
        return self.model


@pytest.mark.parametrize("kind, field", [(OTHER, "reasoning_content"), (Thoughtful(), "thoughts")], ids=["usual", "another"])
@pytest.mark.parametrize("dialect, body", EARLIER.items(), ids=["chat", "messages", "responses"])
def test_reasoning_of_earlier_turns_goes_where_the_engine_reads_it(dialect, body, kind, field):
    sent = json.loads(b"".join(dialect.read(json.dumps(body).encode(), Fleet(kind)).body))
    assert sent["messages"] == [HELLO, {"role": "assistant", "content": "Hi", field: "hm"}, HELLO]
