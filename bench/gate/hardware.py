"""How fast an engine is, and the flags it was started with: constants and where they come from.

Sources are public threads: MiaAI-Lab/GLM-Flash-DGX-Spark (#6, #32, #110, PR 40, 80, 112) and
blazux/qwen-spark (#9).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """What a step takes, in seconds: base, decode for each sequence that makes a token, chunk for
    each whose prompt is read, and prefill for each token of that, which takes longer by `bend` for
    each million tokens before it.

    block     tokens of a KV block. A prefix is found in whole blocks only, so that even a warm turn
              reads up to a block anew
    capacity  tokens that the KV cache holds
    gained    tokens that a sequence gains with a step: more than 1 with a drafter
    """

    base: float = 0.017  # with 1 to 8 sequences a step takes 18 to 25 ms
    decode: float = 0.001
    chunk: float = 0.05  # PR 40: 2048 for 1024 brings 3 to 16 %
    prefill: float = 0.00062  # PR 112: two chunks of 1024 in 1.41 s, 1,450 tokens a second
    bend: float = 0.3  # #32: 871 tokens a second at 200k, 790 at 900k
    block: int = 3584  # PR 80
    capacity: int = 3_000_000
    gained: float = 1


FOUR = Hardware()  # Sparks
# #6: 55 tokens a second alone, with a drafter; #110: 325k in 447 s, and the cache at its start
TWO = Hardware(base=0.115, decode=0.004, prefill=0.00122, capacity=1_105_151, gained=6.6)


@dataclass(frozen=True)
class Flags:
    """vLLM's own.

    budget     --max-num-batched-tokens: tokens of a step
    threshold  --long-prefill-token-threshold: of one prompt's at most; None: no bound
    sequences  --max-num-seqs
    reserve    whether a prompt waits until there is room for all of it, as in newer versions
    """

    budget: int = 2048
    threshold: int | None = 1024
    sequences: int = 8
    reserve: bool = True


GOOD = Flags()
BAD = Flags(budget=8192, threshold=None)  # the defaults on a large GPU: blazux #9
FLAGS = {"good": GOOD, "bad": BAD}
