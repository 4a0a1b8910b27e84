"""Reasoning that an engine's parser has missed, and the names of the field for it."""

OPEN = "<think>"
CLOSE = "</think>"
NAMES = ("reasoning", "reasoning_content")  # of the reasoning's field; engines use either
# Of a text that is held until its closing tag comes: pieces, a token or more each, and characters.
MOST_PIECES = 200
MOST_CHARACTERS = 4000


class LeakedThinking:
    """The start of a choice's content, where `<think>…</think>` stands if the engine's parser has
    missed it. Such a tag anywhere else is a quotation.

    feed, flush   return (reasoning, content)
    settle        what is still held is content
    past_tags     all that follows is content: it needn't be fed
    waits         a text waits because it could become a tag, or be what stands before one
    """

    def __init__(self, orphan=False):
        """`orphan`: the opening tag may be missing, as where it is the prompt's last word. Then
        nothing is said before the closing one has come, or will hardly come any more."""
        self.state = "start"  # then "thinking", "closed", "content"; from "start" also "content"
        self.orphan = orphan
        self.blank = []  # white space before everything else, in pieces
        self.held = ""  # what could become a tag
        self.unsure = []  # a text that could be reasoning, in pieces
        self.size = 0  # characters of it

    @property
    def waits(self):
        return bool(self.blank or self.held or self.unsure)

    @property
    def past_tags(self):
        return self.state == "content"

    def feed(self, text):
        """The reasoning and the content in one more piece of text. One piece may pass through
        several states."""
        text = self.held + text
        self.held = ""
        reasoning = ""
        if self.state == "start":
            text = self.after_opening(text)
        if self.state == "thinking":
            reasoning, text = self.around_closing(text)
        if self.state == "unsure":
            reasoning, text = self.around_orphan(text)
        if self.state == "closed":  # models put line ends between the tag and the answer
            text = text.lstrip()
            if text:
                self.state = "content"
        return reasoning, text

    def flush(self):
        """What was held back because it could have become a tag."""
        if self.state == "unsure":
            return "", self.settle()
        text = self.after_blank(self.held)
        self.held = ""
        if self.state == "thinking":
            return text, ""
        return "", text

    def after_opening(self, text):
        """What follows the opening tag, or all of the text where there is none."""
        bare = text.lstrip()
        if not bare:
            self.blank.append(text)
            return ""
        if bare.startswith(OPEN):
            self.blank = []
            self.state = "thinking"
            return bare[len(OPEN) :]
        if OPEN.startswith(bare):
            self.held = text
            return ""
        self.state = "unsure" if self.orphan else "content"
        return self.after_blank(text)

    def after_blank(self, text):
        """A text behind the white space that waits."""
        blank = self.blank
        self.blank = []
        return "".join([*blank, text])

    def around_closing(self, text):
        """(the text before the closing tag, the text after it)."""
        before, tag, after = text.partition(CLOSE)
        if tag:
            self.state = "closed"
            return before, after
        whole = len(text) - overlap(text, CLOSE)
        self.held = text[whole:]
        return text[:whole], ""

    def around_orphan(self, text):
        """The same where there may be no such tag: then nothing, for so long."""
        tail = "".join(self.unsure[-len(CLOSE) :])[-len(CLOSE) :]  # a tag comes in pieces
        self.unsure.append(text)
        self.size += len(text)
        if CLOSE in tail + text:
            before, after = around_orphan("".join(self.unsure))
            if after is not None:
                self.unsure = []
                self.orphan = False
                self.state = "closed"
                return before, after
            return "", self.settle()
        if len(self.unsure) >= MOST_PIECES or self.size >= MOST_CHARACTERS:
            return "", self.settle()
        return "", ""

    def settle(self):
        """No tag is waited for any more: the content that was held for it."""
        self.orphan = False
        if self.state != "unsure":
            return ""
        self.state = "content"
        text = "".join(self.unsure)
        self.unsure = []
        return text


def around_orphan(content):
    """(the reasoning, the answer) in a content round a closing tag that has lost its opening one,
    or (None, None), as for one that is quoted: in a block of code and in JSON, too."""
    before, tag, after = content.partition(CLOSE)
    quoted = before.endswith(("`", "'", '"')) or before.count("```") % 2
    if tag and OPEN not in before and not quoted and not before.lstrip().startswith("{"):
        return before.strip(), after.lstrip()
    return None, None


def overlap(text, tag):
    """How many characters at the end of `text` could be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def split_thinking(content, thought=False):
    """(reasoning, content) of a whole message. Its thinking may also have lost the opening tag,
    unless the engine has found some (`thought`)."""
    leak = LeakedThinking()
    reasoning, rest = leak.feed(content)
    last_reasoning, last_rest = leak.flush()
    reasoning += last_reasoning
    rest += last_rest
    if not thought and not reasoning and leak.past_tags and rest == content:
        before, after = around_orphan(content)
        if after is not None:
            return before, after
    if not thought:
        reasoning = reasoning.strip()
    return reasoning, rest


def set_reasoning(message, names, extra=""):
    """Give a message or a delta its reasoning under `names` alone, `extra` added to it. Returns
    whether anything changed."""
    had = {name: message[name] for name in NAMES if name in message}
    if not had and not extra:
        return False
    texts = [text for text in had.values() if isinstance(text, str) and text]
    text = "".join(texts[:1]) + extra
    wanted = {name: text for name in names if text}
    if had == wanted:
        return False
    for name in had:
        del message[name]
    message.update(wanted)
    return True
