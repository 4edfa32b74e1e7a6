"""What signatures of causes share: the curve of a run, and how evidence is written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perfkit.diagnosis.nccl_variables import Effect, find_variables
from perfkit.diagnosis.records import Case, Evidence, Range, Word
from perfkit.ground.units import format_bytes, format_time
from perfkit.readers.log_facts import LogFacts, Setting

#: Operations whose bus bandwidth is what a node sends to the others, where rings join the nodes.
_ALONG_RINGS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send_recv"}
#: Sizes that bandwidth decides.
LARGE_SIZES = frozenset((Range.MIDDLE, Range.BANDWIDTH))
#: Repeats of a size, and runs of a kind, that differ by more than this are not alike [-]: pairs of nodes
#: with a bad one among them give 49 instead of 88 GB/s (NVIDIA/nccl-tests#106).
UNLIKE_RUNS = 1.3


class Stated(Protocol):
    """Anything that a line of a log says."""

    @property
    def line(self) -> int:
        """Number of the line, from 1 [-]."""
        ...


@dataclass(frozen=True)
class Plateau:
    """The largest size of a run.

    Parameters
    ----------
    nbytes : int
        Its size [B].
    busbw, algbw : float
        Its bus and algorithm bandwidth [B/s].
    line : int
        Its line in the log [-].
    """

    nbytes: int
    busbw: float
    algbw: float
    line: int


@dataclass(frozen=True)
class WireRate:
    """What a node sends to the others at the largest size, one way.

    Parameters
    ----------
    low, high : float
        Least and most, by what the algorithm may be [B/s].
    """

    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether all algorithms send as much. Rings send 2 (n - 1) / n times what trees send on two nodes:
        1 for two ranks, 1.33 or more for others."""
        return self.high <= 1.05 * self.low


def take_facts(case: Case) -> LogFacts:
    """Take what the log says besides its table.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    facts : LogFacts
        The facts; empty ones where the log says nothing.
    """
    if case.facts is None:
        return LogFacts(case.file, 1, 1)
    return case.facts


def is_between_nodes(case: Case) -> bool:
    """Say whether a run is of several nodes.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    is_between_nodes : bool
        Whether it is; not where the log does not say.
    """
    return case.nodes is not None and case.nodes > 1


def is_on_one_node(case: Case) -> bool:
    """Say whether a run is of one node.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    is_on_one_node : bool
        Whether it is; not where the log does not say.
    """
    return case.nodes == 1


def find_plateau(case: Case) -> Plateau | None:
    """Find the largest size of a run, if it is large enough to show the bandwidth.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    plateau : Plateau or None
        Its figures; None where the run has no verdict on bandwidth.
    """
    if case.find(Range.BANDWIDTH) is None:
        return None
    curve = case.curve
    if not len(curve.nbytes):
        return None
    return Plateau(
        int(curve.nbytes[-1]),
        float(curve.busbw[-1]),
        float(curve.algbw[-1]),
        int(curve.lines[-1]),
    )


def is_slow(case: Case, *ranges: Range) -> bool:
    """Say whether any of some ranges of sizes is slow.

    Parameters
    ----------
    case : Case
        The run.
    *ranges : Range
        Which ranges; all where none is given.

    Returns
    -------
    is_slow : bool
        Whether one of them is.
    """
    asked = set(ranges or Range)
    return any(verdict.word is Word.SLOW and verdict.sizes in asked for verdict in case.verdicts)


def is_too_good(case: Case) -> bool:
    """Say whether any range of sizes is too good.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    is_too_good : bool
        Whether one is.
    """
    return any(verdict.word is Word.TOO_GOOD for verdict in case.verdicts)


def find_wire_rate(case: Case, plateau: Plateau) -> WireRate | None:
    """Find what a node sends to the others at the largest size.

    Where rings join the nodes, each of them sends what the bus bandwidth says: an all_reduce of S bytes
    over n ranks passes 2 (n - 1) / n S bytes over each link of a ring, whatever the number of rings. A
    tree on two nodes sends S bytes, as the algorithm bandwidth says. In an all_to_all each rank sends
    1/n of its bytes to each rank of another node.

    Parameters
    ----------
    case : Case
        The run.
    plateau : Plateau
        Its largest size.

    Returns
    -------
    rate : WireRate or None
        Least and most [B/s]; None for runs on one node, and for other operations.
    """
    if case.nodes is None or case.nodes < 2:
        return None
    if case.operation == "all_to_all":
        local = case.ranks // case.nodes
        sent = plateau.algbw * local * (case.ranks - local) / case.ranks
        return WireRate(sent, sent)
    if case.operation not in _ALONG_RINGS:
        return None
    if case.operation == "all_reduce" and case.nodes == 2 and case.expectation.algorithm != "ring":
        return WireRate(plateau.algbw, plateau.busbw)
    return WireRate(plateau.busbw, plateau.busbw)


# -- evidence in words
# --------------------------------------------------------------------------------------------------


def write_rate(rate: float) -> str:
    """Write a rate as nccl-tests prints it.

    Parameters
    ----------
    rate : float
        Rate [B/s].

    Returns
    -------
    text : str
        In GB/s, with two digits or more.

    Examples
    --------
    >>> write_rate(5.53e9), write_rate(167.2e9), write_rate(0.42e9)
    ('5.5 GB/s', '167 GB/s', '0.42 GB/s')
    """
    value = rate / 1e9
    if value >= 20:
        return f"{value:.0f} GB/s"
    if value >= 1:
        return f"{value:.1f} GB/s"
    return f"{value:.2g} GB/s"


