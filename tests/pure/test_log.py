"""The log's lines, and what a terminal shows: nothing from outside is raw in them."""
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log import LINES, json_line, lines_of, logfmt_line, printable

ODD = ["\x1b[2J", "a\nb", "a\rb", "a\tb", "\x00", "\x07", "\x7f", "\x85", "\x9b31m", "\xa0", "\xad", "\u200b", "\u200e", "\u2028",
       "\u2029", "\u202e", "\u2066", "\ufeff", "\ud800", "\U000e0041"]


@pytest.mark.parametrize("form", LINES)
@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_what_cannot_be_printed_is_never_raw(form, text):
    for value in (text, f"glm{text}5", f'say "{text}" é = 1'):
        line = LINES[form]({"model": value, "none": None})
        assert line.isprintable()
        assert json.loads(line if form == "json" else line.removeprefix("model=")) in ({"model": value}, value)
    assert printable(text).isprintable() and printable(text) != text


def test_what_can_be_stays_as_it_is():
    fields = {"key": "zoë", "model": "GLM-5.3", "message": 'no "日本" = 1', "status": 200, "first_ms": None}
    assert logfmt_line(fields) == 'key=zoë model=GLM-5.3 message="no \\"日本\\" = 1" status=200'
    assert json_line(fields) == '{"key": "zoë", "model": "GLM-5.3", "message": "no \\"日本\\" = 1", "status": 200}'
    assert lines_of("zoë\n  日本\n") == "zoë\n  日本\n"


def test_no_line_of_a_traceback_passes_for_one_of_the_log():
    lines = lines_of(logfmt_line({"message": "fault", "traceback": "Traceback\nValueError: a\ntime=2026 \x1b[2J\u2028b"}))
    assert lines == "message=fault\n  Traceback\n  ValueError: a\n  time=2026 \\x1b[2J\\u2028b"


@given(st.text())
def test_any_text(text):
    assert json.loads(json_line({"a": text})) == {"a": text} and json_line({"a": text}).isprintable()
    assert logfmt_line({"a": text}).isprintable() and printable(text).isprintable() and len(lines_of(text).splitlines()) <= text.count("\n") + 1
