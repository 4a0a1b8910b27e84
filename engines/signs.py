"""What requests have shown of an engine, which says more than any look: pure, of moments by a clock
that nobody sets.
"""


class Signs:
    """The last moments at which something was to be seen.

    heard   something of an answer came: not to a question, which a server answers before a core
            that is dead, too
    failed  a request found no connection, or nothing came to it: not a question, since some engines
            or proxies cut what they do not know
    ailed   a request ended with an error of the engine's
    """

    def __init__(self):
        """Nothing was."""
        self.heard = self.failed = self.ailed = 0.0

    def are_good_since(self, moment, shown=0.0):
        """Whether the last that came was good, and later than that. `shown`: when its server last
        answered anything else."""
        return max(self.heard, shown) > max(moment, self.failed, self.ailed)

    @property
    def are_bad(self):
        """Whether a request went wrong, and nothing has come since."""
        return max(self.failed, self.ailed) > self.heard

    @property
    def are_missing(self):
        """Whether nothing came to a request, nor anything since."""
        return self.failed > self.heard
