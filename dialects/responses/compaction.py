"""A long conversation made short: the model writes a summary, which the client gets sealed, and
sends back in place of what it tells of.

Codex asks for it with a last item `compaction_trigger`, or by a path of its own, where its provider
is called OpenAI, as with `openai_base_url`. Its session ends where nobody does it.

Source: OpenAI's published schema (github.com/openai/openai-openapi), CompactionBody; Codex's
published compact_remote_v2.rs.
"""

from dialects.responses.events import INCOMPLETE, ResponseStream
from dialects.responses.items import unquoted
from errors import UpstreamError
from values import as_dict, dumps

TRIGGER = "compaction_trigger"
ASK = (
    "Write a summary of this conversation so far. It will take the conversation's place: you will "
    "go on from it, and see nothing else of what was said and done until now. Keep what is asked "
    "for, in the user's own words where they matter; what was decided, and why; what was done, "
    "with the names of files, commands and their results; what has failed; and what is to be done "
    "next. Call no tool, and write nothing but the summary."
)
TOLD = "[A summary of the conversation until here]"


def is_asked(payload):
    """Whether a request wants its input made short."""
    given = payload.get("input")
    return isinstance(given, list) and bool(given) and as_dict(given[-1]).get("type") == TRIGGER


def ask_for_summary(chat):
    """Have a chat ask for a summary, in place. Its tools stay, so that the engine still has its
    beginning in its cache."""
    chat["messages"].append({"role": "user", "content": ASK})
    chat.pop("response_format", None)
    if "tools" in chat:
        chat["tool_choice"] = "none"


class Compaction:
    """The one item of the output."""

    def __init__(self, writer, sealed):
        ident = b"cmp_%b00" % writer.token
        fields = {"id": ident.decode(), "type": "compaction", "encrypted_content": sealed}
        self.final = dumps(fields)
        place = b'"output_index":0,"item":%b' % self.final
        self.events = writer.event(b"output_item.added", place)
        self.events += writer.event(b"output_item.done", place)

    def so_far(self, status):
        return self.final


class CompactionStream(ResponseStream):
    """A Response that holds what the model says as one sealed item.

    said  kind of a text -> its pieces
    """

    def __init__(self, token, options):
        super().__init__(token, options)
        self.said = {"text": [], "reasoning": []}

    def text(self, kind, text):
        self.said.get(kind, []).append(text)
        return self.begin()

    def tool_call(self, piece):
        return b""

    def finishes(self, reason):
        out = self.begin()
        self.finish = reason
        summary = self.summary()
        if not summary or reason in INCOMPLETE:
            return out
        item = Compaction(self.writer, self.options.encrypt(summary))
        self.items.append(item)
        return out + item.events

    def summary(self):
        """What the model has said, or thought where it has said nothing."""
        texts = (unquoted(b"".join(pieces)).strip() for pieces in self.said.values())
        return next(filter(None, texts), "")

    def end(self):
        last = super().end()
        if not self.items and self.finish not in INCOMPLETE:
            raise UpstreamError("the model has written no summary of the conversation")
        return last
