"""`diagnose`: a verdict on logs of nccl-tests."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from perfkit.diagnosis.candidates import explain_unknown
from perfkit.diagnosis.causes import find_causes, settle
from perfkit.diagnosis.findings import Finding
from perfkit.diagnosis.models import Model
from perfkit.diagnosis.networks import read_adapters
from perfkit.diagnosis.records import Adapters
from perfkit.diagnosis.result import Diagnosis
from perfkit.diagnosis.systems import System, describe_system, find_system
from perfkit.diagnosis.verdicts import find_too_slow, judge_run
from perfkit.ground.files import check_paths
from perfkit.ground.units import check_type, show
from perfkit.platform.datasheets import note_large_node
from perfkit.platform.gallery import Named, load_platform
from perfkit.readers.log_facts import LogFacts
from perfkit.readers.log_text import read_text
from perfkit.readers.nccl import LogWarning, NcclLogs, read_logs
from perfkit.readers.training_lines import find_step_lines

#: A diagnosis that ends sooner shows no line [s].
_DELAY = 1.0
#: Most logs without a table that are looked at for steps of a training run [-].
_MOST_TRIED = 8


def diagnose(
    logs: str | Path | Sequence[str | Path],
    platform: Named | None = None,
    *,
    partial: bool = False,
    progress: bool | Callable[[float], None] = True,
) -> Diagnosis:
    """Say whether the bandwidth in logs of nccl-tests is normal, and if not, why.

    Parameters
    ----------
    logs : str, Path or sequence of them
        A log of nccl-tests or rccl-tests, several, or a folder. With NCCL_DEBUG=INFO it says more.
    platform : Platform, str or Path, optional
        The system, where the log does not name its devices or its network, or to compare with a system of
        your own.
    partial : bool, optional
        Whether to keep, with a warning, the rows before a line that cannot be read.
    progress : bool or callable, optional
        Whether to show a line where the error stream is a terminal and the work takes long, or a function
        of the share of the runs that are done [-].

    Returns
    -------
    diagnosis : Diagnosis
        Its text leads with the answer; ``ok`` is True, False, or None where there is not enough to say.

    Raises
    ------
    ValueError
        For files that are no logs, see `perfkit.readers.nccl.read_nccl_tests`, and for an unknown
        platform.

    Notes
    -----
    Devices, ranks and nodes of the log, the adapters that NCCL lists and the algorithms that were asked for
    say which system it is. Expected times are those of the gallery and of datasheets; a run is slow if 1 of
    130 healthy ones takes as long, too good if it is faster than its links. Where a log does not say how
    its nodes are joined, all published networks of such nodes are compared (docs/formulas.md, table 12.2).

    Examples
    --------
    >>> import tempfile
    >>> row = "8589934592 2147483648 float sum -1 63500 135.27 236.73 0 63490 135.29 236.77 0"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = Path(folder) / "run.log"
    ...     _ = log.write_text(row)
    ...     print(diagnose(log, "a100-sxm-8").headline())
    as expected: all_reduce 237 GB/s at 8 GiB
    """
    check_type("partial", partial, bool)
    given = None if platform is None else Model(load_platform(platform))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LogWarning)
        read = _read(logs, partial=partial)
    texts = []
    for warning in caught:
        if issubclass(warning.category, LogWarning):
            texts.append(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    findings = []
    runs = _list_runs(read)
    too_slow = _find_too_slow(read, runs, given)
    with _follow(progress) as report:
        for number, (facts, rows) in enumerate(runs):
            system = _find_system(read, facts, rows)
            exceeded = too_slow.get(_identify(system), frozenset())
            findings.append(_judge(read, facts, rows, system, given, exceeded))
            report((number + 1) / len(runs))
    if given is not None:
        network = given.platform.network
        texts += note_large_node(given.platform.device, network.ranks_per_node, network.ranks)
    return Diagnosis(tuple(findings), tuple(dict.fromkeys(texts)))


def _read(logs: str | Path | Sequence[str | Path], *, partial: bool) -> NcclLogs:
    """Read logs; of one that a training run printed say so."""
    try:
        return read_logs(logs, partial=partial)
    except ValueError as error:
        name = _find_training_log(logs)
        if name is None:
            raise
        advice = f"{show(name, 200)} is the log of a training run, which pk.read_training_log reads"
        raise ValueError(f"{error}; {advice}") from error


def _find_training_log(logs: str | Path | Sequence[str | Path]) -> str | None:
    """The first log that holds steps of a training run; None where none does."""
    paths = check_paths("source", logs)
    if paths[0].is_dir():
        paths = sorted(paths[0].glob("*.log"))
    for path in paths[:_MOST_TRIED]:
        try:
            text = read_text(path, "name a log")
        except ValueError:
            continue
        if find_step_lines(text, lambda _: None) is not None:
            return path.name
    return None


def _list_runs(read: NcclLogs) -> list[tuple[LogFacts, pl.DataFrame]]:
    """Runs with their rows that took time, in the order of the logs."""
    by_file = read.rows.partition_by("file", as_dict=True, maintain_order=True)
    runs = []
    for facts in read.facts:
        rows = by_file.get((facts.file,))
        if rows is None:
            continue
        rows = rows.filter(
            pl.col("line").is_between(facts.first_line, facts.last_line)
            & (pl.col("nbytes") > 0)
            & (pl.col("seconds") > 0)
        )
        # other benchmarks than nccl-tests have facts for the whole file
        for run in rows.partition_by("operation", "ranks", "nodes", maintain_order=True):
            runs.append((facts, run))
    if not runs:
        raise ValueError("no row of the logs has bytes and a time; name other logs")
    return runs


@dataclass(frozen=True)
class _Identity:
    """What runs have in common that are of one system: a log, or hosts of the same names."""

    device: str | None
    nodes: int | None
    local: int | None
    where: frozenset[str]
    adapters: Adapters | None


def _identify(system: System) -> _Identity:
    """The system that a run shares with others."""
    where = frozenset[str]()
    if system.facts is not None:
        where = frozenset(system.facts.hosts) or frozenset((system.facts.file,))
    return _Identity(system.device, system.nodes, system.local, where, read_adapters(system))


def _find_too_slow(
    read: NcclLogs, runs: Sequence[tuple[LogFacts, pl.DataFrame]], given: Model | None
) -> dict[_Identity, frozenset[str]]:
    """Networks that any run of a system exceeds, so that none of its runs has gone over them."""
    exceeded: dict[_Identity, frozenset[str]] = {}
    for facts, rows in runs:
        system = _find_system(read, facts, rows)
        if system.nodes == 1 or read.programs[facts.file].unlike is not None:
            continue
        key = _identify(system)
        exceeded[key] = exceeded.get(key, frozenset()) | find_too_slow(rows, system, given)
    return exceeded


def _judge(
    read: NcclLogs,
    facts: LogFacts,
    rows: pl.DataFrame,
    system: System,
    given: Model | None,
    too_slow: frozenset[str],
) -> Finding:
    """Judge one run."""
    unlike = read.programs[facts.file].unlike
    if unlike is not None:  # nothing is expected of it
        case = judge_run(facts.file, rows, find_system([], system.ranks, system.nodes, None, facts))
        return Finding(case, find_causes(case), describe_system(system), unlike)
    case = settle(judge_run(facts.file, rows, system, given, too_slow))
    reason = ""
    if case.expectation.system is None:
        reason = explain_unknown(system, case.operation, given)
    elif case.expectation.notes:
        reason = case.expectation.notes[0]
    causes = find_causes(case) if system.ranks > 1 else ()
    return Finding(case, causes, describe_system(system), reason)


def _find_system(read: NcclLogs, facts: LogFacts, rows: pl.DataFrame) -> System:
    """The system of a run."""
    ranks = int(rows["ranks"][0])
    nodes = rows["nodes"][0]
    devices = [place.name for place in facts.places if place.name]
    if not devices:
        devices = list(read.devices.get(facts.file, ()))
    local = None
    if nodes is not None and ranks % nodes == 0 and facts.file not in read.unequal:
        local = ranks // nodes
    return find_system(devices, ranks, nodes, local, facts)


@contextmanager
def _follow(progress: bool | Callable[[float], None]) -> Iterator[Callable[[float], None]]:
    """Show a line while runs are judged, or call a function."""
    check_type("progress", progress, bool | Callable)
    if not isinstance(progress, bool):
        yield progress
        return
    from tqdm import tqdm

    # None is tqdm's word for: where nobody looks, show nothing
    disable = None if progress else True
    with tqdm(total=1.0, delay=_DELAY, disable=disable, desc="diagnose", leave=False) as line:

        def show_share(done: float) -> None:
            line.update(done - line.n)

        yield show_share
