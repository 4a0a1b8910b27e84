"""bench/gate/picture.py, and the picture that it made of real requests: docs/queue.svg."""
from xml.etree import ElementTree

import pytest

from bench.gate.picture import draw, phases
from support import ROOT

SVG = "{http://www.w3.org/2000/svg}"
READ = {"name": "Ben's <prompt>", "sent": 0.0, "in": 2.0, "first": 5.0, "over": 8.0}


@pytest.mark.parametrize("changes, found", [
    ({}, [("waits", 0.0, 2.0), ("read", 2.0, 5.0), ("answer", 5.0, 8.0)]),
    ({"in": 0.0}, [("read", 0.0, 5.0), ("answer", 5.0, 8.0)]),
    ({"first": None}, [("waits", 0.0, 2.0), ("read", 2.0, 8.0)]),
    ({"in": None, "first": None}, [("waits", 0.0, 8.0)]),
    ({"in": None, "first": None, "over": None}, []),
])
def test_what_a_request_did(changes, found):
    assert phases({**READ, **changes}) == found


def shapes(text):
    """How many shapes of each style a picture has, and its words."""
    nodes = list(ElementTree.fromstring(text).iter())
    styles = [node.get("class") for node in nodes if node.tag in (SVG + "rect", SVG + "circle")]
    words = [node.text for node in nodes if node.tag == SVG + "text"]
    return {style: styles.count(style) - 1 for style in set(styles)}, words       # one of each explains it


def test_requests_of_one_name_share_a_row_with_a_dot_for_each_first_token():
    later = {**READ, "sent": 10, "in": 10, "first": 11, "over": 11}
    styles, words = shapes(draw([{"title": "one", "requests": [READ]}, {"title": "two", "requests": [READ, later]}]))
    assert styles == {"waits": 2, "read": 3, "answer": 2, "dot": 2}
    assert words.count(READ["name"]) == 2 and "first token: 5.0 s" in words and "2 turns, slowest 5.0 s" in words


def test_the_page_has_such_a_picture():
    file = ROOT / "docs" / "queue.svg"
    styles, words = shapes(file.read_text())
    assert file.stat().st_size < 40_000 and "](queue.svg)" in (ROOT / "docs" / "queue.md").read_text()
    assert min(styles.values()) >= 3 and "Requests are counted: heavy_prompt = 0" in words
