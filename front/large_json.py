"""Large bodies, pure: the long strings of a JSON text are taken out while it arrives, and put back as they were.

What is left, the skeleton, is small enough to be parsed and written at once; an image or a long prompt is never parsed,
copied or escaped again. In a skeleton a long string is its first characters and a mark:

    {"url":"data:image/png;base64,iVBORw0KGgo…"}   ->   {"url":"data:image/png;base64,iVBORw0KG\\u0001<mark>:0\\u0001"}

The marks stand between characters that JSON must escape, so that they tell how often they were escaped on their way: an
object that became a string, as tool arguments do, gets its long strings back escaped once more.
"""

import codecs
import re

import orjson

from errors import InvalidRequest

LONG = 1 << 14  # bytes from which a string is taken out
HEAD = 1 << 10  # bytes of it that stay: what is told, cut or measured by its beginning
MOST = 32 << 20  # bytes of a skeleton: no context is as long
MOST_VALUES = 1_000_000  # objects and lists in it: each costs time and a hundred bytes
STAYS = re.compile(
    rb'"(?:arguments|encrypted_content)"\s*:\s*$'
)  # before a string that is looked into
CLOSE = re.compile(
    rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S
)  # the rest of a string, its closing quote included
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # one half of a character: its other half must follow
BACKSLASH = ord("\\")
FENCE = b"\\u0001"  # a control character, which stays an escape in any JSON


def shorter(length):
    """Matches what begins outside a string, as far as its strings are of no more bytes than that, and without escapes."""
    return re.compile(rb'(?:[^"]*+"[^"\\]{0,%d}+")*+' % length)


SHORT = shorter(LONG)


class Skeleton:
    """Fed a body piece by piece; `feed` may be followed by other work, so it does little at a time.

    mark    random text that no client can know, so that nobody's words are taken for a mark
    whole   all bytes so far, as a bytearray; strings are cut out of it without a copy
    """

    def __init__(self, mark):
        self.mark = mark.encode()
        self.whole, self.at = bytearray(), 0  # looked at up to here
        self.begin = None  # where the string begins that is open here
        self.cuts = []  # (begin, end) of what is taken out
        self.decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, data):
        """Raises InvalidRequest where the bytes are no UTF-8."""
        self.check(data)
        self.whole += data
        end = len(self.whole)
        while self.at < end:
            if self.begin is None:
                quote = self.whole.find(b'"', SHORT.match(self.whole, self.at).end())
                if quote < 0:
                    self.at = end
                else:
                    self.at = self.begin = quote + 1
            elif not self.close():
                self.at = end - half_escape(self.whole[self.at :])
                return

    def check(self, data, final=False):
        if final or not data.isascii() or self.decoder.getstate()[0]:
            try:
                self.decoder.decode(data, final)
            except UnicodeDecodeError:
                raise InvalidRequest("the body is not valid JSON: it is no UTF-8") from None

    def close(self):
        """Go to the end of the string that is open. Returns whether it has come."""
        quote = self.whole.find(b'"', self.at)
        if (
            quote >= 0 and self.whole.find(b"\\", self.at, quote) >= 0
        ):  # no image: quotes in it may be escaped
            closed = CLOSE.match(self.whole, self.at)
            quote = closed.end() - 1 if closed else -1
        if quote < 0:
            return False
        if quote - self.begin > LONG and not STAYS.search(
            self.whole, max(0, self.begin - 40), self.begin - 1
        ):
            self.cut(quote)
        self.begin, self.at = None, quote + 1
        return True

    def cut(self, end):
        """Take out the string that ends here, but for its head, which must not end inside an escape or a character."""
        for begin in range(self.begin + HEAD, self.begin + 2 * HEAD):
            if self.whole[begin] & 0xC0 != 0x80 and b"\\" not in self.whole[begin - 6 : begin]:
                if not self.halves(begin, end) or is_text(self.whole[begin:end]):
                    self.cuts.append((begin, end))  # else it stays, for the parser to complain of
                return

    def halves(self, begin, end):
        """Whether halves of characters are escaped there. An image has no escape at all, which shows seven times as fast."""
        return self.whole.find(b"\\", begin, end) >= 0 and SURROGATE.search(self.whole, begin, end)

    def text(self):
        """The skeleton, as bytes. Raises InvalidRequest where there is too much of it."""
        self.check(b"", final=True)
        out, at = [], 0
        for number, (begin, end) in enumerate(self.cuts):
            out += [memoryview(self.whole)[at:begin], FENCE, self.mark, b":%d" % number, FENCE]
            at = end
        out.append(memoryview(self.whole)[at:])
        if sum(map(len, out)) > MOST:
            raise InvalidRequest(
                f"the body holds over {MOST >> 20} MB beside its long texts and images"
            )
        text = b"".join(out)
        if text.count(b"{") + text.count(b"[") > MOST_VALUES:
            raise InvalidRequest(f"the body holds over {MOST_VALUES:,} objects and lists")
        return text

    def restore(self, text):
        """A text made from the skeleton, with the long strings in their places: a list of bytes-like pieces."""
        mark = re.compile(
            rb"u0001" + self.mark + rb":(\d+)\\++u0001"
        )  # begins with its letters, or it is sought slowly
        view, out, at = memoryview(self.whole), [], 0
        for found in mark.finditer(text) if self.cuts else ():
            begin, end = self.cuts[int(found[1])]
            slashes = backslashes(text, found.start())
            out += [
                memoryview(text)[at : found.start() - slashes],
                escaped(view[begin:end], slashes),
            ]
            at = found.end()
        return [*out, memoryview(text)[at:]]


def backslashes(text, end):
    """How many backslashes stand before that place."""
    begin = end
    while text[begin - 1] == BACKSLASH:
        begin -= 1
    return end - begin


def escaped(string, slashes):
    """The inside of a JSON string inside further ones: each has doubled the backslashes of those within it."""
    while slashes > 1:
        string = bytes(string).replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        slashes //= 2
    return string


def is_text(string):
    """Whether bytes are the inside of a JSON string."""
    try:
        return bool(orjson.loads(b'"' + string + b'"'))
    except orjson.JSONDecodeError:
        return False


def half_escape(rest):
    """Whether the rest of a string that is open ends in the middle of an escape: in an odd number of backslashes."""
    return (len(rest) - len(rest.rstrip(b"\\"))) % 2
