"""Bytes and texts cut anywhere: what is read in them must not depend on the pieces they arrive in."""
import itertools
import re

from hypothesis import strategies as st

SIZES = (1, 2, 3, 7, 128)
SHORT = 500                                         # bytes; what is shorter is cut in two at every place
# Inside a CRLF, a blank line, an escape, a character of several bytes, a tag: where a careless reader breaks.
SEAM = re.compile(rb"\r(?=\n)|(?<=[\r\n])\n|\\(?=.)|(?<=\\)u(?=.)|[\x80-\xff](?=[\x80-\xbf])|<(?=.)|(?<=/)t", re.S)

BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n")


def pieces(data, places):
    """Bytes or a text, cut at these places."""
    at = sorted({0, len(data), *places})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def seams(data):
    raw = data.encode("ascii", "replace") if isinstance(data, str) else data
    return [match.end() for match in SEAM.finditer(raw)]


def events(data):
    """Where each event ends: as an engine sends them."""
    return [match.end() for match in BLANK_LINE.finditer(data)] if isinstance(data, bytes) else []


def cuts(data):
    """Hypothesis: places where bytes or a text are cut; anywhere, at regular distances, or where it hurts."""
    places = st.integers(1, max(1, len(data) - 1))
    ways = [st.sets(places, max_size=12), st.integers(2, 200).map(lambda size: range(size, len(data), size))]
    if found := seams(data):
        ways.append(st.sets(st.sampled_from(found) | places, max_size=12))
    return st.one_of(ways)


def however_cut(data, read):
    """What read(pieces) gives: the same for the whole and for pieces of any size. For a table's streams, one by one;
    where any cuts are drawn for all of them, `cuts` is the property."""
    whole = read(pieces(data, ()))
    ways = [seams(data), events(data), *(range(size, len(data), size) for size in SIZES)]
    ways += [[at] for at in range(1, len(data) if len(data) < SHORT else 0)]
    for places in ways:
        assert read(pieces(data, places)) == whole, f"cut at {places}"
    return whole
