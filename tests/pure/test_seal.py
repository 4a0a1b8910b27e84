"""What clients keep for the gateway: it comes back as it was, and nothing else does."""
import hypothesis
import pytest
from hypothesis import strategies as st

from store.seal import Seal

ONE, OTHER = Seal(bytes(32)), Seal(bytes(31) + b"x")


@hypothesis.given(st.text())
def test_a_text_comes_back(text):
    sealed = ONE.encrypt(text)
    assert ONE.decrypt(sealed) == text and OTHER.decrypt(sealed) is None
    assert sealed.isascii() and sealed.isprintable() and (len(text) < 4 or text not in sealed)


def test_the_same_text_is_sealed_in_another_way_each_time():
    assert len({ONE.encrypt("thought") for _ in range(20)}) == 20


def test_half_a_character_becomes_a_mark():
    assert ONE.decrypt(ONE.encrypt("a\ud83db")) == "a?b"


@pytest.mark.parametrize("at", range(0, 48, 5))
def test_whatever_is_changed_it_does_not_decrypt(at):
    sealed = ONE.encrypt("a thought of some length")
    changed = sealed[:at] + ("A" if sealed[at] != "A" else "B") + sealed[at + 1:]
    assert ONE.decrypt(changed) is None and ONE.decrypt(sealed[:at]) is None and ONE.decrypt(sealed[:at] + sealed[at + 1:]) is None


@pytest.mark.parametrize("text", ["", "=", "A", "AAAA", "gAAAAABo", "é", "\ud83d", "not base64!", "A" * 4000, "\x00"])
def test_what_is_no_seal(text):
    assert ONE.decrypt(text) is None
