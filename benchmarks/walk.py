"""Functions and files of perfkit that one prediction runs: whatever was asked before, they are the
same.

    python -m benchmarks.walk [--list NAME]

Other batches of the same model are predicted a hundred times, all of them bound by the host and far
from filling the memory, as other limits have words of their own. Printed are the functions of the first,
the second and the hundredth prediction, those that not all of the later ones run, and the processor
time of a new batch. Lambdas, comprehensions and the bodies of classes do not count.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import perfkit
from benchmarks.helpers.command import command
from perfkit.ground.units import check_choice
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.transformer import Transformer

#: A file below `perfkit`, and the name of a function in it.
Function: TypeAlias = tuple[str, str]
_PREDICTIONS = 100
_PACKAGE = str(Path(perfkit.__file__).parent) + os.sep


def _make_bert(number: int) -> Transformer:
    return Transformer.bert("bert-large", batch=8 * (16 + number), sequence=16, dtype="bf16")


def _make_unlike_tables(number: int) -> DLRM:
    return DLRM("dlrm-mlperf", batch=64 * (16 + number))


#: By name: the workload of a number, and its ranks.
CASES: Mapping[str, tuple[Callable[[int], Any], int]] = {
    "bert-1": (_make_bert, 1),
    "bert-8": (_make_bert, 8),
    "dlrm-1": (_make_unlike_tables, 1),
    "dlrm-8": (_make_unlike_tables, 8),
}


def find_functions(run: Callable[[], Any]) -> set[Function]:
    """Functions of perfkit that a call runs."""
    functions = set[Function]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE) and code.co_name[0] != "<":
            functions.add((code.co_filename.removeprefix(_PACKAGE), code.co_qualname))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return functions


def walk(name: str, predictions: int = _PREDICTIONS) -> list[set[Function]]:
    """Functions of each of several predictions of other batches."""
    make, ranks = CASES[name]
    platform = load_platform("h100-sxm-8")
    found = []
    with keep_quiet():
        for number in range(predictions):
            workload = make(number)
            found.append(find_functions(lambda work=workload: predict(work, platform, ranks=ranks)))  # type: ignore[misc]
    return found


def time_new_batches(name: str) -> float:
    """Processor time of a prediction of a new batch, the median of 20 [s]."""
    make, ranks = CASES[name]
    platform = load_platform("h100-sxm-8")
    times = []
    with keep_quiet():
        for number in range(20):
            workload = make(_PREDICTIONS + number)
            start = time.process_time()
            predict(workload, platform, ranks=ranks)
            times.append(time.process_time() - start)
    return statistics.median(times)


@command(
    {"--list": {"metavar": "NAME", "help": "list the functions of bert-1, bert-8, dlrm-1, dlrm-8"}}
)
def main(given: Any) -> None:
    """Functions and files that one prediction runs."""
    if given.list:
        functions = walk(check_choice("list", given.list, CASES))[-1]
        print(*(f"{file}: {function}" for file, function in sorted(functions)), sep="\n")
        return
    print("            first  second  hundredth  files  not in all later ones  new batch")
    for name in CASES:
        found = walk(name)
        later = found[1:]
        differing = set[Function]().union(*later) - later[0].intersection(*later[1:])
        counts = [len(found[number]) for number in (0, 1, -1)]
        files = len({file for file, _ in found[-1]})
        milliseconds = 1e3 * time_new_batches(name)
        print(
            f"{name:<10}{counts[0]:>7}{counts[1]:>8}{counts[2]:>11}{files:>7}"
            f"{len(differing):>23}{milliseconds:>8.1f} ms"
        )
        for file, function in sorted(differing):
            print(f"    {file}: {function}")
