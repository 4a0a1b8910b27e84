"""What an engine's cache holds of prompts, as far as that can be told from outside."""

from bisect import bisect_left
from collections import OrderedDict
from typing import Any, NamedTuple

BLOCK = 1 << 14  # bytes of a prompt's text for which one hash stands
UNKNOWN = 4 << 20  # tokens of a cache whose size nobody has told
MOST_BLOCKS = 1 << 14
STEP = 0.02  # by which the size is corrected, for one answer that shows it to be wrong
DOUBTS = 16  # answers in a row of whose prompts nothing was cached, against what was expected


class Block(NamedTuple):
    """When it was used last, by whom, its tokens, and the hash of the one before it, or None."""

    used: float
    key: Any
    tokens: float
    before: bytes | None


class Mirror:
    """The blocks that are likely cached, those first that were not used for longest.

    Of a prompt the end is thrown away before the beginning, as engines do it, so what is left of it
    are always its first blocks.

    most    tokens that it holds; 0 too where an engine keeps nothing, whatever room it has
    missed  how often in a row nothing was cached of what should have been
    tokens  those that it holds now
    """

    def __init__(self):
        self.told = None
        self.most = UNKNOWN
        self.missed = 0
        self.clear()

    def clear(self):
        """Nothing is cached any more."""
        self.blocks = OrderedDict()
        self.tokens = 0
        self.forget()

    def forget(self):
        """What was found out does not hold any more: the same is asked of it again and again in one
        decision."""
        self.summed = None
        self.colds = {}

    def resize(self, told):
        """The cache holds so many tokens, as its engine or its owner says; None: nobody does."""
        if told != self.told:
            self.told = told
            self.begin_anew()

    def begin_anew(self):
        """Believe what was told of its size."""
        self.most = UNKNOWN if self.told is None else self.told
        self.missed = 0
        self.shrink()

    def hits(self, need):
        """How many blocks of a prompt it holds."""
        if not need.hashes:
            return 0
        return bisect_left(need.hashes, True, key=lambda each: each not in self.blocks)

    def cold(self, need):
        """How many tokens of a prompt it does not hold."""
        if not need.hashes:
            return need.tokens
        prompt = need.hashes[-1], need.tokens
        cold = self.colds.get(prompt)
        if cold is None:
            cold = self.colds[prompt] = need.tokens - round(self.hits(need) * tokens_a_block(need))
        return cold

    def touch(self, key, need, now, count=None):
        """The first `count` blocks of a prompt are in use; None: all of them."""
        if not need.hashes:
            return
        self.forget()
        tokens = tokens_a_block(need)
        befores = (None, *need.hashes)
        for index in reversed(range(len(need.hashes[:count]))):
            each = need.hashes[index]
            known = self.blocks.pop(each, None)
            self.tokens += tokens - (known.tokens if known else 0)
            self.blocks[each] = Block(now, key, tokens, befores[index])
        self.shrink()

    def shrink(self):
        """What was not used for longest is not cached any more."""
        self.forget()
        while self.blocks and (self.tokens > self.most or len(self.blocks) > MOST_BLOCKS):
            _, block = self.blocks.popitem(last=False)
            self.tokens -= block.tokens

    def hot(self, since):
        """The blocks that were used since then: (hash, Block) each."""
        for each, block in reversed(self.blocks.items()):
            if block.used < since:
                return
            yield each, block

    def hot_tokens(self, since):
        """How many tokens those have."""
        if self.summed is None or self.summed[0] != since:
            self.summed = since, sum(block.tokens for _, block in self.hot(since))
        return self.summed[1]

    def correct(self, ticket, prompt, cold):
        """Learn from how much of a prompt was not cached."""
        if not ticket.need.hashes:
            return
        wrong = ticket.cold - cold
        if abs(wrong) > max(2 * tokens_a_block(ticket.need), prompt / 4):
            self.most *= 1 + STEP if wrong > 0 else 1 - STEP
            self.most = min(self.most, 2 * (self.told or UNKNOWN))
            self.shrink()
        self.count_missed(ticket, prompt - cold)

    def count_missed(self, ticket, cached):
        """An engine of which nothing is ever cached keeps nothing, until it says otherwise: what is
        going on is no reason to wait there."""
        a_block = tokens_a_block(ticket.need)
        if cached >= a_block / 2:
            self.missed = 0
            if not self.most:
                self.begin_anew()
        elif ticket.need.tokens - ticket.cold >= a_block:
            self.missed += 1
            if self.missed == DOUBTS:
                self.most = 0
                self.shrink()


def tokens_a_block(need):
    return need.tokens * BLOCK / need.size if need.size else 0
