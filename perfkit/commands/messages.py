"""Errors in the words of the command line: those of the library, and those of click."""

import re
from difflib import get_close_matches
from typing import NamedTuple

import click

from perfkit.ground.units import escape


class Saying(NamedTuple):
    """Words of the library that a command line needs otherwise."""

    library: str  # a pattern
    command: str


#: What the library says in the words of Python, and what to do on a command line.
SAYINGS = (
    Saying(
        r"hybrid sharding is a strategy: take strategy=Strategy\.hsdp\(.*",
        "hybrid sharding is a strategy: take --dp, --zero 3 and --shards, the ranks that share",
    ),
    Saying(
        r"the model has (\d+) positions; shorten it or raise positions",
        r"the model has \1 positions; take --sequence \1 or less, or another model",
    ),
    Saying(
        r"rehearse is True; (.*); take device='cuda' and name base, such as base='([^']*)'",
        r"--rehearse is given; \1; name --base, such as --base \2",
    ),
    Saying(
        r"to measure this node alone \(ranks=8, --ranks 8\)",
        "to measure this node alone: --ranks 8",
    ),
    Saying(r"mixed is True with dtype '(\w+)'", r"--mixed is given with --dtype \1"),
    Saying(r"take bf16 or fp16, or leave it", "take --dtype bf16 or fp16, or leave --mixed out"),
    Saying(r"with_nodes\(\d+\), --platform", "--platform"),
    Saying(
        r"or (\d+) nodes: with_nodes\(\d+\)",
        r"or \1 nodes: --nodes \1",
    ),
    Saying(
        r"host memory: kernel='uvm_caching', or kernels=\('fused', 'uvm_caching'\) of pk\.shard "
        r"and pk\.judge_plan",
        "host memory: --kernels fused,uvm_caching",
    ),
    Saying(r"; or a trace \(pk\.read_trace\), a training log .*", ""),
    Saying(
        r"it must divide by the (\d+) ranks; take a multiple of \d+",
        r"it must divide by the \1 ranks; take --batch \1 or a multiple of it, or fewer --ranks",
    ),
    Saying(r"give checkpoint= in seconds", "give --checkpoint-time"),
    Saying(r"\b(jitter|mtbf|restart)=(?=[\s,;]|$)", r"--\1"),
    Saying(r"partial=True keeps", "--partial keeps"),
    Saying(r"pass dim=, ", "pass --dim, "),
    Saying(r"leave dim, rows and tables out", "leave --dim and --rows out"),
    Saying(r"pass ranks=, the number", "pass --ranks, the number"),
    Saying(
        r"pass a file that Plan\.save or perfkit shard --out has written",
        "name a plan that perfkit shard --out has written",
    ),
    Saying(
        r"pass a file that Plan\.save has written",
        "name a plan that perfkit shard --out has written",
    ),
    Saying(
        r"Strategy\([^)]*\) cannot share (\w+) of the model",
        r"these ranks cannot share \1 of the model",
    ),
    Saying(
        r"Strategy\([^)]*\) does not go with (\w+) of the model",
        r"how ranks share it does not go with \1 of the model",
    ),
    Saying(
        r"take stack='fsdp' or 'megatron', or a fact of your own, mixed='masters'",
        "take --stack fsdp or --stack megatron",
    ),
    Saying(r"choose device cpu, or", "take --device cpu, or"),
    Saying(
        r"ranks is (\d+), and strategy takes (\d+); leave ranks out, or take a strategy whose .* is \d+",
        r"--ranks is \1, and --tp x --pp x --cp x --dp is \2; leave --ranks out, or make these \1",
    ),
    Saying(
        r"checkpoint_layers is (\d+) .*; take checkpoint=.*, or leave checkpoint_layers out",
        r"--checkpoint-layers is \1 without --checkpoint, so that nothing is computed again; take "
        r"--checkpoint, or leave --checkpoint-layers out",
    ),
    Saying(
        r"take checkpoint=(?:True|'full') without checkpoint_layers, or leave it out",
        "take --checkpoint without --checkpoint-layers, or leave --checkpoint-group out",
    ),
)


#: A strategy as Python writes it, and an argument with its value.
_STRATEGY = re.compile(r"\bStrategy\(([^()]*)\)")
_ARGUMENT = re.compile(r"(?<![\w-])([a-z]\w*)=('[^']*'|[\w.]+),?")
#: Code of PyTorch, whose arguments are no options.
_CODE = re.compile(r"(\btorch\.[\w.]+\([^()]*\))")


def say_for_commands(text: str) -> str:
    """Put an error of the library into the words of the command line.

    Examples
    --------
    >>> say_for_commands("mixed is True with dtype 'fp32'")
    '--mixed is given with --dtype fp32'
    >>> say_for_commands("from Strategy(tp=2, sequence_parallel=True) take offload='optimizer' (fits)")
    'from perfkit predict --tp 2 --sequence-parallel take --offload optimizer (fits)'
    >>> say_for_commands("record steps (torch.profiler.schedule(active=10)), or give jitter= as a number")
    'record steps (torch.profiler.schedule(active=10)), or give --jitter as a number'
    >>> say_for_commands("write srun --ntasks-per-node=8 before it")  # an option already
    'write srun --ntasks-per-node=8 before it'
    """
    for saying in SAYINGS:
        text = re.sub(saying.library, saying.command, text)
    text = _STRATEGY.sub(r"perfkit predict \1", text)
    parts = []
    for part in _CODE.split(text):
        is_code = _CODE.fullmatch(part) is not None
        parts.append(part if is_code else _ARGUMENT.sub(_write_option, part))
    return "".join(parts)


