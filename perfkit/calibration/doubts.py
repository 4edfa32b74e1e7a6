"""What a trace lacks, and where its events contradict one another: each said once, with a count."""

import re

import polars as pl

from perfkit.calibration.collectives import spell_operation
from perfkit.ground.results import Table
from perfkit.ground.units import escape, format_time
from perfkit.readers.kineto import DEVICE, MARK, TraceFile

#: Calls that start a kernel or a graph of kernels.
_LAUNCHES = r"(?i)launch\w*kernel|kernellaunch|modulelaunch|graphlaunch"
#: Operators that launch collectives.
EXCHANGES = re.compile(r"^(nccl:|record_param_comms$)")
#: How long two events may overlap that follow one another on a stream, or on the host [ns]: times
#: are rounded, and a kernel may begin while the one before it ends.
_ON_STREAM, _ON_HOST = 100_000, 10_000
#: Share of launches that may lack their kernel at the ends of a recording [-].
_CUT = 0.01


def check_device(file: TraceFile) -> None:
    """Refuse a trace that lost the work of its device.

    Parameters
    ----------
    file : TraceFile
        One rank.

    Raises
    ------
    ValueError
        If it has launches of kernels and no work of a device.
    """
    launches = count_launches(file)[0]
    if launches and not file.events["cat"].is_in(DEVICE).any():
        raise ValueError(
            f"{escape(file.source, 200)} has {count_things(launches, 'launch', 'launches')} of "
            "kernels but no kernels: the "
            "profiler lost the work of the device; record again with ProfilerActivity.CUDA, and "
            "call torch.cuda.synchronize() before the profiler stops"
        )


def count_launches(file: TraceFile) -> tuple[int, int]:
    """Launches of kernels, and those of them without a kernel [-]."""
    host = pl.col("stream") < 0
    calls = pl.col("cat").str.contains("_(runtime|driver)$")
    launches = file.events.filter(host, calls, pl.col("name").str.contains(_LAUNCHES))
    return len(launches), int((launches["index_correlation"] < 0).sum())


def count_things(count: int, name: str, several: str = "") -> str:
    """A count with its noun, such as ``1 collective`` and ``2 collectives``."""
    if count == 1:
        return f"1 {name}"
    return f"{count:,} {several or name + 's'}"


def list_doubts(file: TraceFile, work: Table) -> list[str]:
    """Name what a trace lacks, and contradictions in it.

    Parameters
    ----------
    file : TraceFile
        One rank.
    work : polars.DataFrame
        Its work, from `perfkit.calibration.activity.list_work`.

    Returns
    -------
    doubts : list of str
        One sentence for each, with the name of the file; none for a complete trace.
    """
    found = [*_find_missing(file, work), *_find_contradictions(file), *file.notes]
    return [f"{escape(file.source, 200)}: {text}" for text in found]


def _find_missing(file: TraceFile, work: Table) -> list[str]:
    """What the trace does not hold."""
    missing = []
    events = file.events
    device = events.filter(pl.col("cat").is_in(DEVICE))
    launches, lost = count_launches(file)
    unlinked = len(device.filter(pl.col("index_correlation") < 0, cat="kernel"))
    if lost > _CUT * launches and unlinked >= lost:
        missing.append(
            f"{lost} of {launches} launches have no kernel, and {unlinked} kernels no launch: their "
            "numbers (correlation) are missing, or the clocks of host and device differ"
        )
    elif lost > _CUT * launches:
        missing.append(
            f"{lost} of {launches} launches have no kernel: part of the device's work is missing"
        )
    named = [str(each["name"]) for each in file.devices if each.get("name")]
    if device.is_empty() and named:
        missing.append(
            f"no work of {escape(named[0], 60)} was recorded: all times are those of the host, "
            "where operators take as long as their launch"
        )
    if not device.is_empty():
        untold = work.filter(phase="")
        if len(untold):
            missing.append(
                f"{len(untold)} of {len(work)} kernels and copies have no phase and no module: "
                "no event of the host launched them"
            )
        unknown = _count_silent_exchanges(file, work)
        if unknown:
            missing.append(
                f"kernels of {count_things(unknown, 'collective')} are missing, which the host "
                "started: their times are unknown"
            )
        owners = device["pid"].unique().sort().to_list()
        if len(owners) > 1:
            missing.append(
                f"it holds work of {len(owners)} devices, which counts as that of one rank"
            )
    return missing


def _count_silent_exchanges(file: TraceFile, work: Table) -> int:
    """Collectives that are named on the host and have no kernel [-]."""
    parents = file.events["parent"].to_list()
    seen: set[int] = set()
    for index in work.filter(pl.col("exchange") >= 0)["exchange"].unique().to_list():
        while index >= 0 and index not in seen:
            seen.add(index)
            index = parents[index]
    silent: set[int] = set()
    candidates = file.events.filter(pl.col("cat").is_in(("cpu_op", "user_annotation")))
    for index, name in candidates.select("index", "name").iter_rows():
        if not EXCHANGES.search(name) or index in seen or parents[index] in silent:
            continue
        said = str(file.args.get(index, {}).get("Collective name", ""))
        if spell_operation(said, name) != "other":
            silent.add(index)
    return len(silent)


def _find_contradictions(file: TraceFile) -> list[str]:
    """Events whose times cannot all be true."""
    end = pl.col("ts") + pl.col("dur")
    found = []
    device = file.events.filter(pl.col("cat").is_in(DEVICE)).sort("pid", "stream", "ts")
    stream = ("pid", "stream")
    # kernels of one graph may run at once
    launch = pl.col("index_correlation")
    following = device.with_columns(
        other=pl.col("ts").shift(-1).over(stream),
        alike=(launch >= 0) & (launch == launch.shift(-1).over(stream)),
    )
    both = following.filter(end > pl.col("other") + _ON_STREAM, ~pl.col("alike"))
    if len(both):
        first = both.row(0, named=True)
        found.append(
            f"the next event of its stream starts before {escape(first['name'], 60)} ends, which "
            f"takes {format_time(1e-9 * first['dur'])}: times of {count_things(len(both), 'event')} "
            "are wrong"
        )
    marks = file.events.filter(MARK).sort("ts").with_columns(other=pl.col("ts").shift(-1))
    late = marks.filter(end > pl.col("other") + _ON_HOST)
    if len(late):
        first = late.row(0, named=True)
        found.append(
            f"the next step starts before {escape(first['name'], 60)} ends, which takes "
            f"{format_time(1e-9 * first['dur'])}: times of {count_things(len(late), 'step')} are wrong"
        )
    parents, cats = file.events["parent"].to_list(), file.events["cat"].to_list()
    names = file.events["name"].to_list()
    around = {parents[index] for index in marks["index"].to_list()}
    long = sorted(index for index in around if index >= 0 and cats[index] == "cpu_op")
    if long:
        found.append(
            f"operator {escape(names[long[0]], 60)} lasts longer than until the next step: "
            "its time is wrong, and it owns work that is not its own"
        )
    return found
