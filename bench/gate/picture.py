"""Draws when requests waited, were read and answered, as an SVG: docs/queue.svg.

    python -m bench.gate.picture TRACE.json PICTURE.svg

TRACE.json is what tests/engines/test_gate_vllm.py leaves: a list of scenes {"title", "requests"},
where a request is {"name", "sent", "in", "first", "over"}: seconds; "in" is when the gate let it
in, "first" its first token, null what never came. Requests of one name share a row.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

WIDTH = 860
LEFT = 150  # of which are names
RIGHT = 150  # of which are remarks
ROW = 22
BAR = 12
PAD = 34  # above a scene's rows, for its title
TICK = 5  # seconds
# What a request does from each of its moments on to the next one.
PHASES = (("sent", "waits"), ("in", "read"), ("first", "answer"))
KEYS = {
    "waits": "waits at the gate",
    "read": "its prompt is read",
    "answer": "is answered",
    "dot": "first token of a turn",
}
# Tones that can be told apart on white and on black, and in grey.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #444 }
.title { font-weight: 600 } .small { font-size: 11px }
.grid { stroke: #8884; stroke-width: 1 }
.waits { fill: #b8bec8 } .read { fill: #d98a2b } .answer { fill: #3f7fbf } .dot { fill: #111 }
@media (prefers-color-scheme: dark) {
text { fill: #ccc } .waits { fill: #5b6270 } .dot { fill: #fff } }
"""


def draw(scenes):
    """The picture of a list of scenes, one below the other on one scale of time, as text."""
    end = max(last_moment(one) for scene in scenes for one in scene["requests"])
    scale = (WIDTH - LEFT - RIGHT) / end
    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    ElementTree.SubElement(svg, "title").text = "; ".join(scene["title"] for scene in scenes)
    ElementTree.SubElement(svg, "style").text = STYLE
    top = 0
    for scene in scenes:
        top = draw_scene(svg, scene, top, end, scale)
    draw_keys(svg, top + 24)
    svg.set("viewBox", f"0 0 {WIDTH} {top + 36}")
    ElementTree.indent(svg, "")
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def draw_scene(svg, scene, top, end, scale):
    """Draw one scene below `top`; returns where it ends."""
    write(svg, 0, top + 18, scene["title"], "title")
    names = list(dict.fromkeys(one["name"] for one in scene["requests"]))
    bottom = top + PAD + ROW * len(names)
    for second in range(0, int(end) + 1, TICK):
        x = LEFT + second * scale
        line = {"x1": x, "x2": x, "y1": top + PAD - 6, "y2": bottom}
        add(svg, "line", "grid", **line)
        write(svg, x - 4, bottom + 13, f"{second} s", "small")
    for number, name in enumerate(names):
        requests = [one for one in scene["requests"] if one["name"] == name]
        draw_row(svg, name, requests, top + PAD + ROW * number, scale)
    return bottom + 24


def draw_row(svg, name, requests, y, scale):
    """Draw the requests of one name; where they are several turns, a dot for each first token."""
    write(svg, 0, y + BAR - 1, name)
    for one in requests:
        for phase, begin, end in phases(one):
            x = LEFT + begin * scale
            add(svg, "rect", phase, x=x, y=y, width=(end - begin) * scale, height=BAR)
        if len(requests) > 1 and one["first"] is not None:
            add(svg, "circle", "dot", cx=LEFT + one["first"] * scale, cy=y + BAR / 2, r=2.5)
    write(svg, WIDTH - RIGHT + 8, y + BAR - 1, remark(requests), "small")


def draw_keys(svg, y):
    x = LEFT
    for name, meaning in KEYS.items():
        if name == "dot":
            add(svg, "circle", name, cx=x + 6, cy=y - 4, r=2.5)
        else:
            add(svg, "rect", name, x=x, y=y - 10, width=BAR, height=BAR)
        write(svg, x + 18, y, meaning, "small")
        x += 150


def phases(request):
    """(phase, begin, end) of what a request did, as far as it came."""
    moments = [(request[name], phase) for name, phase in PHASES] + [(request["over"], None)]
    known = [moment for moment in moments if moment[0] is not None]
    return [(phase, begin, end) for (begin, phase), (end, _) in pairwise(known) if end > begin]


def remark(requests):
    """How long first tokens took."""
    waits = [one["first"] - one["sent"] for one in requests if one["first"] is not None]
    if not waits:
        return "no first token"
    if len(requests) == 1:
        return f"first token: {waits[0]:.1f} s"
    return f"{len(waits)} turns, slowest {max(waits):.1f} s"


def last_moment(request):
    return max(at for at in request.values() if isinstance(at, (int, float)))


def add(svg, kind, style, **places):
    numbers = {name: f"{round(place, 1):g}" for name, place in places.items()}
    return ElementTree.SubElement(svg, kind, {"class": style} | numbers)


def write(svg, x, y, words, style="name"):
    add(svg, "text", style, x=x, y=y).text = words


def main(trace, picture):
    Path(picture).write_text(draw(json.loads(Path(trace).read_text())), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
