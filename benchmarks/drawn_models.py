"""Models drawn from the lists of transformers, torchvision and timm: is their training step captured,
and with the operations that it really runs, in order?

python -m benchmarks.drawn_models --seed 48 --json OUT
python -m benchmarks.drawn_models --saved reference_data/measured/drawn-models.json

A type of model and, in transformers, one of its heads are drawn; the smallest way to build it whose
step runs on the CPU is taken (`benchmarks/helpers/drawn_builders.py`). The second step is run for real
and captured, each in a process of its own. Layers that a model leaves out by a draw (LayerDrop) stay,
as two draws cannot be compared. Draws go on until so many real steps have run. Nothing was fitted.
"""

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.helpers.command import OUT, command
from benchmarks.helpers.drawn_builders import Drawn, draw
from benchmarks.helpers.drawn_runs import Run, capture_step, run_for_real
from benchmarks.helpers.tables import lay_out

#: Real steps of each package [-].
COUNTS = {"transformers": 22, "torchvision": 8, "timm": 10}
#: Longest time that a process is waited for [s]; its processor time has a limit of its own.
_LONGEST = 1800
#: Modules that all processes share.
_SHARED = (
    "torchvision",
    "timm",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "perfkit.recording.steps",
    "perfkit.prediction.predictor",
    "benchmarks.helpers.drawn_runs",
)
#: Bars: least share captured of the steps that run, and of those that have the same operations in order.
CAPTURED, EQUAL = 0.90, 0.85


@dataclass(frozen=True)
class Judged:
    """A drawn model, judged.

    Parameters
    ----------
    package, name, head : str
        The model.
    real : str
        Why its step does not run here; empty if it does.
    captured : str
        Why it is not captured; empty if it is.
    difference : str
        The first difference of the operations; empty if there is none.
    operations : int
        Operations of the real step [-].
    flops, memory : float
        Captured over real, of the operations that have a formula, and of the most bytes alive [-].
    seconds : float
        Processor time of the capture [s].
    """

    package: str
    name: str
    head: str
    real: str = ""
    captured: str = ""
    difference: str = ""
    operations: int = 0
    flops: float | None = None
    memory: float | None = None
    seconds: float = 0.0


def _send(pipe: Any, work: Callable[..., Run], arguments: Sequence[Any]) -> None:
    """Do the work of a process."""
    try:
        pipe.send(work(*arguments))
    except BaseException as error:
        pipe.send(Run(error=f"{type(error).__name__}: {error}"))