#: How the advice of a run that does not fit begins if no strategy was given, and what it names.
_OF_OWN_SETTINGS = re.compile(r"with strategy=Strategy\(([^()]*)\) (?:take )?")
_MORE_RANKS = re.compile(r"(\d+) ranks \(dp=\d+\)")
_MICRO_BATCH = re.compile(r"\bmicro_batch=(\d+) \(")
#: What `perfkit predict` says of a strategy alone, and not beside ``--parallel``.
_OF_STRATEGIES_ALONE = re.compile(r"\b(zero|offload|cp|dp)=")


def say_next_steps(warning: str, batch: int | None) -> str:
    """Put the warning that a run does not fit into options that can be typed.

    Parameters
    ----------
    warning : str
        A warning of a prediction; any other is given back as it is.
    batch : int, optional
        Sequences over all ranks [-]; None for workloads without.

    Examples
    --------
    >>> say_next_steps("a rank needs 9 GB of 8 GB: does not fit; take zero=1 (frees 2 GB: fits)", 8)
    'a rank needs 9 GB of 8 GB: does not fit; take --zero 1 (frees 2 GB: fits)'
    >>> own = "with strategy=Strategy(tp=1, pp=1, dp=4, micro_batch=8) take micro_batch=1 (fits)"
    >>> say_next_steps(f"a rank needs 9 GB; {own}", 64)
    'a rank needs 9 GB; take --accumulate 16 (fits)'
    """
    if not warning.startswith("a rank needs"):
        return warning
    own = _OF_OWN_SETTINGS.search(warning)
    if own is None or batch is None:
        return say_for_commands(warning)
    settings = dict(setting.split("=") for setting in own[1].split(", "))
    replicas = int(settings.pop("dp"))
    head = warning[: own.start()]
    steps = _MORE_RANKS.sub(r"--ranks \1", warning[own.end() :])
    takes = "take " if own[0].endswith("take ") else ""

    def count_passes(micro_batch: str) -> int:
        return batch // (replicas * int(micro_batch))

    if not _OF_STRATEGIES_ALONE.search(steps):
        steps = _MICRO_BATCH.sub(lambda step: f"--accumulate {count_passes(step[1])} (", steps)
        return say_for_commands(f"{head}{takes}{steps}")
    steps = _MICRO_BATCH.sub(
        lambda step: f"{step[0]}beside --parallel: --accumulate {count_passes(step[1])}; ", steps
    )
    shown = [f"{name}={value}" for name, value in settings.items() if name not in ("tp", "pp")]
    return say_for_commands(
        f"{head}with {' '.join(shown)} in place of --parallel and --accumulate {takes}{steps}"
    )


def _write_option(argument: re.Match[str]) -> str:
    """Write an argument of Python as an option."""
    name, value = argument.groups()
    option = f"--{name.replace('_', '-')}"
    if value == "True":
        return option
    return f"{option} {value.strip(chr(39))}"


def describe_usage_error(error: click.UsageError) -> str:
    """Say in one line what is wrong with the words of a command, and where help is."""
    context = error.ctx
    if context is None:
        return error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        text = describe_unknown_words(error.option_name, context)
    elif isinstance(error, click.MissingParameter):
        text = f"required: {', '.join(_list_missing(context))}"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        text = f"argument {error.param.opts[0]}: {error.message}"
    else:
        text = error.format_message()
    return f"{text.rstrip('.')}; see {context.command_path} --help"


def describe_unknown_words(words: str, context: click.Context) -> str:
    """Name words that a command does not know, an option that is written alike, and all that there
    are."""
    names = [option.opts[0] for option in list_options(context.command)]
    text = f"unrecognized arguments: {escape(words, 200)}"
    others = _list_commands_with(words.split()[0])
    # --rank, which one command has, is more likely a slip of --ranks
    is_slip = get_close_matches(words, names, n=1, cutoff=0.85)
    if others and not is_slip:
        verb = "takes" if len(others) == 1 else "take"
        return f"{text}; {context.command_path} has no such option, which perfkit {', '.join(others)} {verb}"
    # compared without the dashes, in which all are alike
    alike = get_close_matches(words.lstrip("-"), [name.lstrip("-") for name in names], n=1)
    if alike and words.startswith("-"):
        text += f"; did you mean --{alike[0]}?"
    return f"{text}; {context.command_path} takes {', '.join(names)}"


def _list_commands_with(option: str) -> list[str]:
    """Names of the commands that have an option."""
    from perfkit.commands.group import COMMANDS, perfkit_group  # which imports this module

    names = []
    for name in COMMANDS:
        command = perfkit_group.get_command(click.Context(perfkit_group), name)
        if command is None:
            continue
        if option in [known.opts[0] for known in list_options(command)]:
            names.append(name)
    return names


def list_options(command: click.Command) -> list[click.Option]:
    """Options of a command, in the order of its help."""
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _list_missing(context: click.Context) -> list[str]:
    """Names of all parameters that a command needs and did not get.

    click reads first what was given, and stops at the first that is missing.
    """
    missing = []
    for parameter in context.command.params:
        if parameter.required and parameter.name not in context.params:
            if isinstance(parameter, click.Option):
                missing.append(parameter.opts[0])
            else:
                missing.append(parameter.human_readable_name)
    return missing
