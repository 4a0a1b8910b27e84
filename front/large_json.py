"""Large bodies, pure: the long strings of a JSON text are taken out while it arrives, and put back
where they belong in the text that goes to the engine.

The abridged text is small enough to be parsed and written at once; an image or a long prompt is
never parsed, copied or escaped again. A long string is abridged to its first characters and a mark:

    {"url":"data:image/png;base64,iVBORw0KGgoAAAANSUh and so on for megabytes"}
    {"url":"data:image/png;base64,iVBORw0KG\\u0001<mark>:0\\u0001"}

A mark stands between control characters, which JSON must escape. So the backslashes before it tell
how often it was escaped on its way: an object that became a string, as tool arguments do, gets its
long strings back escaped once more."""

import codecs
import re
from math import isqrt

from errors import InvalidRequest, TooLarge

LONG = 1 << 14  # bytes from which a string is taken out
PIECE = 1 << 18  # bytes of one that are escaped in one go
HEAD = 1 << 10  # bytes of it that stay: what is told, cut or measured by its beginning
MOST = 32 << 20  # bytes of an abridged text: no context is as long
MOST_STRINGS = 600_000  # in it, names included
MOST_STAYING = 4 << 20  # bytes of a string that stays whole
# What stands before a string whose inside the dialects read: it stays whole.
STAYS = re.compile(rb'"(?:arguments|encrypted_content)"\s*:\s*$')
# What may stand in a string: no half of a character, in UTF-16's way, without its other half.
ESCAPE = (
    rb'\\(?:["\\/bfnrt]|u(?:(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
INSIDE = re.compile(rb'(?:[^"\\]++|%b)*+' % ESCAPE)
ONE_INSIDE = re.compile(rb'[^"\\]|%b' % ESCAPE)
LONGEST_ESCAPE = 12  # bytes: both halves of a character
BACKSLASH = ord("\\")
FENCE = b"\\u0001"  # a control character, which stays an escape in any JSON


def shorter(length):
    """Matches a text that begins outside a string, up to the first string that may have more bytes
    than `length`. Of strings with escapes it knows those as short that have few, not far apart."""
    some = isqrt(length)
    escapes = rb"[^\"\\]{0,%d}+(?:\\.[^\"\\]{0,%d}+){0,%d}+" % (some - 2, some - 2, some - 1)
    return re.compile(rb'(?:[^"]*+"(?:[^"\\]{0,%d}+"|%b"))*+' % (length, escapes), re.S)


SHORT = shorter(LONG)


class Abridged:
    """A JSON text without its long strings. It is fed the text piece by piece, so that other work
    can be done in between.

    mark    random text that no client can know, so that nobody's words are taken for a mark
    mark_in an expression for it in a text
    whole   all bytes so far, as a bytearray; strings are cut out of it without a copy
    at      how far it was looked at
    begin   where the string begins that is open there, or None
    cuts    (begin, end) of what is taken out
    out     how many bytes that are
    quotes  how many there were round strings, or somewhat fewer
    """

    def __init__(self, mark):
        """It begins empty."""
        self.mark = mark.encode()
        # Sought without the backslashes before it: an expression that begins with letters is fast.
        self.mark_in = re.compile(rb"u0001" + self.mark + rb":(\d+)\\++u0001")
        self.whole = bytearray()
        self.at = 0
        self.begin = None
        self.cuts = []
        self.out = 0
        self.quotes = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, data):
        """Raises InvalidRequest where the bytes are no UTF-8, and where there are too many of
        them beside the long strings, or too many strings."""
        self.check(data)
        self.whole += data
        self.quotes += data.count(b'"') - data.count(b'\\"')
        if self.quotes > 2 * MOST_STRINGS:
            raise InvalidRequest(f"the body holds over {MOST_STRINGS:,} texts and names of fields")
        self.scan()
        open_string = 0 if self.begin is None else len(self.whole) - self.begin
        if len(self.whole) - self.out - open_string > MOST:
            raise too_much()

    def scan(self):
        """Go through what has come."""
        end = len(self.whole)
        while self.at < end:
            if self.begin is None:
                quote = self.whole.find(b'"', SHORT.match(self.whole, self.at).end())
                if quote < 0:
                    self.at = end
                else:
                    self.at = self.begin = quote + 1
            elif not self.close():
                return

    def check(self, data, final=False):
        """Raises InvalidRequest where the bytes are no UTF-8, which no parser sees in what is cut
        out."""
        if final or not data.isascii() or self.decoder.getstate()[0]:
            try:
                self.decoder.decode(data, final)
            except UnicodeDecodeError:
                raise InvalidRequest("the body is not valid JSON: it is no UTF-8") from None

    def close(self):
        """Go to the end of the string that is open. Returns whether it has come. Raises
        InvalidRequest where what stands in it is no text."""
        quote = INSIDE.match(self.whole, self.at).end()
        left = len(self.whole) - quote
        if not left or self.whole[quote] == BACKSLASH and left < LONGEST_ESCAPE:
            self.at = quote
            return False
        if self.whole[quote] == BACKSLASH:
            raise InvalidRequest("the body is not valid JSON: an escape in a string is none")
        if quote - self.begin > LONG:
            before = max(0, self.begin - 40)
            stays = STAYS.search(self.whole, before, self.begin - 1) or not self.cut(quote)
            if stays and quote - self.begin > MOST_STAYING:
                raise TooLarge(
                    "the arguments of a tool call, or what is encrypted in one item, are over "
                    f"{MOST_STAYING >> 20} MB"
                )
        self.begin = None
        self.at = quote + 1
        return True

    def cut(self, end):
        """Take out the string that ends here, but for its head, which must not end inside an escape
        or a character, nor in a backslash. Returns whether that could be."""
        begin = INSIDE.match(self.whole, self.begin, self.begin + HEAD).end()
        while self.whole[begin] & 0xC0 == 0x80 or self.whole[begin - 1] == BACKSLASH:
            begin = ONE_INSIDE.match(self.whole, begin).end()
            if begin > self.begin + 2 * HEAD:
                return False
        self.cuts.append((begin, end))
        self.out += end - begin
        return True

    def text(self):
        """The abridged text, as bytes. Raises InvalidRequest where the bytes end in the middle of a
        character."""
        self.check(b"", final=True)
        out = []
        at = 0
        for number, (begin, end) in enumerate(self.cuts):
            out += [memoryview(self.whole)[at:begin], FENCE, self.mark, b":%d" % number, FENCE]
            at = end
        out.append(memoryview(self.whole)[at:])
        if sum(map(len, out)) > MOST:  # in a string that never ends
            raise too_much()
        return b"".join(out)

    def restore(self, text):
        """A text that was made from the abridged one, with the long strings in their places.

        Returns a list of bytes-like pieces.
        """
        whole = memoryview(self.whole)
        text = memoryview(text)
        out = []
        at = 0
        for found in self.mark_in.finditer(text) if self.cuts else ():
            begin, end = self.cuts[int(found[1])]
            slashes = backslashes(text, found.start())
            out.append(text[at : found.start() - slashes])
            out += escaped(whole[begin:end], slashes)
            at = found.end()
        return [*out, text[at:]]


def backslashes(text, end):
    """How many backslashes stand before that place."""
    begin = end
    while text[begin - 1] == BACKSLASH:
        begin -= 1
    return end - begin


def escaped(string, slashes):
    """The inside of a JSON string as it stands where a mark has so many backslashes before it, in
    pieces.

    Each string around another one doubles the backslashes of what is inside: 1, 2, 4, ...
    """
    if slashes == 1:
        return [string]
    return [escaped_piece(string[at : at + PIECE], slashes) for at in range(0, len(string), PIECE)]


def escaped_piece(string, slashes):
    while slashes > 1:
        string = bytes(string).replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        slashes //= 2
    return string


def too_much():
    return InvalidRequest(f"the body holds over {MOST >> 20} MB beside its long texts and images")
