"""What each key may use, and what it has used."""

from collections import deque
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import NamedTuple

from errors import LimitExceeded, QuotaExceeded

MINUTE = 60.0
SOON = 5  # seconds after which a request may have ended whose tokens are put by


class Limits(NamedTuple):
    """What a key may do; None is no limit.

    share  how many turns it has for each of another key; None is 1
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    active: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    share: int | None = None

    @property
    def count_tokens(self):
        tokens = (self.tokens_per_minute, self.tokens_per_day, self.tokens_per_month)
        return tokens != (None, None, None)


NONE = Limits()


class Account:
    """What a key has used.

    active, waiting, preparing
                     its requests right now
    worked           the work that was done for it, in tokens for a share of 1; where the Gate
                     knows no tokens, when it had its last turn, counted in grants
    pending          the same of the work that is being done, as it is expected
    requests         moments of the last minute's requests
    tokens           (moment, count) of the last minute; `minute` is the sum of the counts
    day, month       Budgets
    reserved         tokens put by for its requests that run
    """

    def __init__(self):
        """It has used nothing."""
        self.limits = NONE
        self.active = self.waiting = self.preparing = 0
        self.worked = self.pending = 0
        self.requests = deque()
        self.tokens = deque()
        self.minute = 0
        self.day = Budget("today", day_bounds)
        self.month = Budget("this month", month_bounds)
        self.reserved = 0

    @property
    def is_here(self):
        return self.active or self.waiting

    def busy(self):
        return self.limits.active is not None and self.active >= self.limits.active

    def forget(self, now):
        """Drop what is older than a minute."""
        while self.requests and self.requests[0] <= now - MINUTE:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= now - MINUTE:
            self.minute -= self.tokens.popleft()[1]

    def spend(self, tokens, now, wall):
        if tokens:
            self.tokens.append((now, tokens))
            self.minute += tokens
            self.day.add(tokens, wall)
            self.month.add(tokens, wall)

    def reserve(self, ticket, tokens):
        """Put so many tokens by for a request, in place of those that were."""
        self.reserved += tokens - ticket.reserved
        ticket.reserved = tokens

    # -- turns

    @property
    def turn(self):
        """The key with the least has the next turn."""
        return self.worked + self.pending

    def begin_work(self, ticket):
        ticket.charged = ticket.cost / (self.limits.share or 1)
        self.pending += ticket.charged

    def end_work(self, ticket, work, most):
        """A request was so much work, for a share of 1. `most`: how far the key may fall behind."""
        self.pending -= ticket.charged
        self.worked = min(self.worked + work, most)
        ticket.charged = 0

    # -- limits

    def check(self, now, wall):
        """Raises LimitExceeded, QuotaExceeded where the next request would be beyond a limit."""
        self.forget(now)
        limit = self.limits.requests_per_minute
        if limit is not None and len(self.requests) >= limit:
            at = self.requests[-limit] + MINUTE
            raise over_limit("requests a minute", limit, len(self.requests), at, now)
        self.check_tokens(now, wall)

    def check_tokens(self, now, wall):
        """The same of its tokens."""
        self.forget(now)
        limit = self.limits.tokens_per_minute
        if limit is not None and self.minute >= limit:
            raise over_limit("tokens a minute", limit, self.minute, self.next_room(), now)
        if limit is not None and self.minute + self.reserved >= limit:
            raise LimitExceeded(
                put_by(limit, "tokens a minute", self.minute, self.reserved), retry_after=SOON
            )
        self.check_budgets(wall, self.reserved)

    def check_budgets(self, wall, reserved=0):
        """Raises QuotaExceeded where a budget is used up; LimitExceeded where it only is with so
        many tokens that are put by, for then it pays to try again."""
        limits = self.limits
        for limit, budget in (
            (limits.tokens_per_day, self.day),
            (limits.tokens_per_month, self.month),
        ):
            if limit is not None:
                budget.check(limit, reserved, wall)

    def has_tokens(self, now, wall):
        """Whether its limits leave any for one more of its requests that wait."""
        if not self.limits.count_tokens:
            return True
        try:
            self.check_tokens(now, wall)
        except (LimitExceeded, QuotaExceeded):
            return False
        return True

    def spent(self, wall):
        """The Refusal for its requests that wait, if a budget is used up; or None."""
        try:
            self.check_budgets(wall)
        except QuotaExceeded as refusal:
            return refusal
        return None

    def next_room(self):
        """When enough tokens have fallen out of the minute to let one request in again."""
        used = self.minute
        for moment, count in self.tokens:
            used -= count
            if used < self.limits.tokens_per_minute:
                return moment + MINUTE
        return self.tokens[-1][0] + MINUTE

    # -- what clients may know

    def standing(self, limits, now):
        """The windows as OpenAI's x-ratelimit- headers name them: a dict, empty without such
        limits."""
        self.forget(now)
        headers = {}
        if limits.requests_per_minute is not None:
            moments = self.requests
            used = len(moments)
            headers |= window("requests", limits.requests_per_minute, used, moments, now)
        if limits.tokens_per_minute is not None:
            moments = [self.tokens[0][0]] if self.tokens else []
            used = self.minute + self.reserved
            headers |= window("tokens", limits.tokens_per_minute, used, moments, now)
        return headers


class Budget:
    """Tokens of a calendar period. `bounds` is a function: moment -> (begin, end) of its period,
    whose name for people is `name`.

    Moments are the wall clock's, in epoch seconds.
    """

    def __init__(self, name, bounds):
        self.name = name
        self.bounds = bounds
        self.begin = 0
        self.end = 0
        self.count = 0

    def used(self, now):
        if not self.begin <= now < self.end:
            self.begin, self.end = self.bounds(now)
            self.count = 0
        return self.count

    def add(self, tokens, now):
        self.count = self.used(now) + tokens

    def raise_to(self, tokens, now):
        self.count = max(self.used(now), tokens)

    def check(self, limit, reserved, now):
        """See Account.check_budgets."""
        used = self.used(now)
        if used >= limit:
            when = datetime.fromtimestamp(self.end, UTC).strftime("%Y-%m-%d %H:%M UTC")
            raise QuotaExceeded(
                f"this key may use {limit:,} tokens {self.name} and has used {used:,};"
                f" it starts anew at {when}",
                retry_after=max(1, ceil(self.end - now)),
            )
        if used + reserved >= limit:
            raise LimitExceeded(
                put_by(limit, f"tokens {self.name}", used, reserved), retry_after=SOON
            )


def midnight(now):
    """The beginning of the day, UTC."""
    moment = datetime.fromtimestamp(now, UTC)
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def day_bounds(now):
    """(begin, end) of the day, in epoch seconds."""
    begin = midnight(now)
    return begin.timestamp(), (begin + timedelta(days=1)).timestamp()


def month_bounds(now):
    """(begin, end) of the month, in epoch seconds."""
    begin = midnight(now).replace(day=1)
    return begin.timestamp(), (begin + timedelta(days=32)).replace(day=1).timestamp()


def window(what, limit, used, moments, now):
    """The headers of one window. The first of `moments` is when its oldest use was, if any."""
    reset = 0.0
    if moments:
        reset = max(0.0, moments[0] + MINUTE - now)
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, limit - used)),
        f"x-ratelimit-reset-{what}": f"{reset:.3f}s",
    }


def over_limit(what, limit, used, at, now):
    wait = max(1, ceil(at - now))
    return LimitExceeded(
        f"this key may use {limit} {what} and has used {used}; the next is free in {wait} s",
        retry_after=wait,
    )


def put_by(limit, what, used, reserved):
    return (
        f"this key may use {limit:,} {what} and has used {used:,}; its requests that are running "
        f"may use {reserved:,} more: try again when one of them has ended"
    )