def write_line_rate(rate: float) -> str:
    """Write the rate of a network card as it is sold.

    Parameters
    ----------
    rate : float
        Rate [B/s].

    Returns
    -------
    text : str
        In Gb/s.

    Examples
    --------
    >>> write_line_rate(2.5e10)
    '200 Gb/s'
    """
    return f"{8e-9 * rate:.3g} Gb/s"


def write_size(nbytes: float) -> str:
    """Write a size as people name those of nccl-tests.

    Parameters
    ----------
    nbytes : float
        Size [B].

    Returns
    -------
    text : str
        In powers of 1,024, where these give a whole number; else in powers of 1,000.

    Examples
    --------
    >>> write_size(8), write_size(2**27), write_size(2**33), write_size(3_300_068)
    ('8 B', '128 MiB', '8 GiB', '3.3 MB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power and nbytes % 2**power == 0:
            return f"{int(nbytes) // 2**power} {unit}"
    return format_bytes(nbytes)


def quote(case: Case, statement: Stated, text: str) -> Evidence:
    """Evidence from a line of the log.

    Parameters
    ----------
    case : Case
        The run.
    statement : Stated
        What the line says.
    text : str
        The same in words.

    Returns
    -------
    evidence : Evidence
        The words, with the line.
    """
    return Evidence(text, case.file, statement.line)


def describe_plateau(case: Case, plateau: Plateau) -> Evidence:
    """Evidence from the largest size: what was measured and expected.

    Parameters
    ----------
    case : Case
        The run.
    plateau : Plateau
        Its largest size.

    Returns
    -------
    evidence : Evidence
        The figures, with the line of the table.
    """
    text = f"{write_rate(plateau.busbw)} at {write_size(plateau.nbytes)}"
    expected = case.expectation.busbw
    if expected is not None and expected > 0:
        share = plateau.busbw / expected
        digits = 0 if share >= 0.1 else 1
        text += f", {share:.{digits}%} of the {write_rate(expected)} expected"
    return Evidence(text, case.file, plateau.line)


def describe_largest(case: Case) -> list[Evidence]:
    """Evidence from the largest size, where it shows the bandwidth.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    evidence : list of Evidence
        What `describe_plateau` says; none where the run has no verdict on bandwidth.
    """
    plateau = find_plateau(case)
    if plateau is None:
        return []
    return [describe_plateau(case, plateau)]


def describe_startup(case: Case) -> Evidence | None:
    """Evidence from the smallest messages: what was measured and expected.

    Parameters
    ----------
    case : Case
        The run.

    Returns
    -------
    evidence : Evidence or None
        The figures; None where these sizes have no verdict or are not slow.
    """
    verdict = case.find(Range.LATENCY)
    if verdict is None or verdict.word is not Word.SLOW:
        return None
    text = f"{format_time(verdict.seconds)} at {write_size(verdict.nbytes)}"
    if verdict.expected_s is not None:
        text += f", where {format_time(verdict.expected_s)} are expected"
    curve = case.curve
    line = curve.lines[curve.nbytes == verdict.nbytes]
    return Evidence(text, case.file, int(line[0]) if len(line) else None)


def join_names(names: Iterable[str], most: int = 8) -> str:
    """Names in a sentence, the first ones where they are many.

    Parameters
    ----------
    names : iterable of str
        The names.
    most : int, optional
        How many are written [-].

    Returns
    -------
    text : str
        The names, with how many others there are.

    Examples
    --------
    >>> join_names(["mlx5_0", "mlx5_1", "mlx5_2"], most=2)
    'mlx5_0, mlx5_1 and 1 more'
    """
    listed = list(names)
    text = ", ".join(listed[:most])
    if len(listed) > most:
        text += f" and {len(listed) - most} more"
    return text


# -- settings
# --------------------------------------------------------------------------------------------------


def list_settings(case: Case, *effects: Effect) -> list[Setting]:
    """List settings of a user that have one of some effects.

    Parameters
    ----------
    case : Case
        The run.
    *effects : Effect
        Which ones.

    Returns
    -------
    settings : list of Setting
        In the order of the log; those of plugins are left out.
    """
    settings: dict[str, Setting] = {}
    for setting in take_facts(case).settings:
        variables = find_variables(setting.name, setting.value)
        is_asked = any(variable.effect in effects for variable in variables)
        if is_asked and setting.source != "plugin":
            # a command and NCCL itself may both name it
            settings.setdefault(f"{setting.name}={setting.value}", setting)
    return list(settings.values())


def quote_settings(case: Case, settings: Sequence[Setting]) -> list[Evidence]:
    """Evidence from settings, with what each does.

    Parameters
    ----------
    case : Case
        The run.
    settings : sequence of Setting
        The settings.

    Returns
    -------
    evidence : list of Evidence
        One for each.
    """
    evidence = []
    for setting in settings:
        text = f"{setting.name}={setting.value}"
        meanings = [found.meaning for found in find_variables(setting.name, setting.value)]
        if meanings:
            text += f": {meanings[0]}"
        evidence.append(quote(case, setting, text))
    return evidence


def name_settings(settings: Sequence[Setting]) -> str:
    """Settings in a sentence, with their values.

    Parameters
    ----------
    settings : sequence of Setting
        The settings.

    Returns
    -------
    text : str
        As ``NCCL_ALGO=Ring, NCCL_PROTO=LL``.
    """
    return join_names(f"{setting.name}={setting.value}" for setting in settings)


def advise_unset(settings: Sequence[Setting]) -> str:
    """Advice to unset some variables, each of them once.

    Parameters
    ----------
    settings : sequence of Setting
        The settings.

    Returns
    -------
    advice : str
        As ``unset NCCL_ALGO, NCCL_PROTO``.
    """
    return f"unset {join_names(dict.fromkeys(setting.name for setting in settings))}"