def _do(context: Any, work: Callable[..., Run], *arguments: Any) -> Run:
    """Do some work in a process of its own."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        run: Run = ours.recv() if ours.poll(_LONGEST) else Run(error=f"more than {_LONGEST} s")
    except EOFError:
        process.join()
        run = Run(error=f"the process ended with {process.exitcode}: more than its limits")
    process.kill()
    process.join()
    return run


def compare(captured: Sequence[str], real: Sequence[str]) -> str:
    """In what two lists of operations differ.

    Parameters
    ----------
    captured, real : sequence of str
        Names of operations in order.

    Returns
    -------
    difference : str
        Empty if there is none; else the first place, and how many operations are too few or too many.

    Examples
    --------
    >>> compare(["mm", "relu"], ["mm", "relu"])
    ''
    >>> compare(["mm", "relu"], ["mm", "clone", "relu"])
    'operation 1 of 3: relu in place of clone; lacks 1 clone'
    """
    if list(captured) == list(real):
        return ""
    place = 0
    while place < min(len(captured), len(real)) and captured[place] == real[place]:
        place += 1
    ours = captured[place] if place < len(captured) else "the end"
    theirs = real[place] if place < len(real) else "the end"
    text = f"operation {place} of {len(real)}: {ours} in place of {theirs}"
    for word, counts in (
        ("lacks", Counter(real) - Counter(captured)),
        ("adds", Counter(captured) - Counter(real)),
    ):
        if counts:
            listed = [f"{count} {name}" for name, count in counts.most_common(4)]
            text += f"; {word} {', '.join(listed)}"
    return text


def judge(context: Any, drawn: Drawn) -> Judged:
    """Run and capture a drawn model."""
    row = (drawn.package, drawn.name, drawn.head.removesuffix("_MAPPING_NAMES"))
    real = _do(context, run_for_real, drawn)
    if real.attempt is None:
        return Judged(*row, real=real.error[:200])
    operations = len(real.operations)
    captured = _do(context, capture_step, drawn, real.attempt)
    if captured.error:
        return Judged(*row, captured=captured.error[:400], operations=operations)
    flops = None
    if real.flops:
        flops = sum((captured.flops or {}).values()) / sum(real.flops.values())
    return Judged(
        *row,
        difference=compare(captured.operations, real.operations),
        operations=operations,
        flops=flops,
        memory=captured.memory / real.memory,
        seconds=captured.seconds,
    )


def judge_package(context: Any, package: str, seed: int, count: int, workers: int) -> list[Judged]:
    """Judge models of a package in the order of a seed until so many real steps have run."""
    rows = list[Judged]()
    models = draw(seed, package)
    with ThreadPoolExecutor(workers) as pool:
        while True:
            missing = count - sum(not row.real for row in rows)
            if missing <= 0:
                return rows
            for row in pool.map(lambda model: judge(context, model), islice(models, missing)):
                rows.append(row)
                print(row, flush=True)


def _print_tables(rows: Sequence[Judged]) -> None:
    """Print all models whose step runs, and the shares."""
    running = [row for row in rows if not row.real]
    columns = {
        "package": "{package}",
        "model": "{name}",
        "operations": "{operations}",
        "in order": "{order}",
        "FLOP / real": "{flops:.3f}",
        "memory / real": "{memory:.3f}",
        "CPU time [s]": "{seconds:.1f}",
    }
    shown = []
    for row in running:
        order = "yes"
        if row.captured:
            order = "not captured"
        elif row.difference:
            order = "no"
        name = row.name
        if row.head:
            name += ", " + row.head.removeprefix("MODEL_FOR_").replace("_", " ").lower()
        shown.append({**asdict(row), "order": order, "name": name})
    print(lay_out(shown, columns, numbers=True))
    print()
    shares = []
    for package in [*COUNTS, "all"]:
        own = [row for row in running if package in ("all", row.package)]
        drawn = [row for row in rows if package in ("all", row.package)]
        captured = [row for row in own if not row.captured]
        equal = [row for row in captured if not row.difference]
        shares.append(
            {
                "package": package,
                "drawn": len(drawn),
                "run": len(own),
                "captured": len(captured),
                "equal": len(equal),
            }
        )
    columns = {
        "package": "{package}",
        "drawn": "{drawn}",
        "real step runs": "{run}",
        "captured": "{captured}",
        "equal in order": "{equal}",
    }
    print(lay_out(shares, columns, numbers=True))
    total = shares[-1]
    print()
    for word, number, bar in (
        ("captured", total["captured"], CAPTURED),
        ("equal in order", total["equal"], EQUAL),
    ):
        share = int(str(number)) / len(running)
        print(f"{word} {share:.0%} (bar {bar:.0%}): {'met' if share >= bar else 'NOT met'}")
    for row in running:
        if row.captured or row.difference:
            print(f"{row.name}: {row.captured or row.difference}")


@command(
    {
        "--seed": {"type": int, "default": 1, "help": "seed of the draw"},
        "--workers": {"type": int, "default": 2, "help": "models at once"},
        "--saved": {"type": Path, "metavar": "FILE", "help": "print what was seen before"},
        **OUT,
    }
)
def main(options: Any) -> int:
    """Judge the captures of drawn models."""
    if options.saved is not None:
        answers = json.loads(options.saved.read_text())
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_SHARED))
        answers = {"seed": options.seed, "rows": []}
        for package, count in COUNTS.items():
            rows = judge_package(context, package, options.seed, count, options.workers)
            answers["rows"] += [asdict(row) for row in rows]
    if options.json is not None:
        options.json.write_text(json.dumps(answers, indent=1) + "\n")
    _print_tables([Judged(**row) for row in answers["rows"]])
    print(f"seed {answers['seed']}")
    return 0
