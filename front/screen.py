"""What the start says, in one screen."""

from log import printable


def screen(settings, fleet, keys, is_local):
    """The text. `fleet` is what it fronts, `keys` the number of active ones."""
    where = f"http://{reachable(settings.bind)}"
    fronts = ", ".join(engine.url for engine in fleet.engines)
    if is_local:
        fronts = "a small model on this machine"
    active = "none yet"
    if keys:
        active = f"{keys} active"
    lines = "\n              ".join(engine_lines(fleet, is_local))
    return f"""\
Sparks
  listens at  {settings.bind}
  people use  {settings.base_url or where}/v1   (everything is explained at {where}/help)
  fronts      {fronts}
  engine      {lines}
  keys        {active}; ./run.sh keys add NAME makes one"""


def reachable(bind):
    """The address at which this machine reaches what it listens on."""
    return bind.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


def engine_lines(fleet, is_local):
    """What is served, and each engine that does not serve, with the reason."""
    models = fleet.models()
    if is_local and not models:
        return ["is being loaded"]
    lines = [", ".join(map(described, models))] if models else []
    for engine in fleet.engines:
        if engine.health.word != "up" and not is_local:
            lines.append(f"{engine.url} is {printable(engine.health.told())}")
    if not models:
        lines.append("No vLLM at hand? ./run.sh --local serves a small model on this machine")
    return lines


def described(model):
    name = printable(model.id)
    if not model.context:
        return name
    return f"{name}, {model.context:,} tokens of context"


# ---- the engines, for a command of the owner's


def told(states, now, is_running):
    """What `./run.sh engines` prints of store.states.States. `now`: epoch seconds."""
    if not states:
        return "no gateway has run on this database yet"
    blocks = [] if is_running else ["no gateway runs here now; the engines as they were last seen:"]
    for state in states:
        lines = [f"{state.engine}  {state.word}, {for_how_long(now - state.since)}"]
        if state.reason:
            lines.append(f"  why         {state.reason}")
        if state.error and state.error != f"{state.word}: {state.reason}":
            lines.append(f"  last error  {state.error}")
        if state.about:
            lines.append(f"  serves      {state.about}")
        blocks.append("\n".join(map(printable, lines)))
    return "\n".join(blocks)


def for_how_long(seconds):
    """A time in words: "for 3 h 12 min"."""
    minutes = max(0, round(seconds)) // 60
    if not minutes:
        return f"for {max(0, round(seconds))} s"
    hours = minutes // 60
    days = hours // 24
    if days:
        return f"for {days} d {hours % 24} h"
    if hours:
        return f"for {hours} h {minutes % 60} min"
    return f"for {minutes} min"
