"""Where conversations ran last: by a hash that says nothing of them, and only so many."""
from engines import homes
from engines.homes import Homes


def test_the_newest_are_remembered(monkeypatch):
    monkeypatch.setattr(homes, "MOST", 3)
    known = Homes()
    names = [known.name_of(1, "lane", b"%d" % n) for n in range(5)]
    for name in names[:3]:
        known.note(name, "A")
    known.note(names[0], "B")
    known.note(names[3], "C")
    assert [known.find(name) for name in names] == ["B", None, "A", "C", None]


def test_a_name_tells_apart_and_says_nothing():
    known = Homes()
    parts = [(1, "lane", b"opening"), (2, "lane", b"opening"), (1, "other", b"opening"), (1, "lane", b"openin"), (1, "lan", b"eopening")]
    names = [known.name_of(*one) for one in parts]
    assert len(set(names)) == len(parts) and {len(name) for name in names} == {16}
    assert known.name_of(*parts[0]) == names[0] != Homes().name_of(*parts[0])       # under a key of its own
