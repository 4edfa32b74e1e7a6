"""Lines of the communication benchmark of PARAM (`comms.py` of facebookresearch/param).

Source of what is printed: facebookresearch/param, train/comms/pt/comms.py and
et_replay/comm/backend/pytorch_dist_backend.py (MIT), whose `get_mem_size` counts the output of all
operations but reduce_scatter: the size is that of nccl-tests. The time is the median over ranks.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from perfkit.ground.number_formats import spell_dtype
from perfkit.readers.collective_rows import (
    NAME_RANKS,
    NO_LAUNCH,
    CollectiveRow,
    Launch,
    Measurements,
    MisfitError,
    PrintedRates,
    check_ranks,
    find_ranks,
    number_lines,
    read_launch,
    read_seconds,
    read_size,
    spell_operation,
    spell_redop,
)

#: A result, or the head of a table of them.
HEAD = re.compile(r"COMMS-RES(?:-\w+|\s+(?:total-)?size \(B\))")
_TABLE = re.compile(r"COMMS-RES(?P<quant>-QUANT)?\s+(?:total-)?size \(B\)\s+(?P<rest>.*)")
_RESULT = re.compile(
    r"COMMS-RES-(?!QUANT)(?P<name>[a-z_]{2,40})-(?P<dtype>[a-z]{1,20}\d*)(?P<tag>\S*)\s+(?P<rest>.*)"
)
_QUANTIZED = re.compile(r"COMMS-RES-QUANT-")
_FIGURES = re.compile(r"(\d{1,18})\s+\d{1,18}((?:\s+\d{1,15}\.\d+){7})(?:\s+\d[\d.]*){0,8}\s*$")
_BACKEND = re.compile(r"\bbackend: (\w{1,20}) nw-stack")
_WORLD = re.compile(r"'world_size': '?(\d{1,6})")
_LOCAL = re.compile(r"'local_size': '?(\d{1,6})")


class _Printed(NamedTuple):
    """A printed result, before its ranks are known."""

    line: int
    text: str
    launch: Launch  # what stands above it
    operation: str
    dtype: str
    nbytes: int  # [B]
    seconds: float  # [s]
    rates: PrintedRates


def read_param(text: str, file: str) -> Measurements:
    """Read results of the communication benchmark of PARAM.

    Parameters
    ----------
    text : str
        What it printed.
    file : str
        Name of the log, for messages.

    Returns
    -------
    found : Measurements
        Its rows, and the first line that does not fit. Results with quantization, of pairs of
        operations and between two ranks are left out.
    """
    found = Measurements()
    launch = NO_LAUNCH
    printed: list[_Printed] = []
    left_out = 0
    has_pairs = False
    try:
        for line, content in number_lines(text):
            launch = _read_world(content) or read_launch(content) or launch
            backend = _BACKEND.search(content)
            if backend is not None and backend[1] != "nccl":
                found.unlike = f"its operations are those of {backend[1]}, not of NCCL"
            table = _TABLE.search(content)
            if table is not None:
                has_pairs = "Pair" in table["rest"]
                continue
            result = _RESULT.search(content)
            if _QUANTIZED.search(content) or (result is not None and has_pairs):
                left_out += 1
            elif result is not None:
                operation = spell_operation(result["name"])
                if operation is None:
                    left_out += 1
                    continue
                printed.append(_read_result(line, content, launch, operation, result))
    except MisfitError as error:
        found.misfit = error
    if left_out:
        found.notes.append(
            f"{left_out} results are not read: quantized ones, pairs, and operations that perfkit "
            "does not know"
        )
    _add_rows(found, printed)
    return found


def _read_world(text: str) -> Launch | None:
    """Ranks and nodes of the line of the environment; None for any other line."""
    world = _WORLD.search(text)
    if world is None:
        return None
    ranks = int(world[1])
    local = _LOCAL.search(text)
    per_node = int(local[1]) if local else 0
    nodes = ranks // per_node if per_node and ranks % per_node == 0 else None
    return Launch(ranks, nodes) if ranks > 1 else None


def _read_result(
    line: int, text: str, launch: Launch, operation: str, result: re.Match[str]
) -> _Printed:
    """One printed result."""
    figures = _FIGURES.match(result["rest"])
    if figures is None:
        raise MisfitError(line, text, "the row is not complete")
    times_and_rates = [float(figure) for figure in figures[2].split()]
    p50 = times_and_rates[0]
    algbw, busbw = times_and_rates[-2:]
    return _Printed(
        line,
        text,
        launch,
        operation,
        spell_dtype(result["dtype"]),
        read_size(line, text, figures[1]),
        read_seconds(line, text, p50, 1e-6),
        PrintedRates(algbw, busbw, 0.000501),
    )


def _find_ranks(launch: Launch, results: Sequence[_Printed]) -> int | None:
    """Ranks of the results of one run, from its environment or from their figures [-]."""
    if launch.ranks is not None:
        return launch.ranks
    by_operation: dict[str, list[PrintedRates]] = {}
    for result in results:
        by_operation.setdefault(result.operation, []).append(result.rates)
    for operation, rates in by_operation.items():
        ranks = find_ranks(operation, rates)
        if ranks is not None:
            return ranks
    return None


def _add_rows(found: Measurements, printed: Sequence[_Printed]) -> None:
    """Add results with the ranks of their runs."""
    by_launch: dict[Launch, list[_Printed]] = {}
    for result in printed:
        by_launch.setdefault(result.launch, []).append(result)
    ranks_of_run = {launch: _find_ranks(launch, run) for launch, run in by_launch.items()}
    for result in printed:
        ranks = ranks_of_run[result.launch]
        if ranks is None:
            found.misfit = MisfitError(result.line, result.text, NAME_RANKS)
            return
        try:
            checked = check_ranks(result.line, result.text, ranks)
        except MisfitError as error:
            found.misfit = error
            return
        found.rows.append(
            CollectiveRow(
                result.line,
                result.operation,
                checked,
                result.launch.find_nodes(ranks),
                result.dtype,
                spell_redop(result.operation),
                result.nbytes,
                result.seconds,
            )
        )
