"""The people behind a key: what they are called, and how many are told apart."""
import pytest

from people import MOST, OTHERS, People, account_of


def latin(text):
    """A text as a header's value in WSGI, in UTF-8."""
    return text.encode().decode("latin-1")


@pytest.mark.parametrize("value", ["ann", "Müller, Jörg", "日本 語", "x" * 65, "a\x1bb", "others", "a,b", "\xff\xfe"])
def test_a_hash_tells_nothing_and_is_the_same_again(value):
    name = People(b"secret").name_of(latin(value))
    assert len(name) == 16 and set(name) <= set("0123456789abcdef")
    assert name == People(b"secret").name_of(f"  {latin(value)}\t") != People(b"another").name_of(latin(value))
    assert name != People(b"secret").name_of(latin(value + "."))


@pytest.mark.parametrize("value, kept", [
    ("ann", True), ("ann@example.org", True), ("Müller, Jörg", True), ("日本", True), ("à", True), ("x" * 64, True), ("a b", True),
    ("1234567890123456", True), ("0123456789abcdef", False), ("x" * 65, False), ("a\x1b[31mb", False), ("a\u2028b", False), ("a\u202eb", False), ("others", False)], ids=ascii)
def test_a_value_is_kept_where_it_can_be_shown(value, kept):
    people = People(b"secret")
    assert people.name_of(latin(value), plain=True) == (value if kept else people.name_of(latin(value)))


def test_bytes_that_are_no_text_are_not_one_person():
    people = People(b"secret")
    found = {people.name_of(value, plain=True) for value in ("J\xf6rg", "J\xe4rg", "\xff", "\xfe", "\xc3")}
    assert len(found) == 5 and {len(name) for name in found} == {16}


def test_nobody_in_particular():
    for value in ("", "  ", "\t"):
        assert People(b"secret").name_of(value) == People(b"secret").name_of(value, plain=True) == ""
    assert account_of(1, "") == 1 and account_of(1, "ann") == (1, "ann")


def test_of_more_than_the_most_some_are_others():
    """Of one key; another one's people have room of their own."""
    people, gone = People(b""), []

    def forget(name):
        gone.append(name)
        return True
    for day in ("2026-12-01", "2026-12-01"):        # who is known stays so
        assert [people.admit(1, str(n), day, forget) for n in range(MOST)] == [str(n) for n in range(MOST)]
    assert [people.admit(1, name, "2026-12-01", forget) for name in ("new", "newer")] == [OTHERS] * 2
    assert people.admit(2, "new", "2026-12-01", forget) == "new" and not gone
    assert people.admit(1, "0", "2026-12-02", forget) == "0"        # seen again: not the one who was away longest any more
    assert people.admit(1, "new", "2026-12-02", forget) == "new" and gone == ["1"]
    assert len(people.seen[1]) == MOST and people.admit(1, "1", "2026-12-02", forget) == "1" and gone == ["1", "2"]


def test_who_asks_for_something_makes_no_room():
    people, asks = People(b""), {"0", "1"}
    for n in range(MOST):
        people.admit(1, str(n), "2026-12-01", None)
    assert people.admit(1, "new", "2026-12-02", lambda name: name not in asks) == "new"
    assert asks <= people.seen[1].keys() and "2" not in people.seen[1]
    assert people.admit(1, "newer", "2026-12-02", lambda name: False) == OTHERS and len(people.seen[1]) == MOST
