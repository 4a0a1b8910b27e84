"""vLLM's V1 scheduler as far as a gate can feel it: what a step does, how long it takes, and what
the KV cache holds. It knows its cache exactly, which a gate can only guess."""

from collections import Counter, OrderedDict


class Cache:
    """The KV cache, in blocks: free ones, those that sequences use, and idle ones, which are found
    again until their room is needed.

    users  how many sequences use a block
    idle   blocks that nobody uses, the least recently used first
    """

    def __init__(self, blocks):
        self.free = blocks
        self.users = Counter()
        self.idle = OrderedDict()

    @property
    def room(self):
        return self.free + len(self.idle)

    def found(self, blocks):
        """The first of these blocks that are here."""
        count = 0
        while count < len(blocks) and (blocks[count] in self.idle or blocks[count] in self.users):
            count += 1
        return blocks[:count]

    def take(self, count):
        """Whether so many fresh blocks could be had, of idle ones if need be."""
        if count > self.room:
            return False
        while self.free < count:
            self.idle.popitem(last=False)
            self.free += 1
        self.free -= count
        return True

    def use(self, blocks):
        """A sequence begins with blocks that are here."""
        for block in blocks:
            self.idle.pop(block, None)
            self.users[block] += 1

    def publish(self, blocks):
        """Blocks that a sequence has computed are found from now on. Of one that is here already,
        which vLLM may keep twice, the other is free again."""
        for block in blocks:
            if block in self.idle:
                del self.idle[block]
                self.free += 1
            elif block in self.users:
                self.free += 1
            self.users[block] += 1

    def release(self, blocks, others):
        """A sequence uses these no more, nor so many others that nobody can find. The end of a
        prompt goes before its beginning."""
        self.free += others
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.idle[block] = True

    def preload(self, blocks):
        """As if a prompt had run before."""
        for block in reversed(blocks):
            if block not in self.idle and self.take(1):
                self.idle[block] = True


class Sequence:
    """A request inside the engine.

    blocks    names of its prompt's whole blocks, the same for the same beginning
    computed  tokens whose KV is there
    made      tokens of its answer
    held      blocks that it has; the first `shared` of them can be found
    cached    tokens that were in the cache when it began, None until then
    """

    def __init__(self, request, block):
        self.request = request
        self.blocks = request.text.blocks(request.prompt, block)
        self.computed = self.made = self.held = self.shared = 0
        self.cached = None

    @property
    def goal(self):
        """Tokens whose KV the next token of its answer needs, and that token."""
        return self.request.prompt + int(self.made)

    @property
    def decodes(self):
        return self.made > 0 and self.goal - self.computed <= 1

    @property
    def left(self):
        return self.request.answer - self.made


class Engine:
    """A step is a dict: of each sequence that runs in it, how many tokens."""

    def __init__(self, hardware, flags):
        self.hardware = hardware
        self.flags = flags
        self.cache = Cache(hardware.capacity // hardware.block)
        self.waiting = []
        self.running = []
        self.preemptions = 0

    @property
    def is_full(self):
        return len(self.running) >= self.flags.sequences

    def add(self, request):
        self.waiting.append(Sequence(request, self.hardware.block))

    def schedule(self):
        """The next step: those that run go on, in the order in which they came, then others."""
        step = {}
        before = self.preemptions
        for sequence in list(self.running):
            tokens = self.portion(sequence, step)
            while tokens and sequence in self.running and not self.grow(sequence, tokens):
                self.preempt(step)
            if tokens and sequence in self.running:
                step[sequence] = tokens
        if self.preemptions == before:
            while self.waiting and not self.is_full and self.admit(self.waiting[0], step):
                pass
        return step

    def portion(self, sequence, step):
        """How many tokens of it a step takes beside what is in the step already."""
        missing = max(1, sequence.goal - sequence.computed)
        left = self.flags.budget - sum(step.values())
        return min(missing, left, self.flags.threshold or missing)

    def grow(self, sequence, tokens):
        """Whether it has the blocks for so many tokens more."""
        missing = self.blocks_of(sequence.computed + tokens) - sequence.held
        if missing > 0:
            if not self.cache.take(missing):
                return False
            sequence.held += missing
        return True

    def blocks_of(self, tokens):
        return -(-tokens // self.hardware.block)

    def preempt(self, step):
        """The one that came last goes back to the queue, and begins anew."""
        victim = self.running.pop()
        step.pop(victim, None)
        self.release(victim)
        self.waiting.insert(0, victim)
        self.preemptions += 1

    def admit(self, sequence, step):
        """Whether the first that waits could begin in this step."""
        tokens_found = sequence.goal - 1  # the last one is always computed
        found = self.cache.found(sequence.blocks[: tokens_found // self.hardware.block])
        idle = sum(block in self.cache.idle for block in found)
        wanted = self.blocks_of(sequence.goal) - len(found) if self.flags.reserve else 1
        if self.portion(sequence, step) <= 0 or wanted > self.cache.room - idle:
            return False
        self.cache.use(found)
        sequence.held = sequence.shared = len(found)
        sequence.computed = len(found) * self.hardware.block
        tokens = self.portion(sequence, step)
        if not self.grow(sequence, tokens):
            self.release(sequence)
            return False
        if sequence.cached is None:
            sequence.cached = sequence.computed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        step[sequence] = tokens
        return True

    def release(self, sequence):
        self.cache.release(sequence.blocks[: sequence.shared], sequence.held - sequence.shared)
        sequence.computed = sequence.held = sequence.shared = 0

    def end(self, sequence):
        self.running.remove(sequence)
        self.release(sequence)

    def preload(self, request):
        """As if it had run before."""
        self.cache.preload(Sequence(request, self.hardware.block).blocks)

    def read(self, sequence, tokens):
        """A step has read so many tokens of its prompt, or of what it had to compute anew. Whether
        its next token has come with that."""
        sequence.computed += tokens
        whole = min(sequence.computed // self.hardware.block, len(sequence.blocks))
        self.cache.publish(sequence.blocks[sequence.shared : whole])
        sequence.shared = max(sequence.shared, whole)
        if sequence.computed < sequence.goal:
            return False
        sequence.made = max(sequence.made, 1)
        sequence.computed = sequence.goal - 1
        return True

    def decode(self, sequence, steps):
        """So many steps have made its next tokens. How many."""
        made = self.hardware.gained * steps
        sequence.made = min(sequence.request.answer, sequence.made + made)
        sequence.computed = sequence.goal - 1
        return made

    def steps_left(self, sequence):
        """How many steps it can decode before it ends or needs another block."""
        room = sequence.held * self.hardware.block - sequence.computed
        return min(sequence.left, room) / self.hardware.gained

    def seconds(self, step):
        """How long a step takes."""
        hardware = self.hardware
        total = hardware.base
        for sequence, tokens in step.items():
            if sequence.decodes:
                total += hardware.decode
            else:
                bend = 1 + hardware.bend * sequence.computed / 1e6
                total += hardware.chunk + tokens * hardware.prefill * bend
        return total
