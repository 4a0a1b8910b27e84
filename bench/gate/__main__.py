"""python -m bench.gate: what a gate does for people, by simulation."""

import click

from . import calibration
from .ablation import TELLING, VARIANTS
from .figures import COLUMNS, TARGETS, row, table, targets_table
from .hardware import FLAGS
from .policies import POLICIES
from .runs import averages
from .traces import TRACES

TUNED = (1, 2)  # the seeds on which the gate's constants were picked
HELD_OUT = (11, 12, 13)


class Seeds(click.ParamType):
    """As "1,2"."""

    name = "N,..."

    def convert(self, value, param, ctx):
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 1,2", param, ctx)


TRACE = click.argument(
    "traces", nargs=-1, type=click.Choice(list(TRACES)), metavar="[TRACE]...", required=False
)
SEEDS = click.option(
    "--seeds", type=Seeds(), default="1,2", show_default=True, help="Runs, whose mean is shown."
)
FLAG = click.option(
    "--flags",
    type=click.Choice(list(FLAGS)),
    default="good",
    show_default=True,
    help="How the engine was started. good: 2048 tokens a step, 1024 of one prompt; bad: 8192, "
    "and no bound for one prompt.",
)
WHOLE = click.option(
    "--whole", is_flag=True, help="Jobs want their answers whole, so nobody sees a first token."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main():
    """What a gate does for people, by simulation: traces of clients against a model of vLLM's
    scheduler, behind no gate, today's gate (`heavy_prompt = 0`) and the new one. It needs no GPU,
    takes seconds, and says the same each time. bench/gate/README.md says how to read it.

    \b
    python -m bench.gate targets               what the gate shall reach, and whether it does
    python -m bench.gate table freeze abuse    all figures of two traces
    python -m bench.gate ablate thrash         what each part of the gate brings there
    python -m bench.gate calibrate             how near the model is to what was published
    """


@main.command("table", epilog="The traces: " + ", ".join(TRACES) + "; without any, all.")
@TRACE
@SEEDS
@FLAG
@WHOLE
def show(traces, seeds, flags, whole):
    """All figures of the traces, behind each gate."""
    say(traces or list(TRACES), list(POLICIES), seeds, flags, whole)
    for name, (meaning, _) in COLUMNS.items():
        click.echo(f"  {name:10}  {meaning}")


@main.command(epilog="Without a trace: " + ", ".join(TELLING) + ".")
@TRACE
@SEEDS
@FLAG
@WHOLE
def ablate(traces, seeds, flags, whole):
    """The gate without each of its parts, and with the first of them alone."""
    say(traces or TELLING, ["today", "new", *VARIANTS], seeds, flags, whole)


def say(traces, policies, seeds, flags, whole):
    """A table for each trace."""
    kinds = ("job",) if whole else ()
    found = averages(traces, policies, seeds, flags, kinds)
    for trace in traces:
        rows = [row(policy, found[trace, policy]) for policy in policies]
        click.echo(table([trace, *COLUMNS], rows) + "\n")


@main.command()
@WHOLE
def targets(whole):
    """What the gate shall reach, and whether it does: on the seeds on which it was tuned, and on
    three that were held out."""
    traces = list(dict.fromkeys(target.trace for target in TARGETS))
    groups = {}
    for seeds in (TUNED, HELD_OUT):
        groups[seeds] = averages(traces, ["today", "new"], seeds, whole=("job",) if whole else ())
    click.echo(targets_table(groups))


@main.command()
def calibrate():
    """Published figures of four and two Sparks, and what the model makes of them."""
    for line in calibration.lines():
        click.echo(line)


if __name__ == "__main__":
    main(prog_name="python -m bench.gate")
