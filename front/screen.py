"""What the start says, in one screen."""

from log import printable


def screen(settings, models, keys, is_local):
    """The text. `models` are those that are loaded, `keys` is the number of active ones."""
    where = f"http://{reachable(settings.bind)}"
    fronts = ", ".join(settings.upstream)
    if is_local:
        fronts = "a small model on this machine"
    active = "none yet"
    if keys:
        active = f"{keys} active"
    return f"""\
Sparks
  listens at  {settings.bind}
  people use  {settings.base_url or where}/v1   (everything is explained at {where}/help)
  fronts      {fronts}
  engine      {engine_line(models, is_local)}
  keys        {active}; ./run.sh keys add NAME makes one"""


def reachable(bind):
    """The address at which this machine reaches what it listens on."""
    return bind.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


def engine_line(models, is_local):
    if models:
        return ", ".join(map(described, models))
    if is_local:
        return "is being loaded"
    return (
        "does not answer yet. "
        "No vLLM at hand? ./run.sh --local serves a small model on this machine"
    )


def described(model):
    name = printable(model.id)
    if not model.context:
        return name
    return f"{name}, {model.context:,} tokens of context"
