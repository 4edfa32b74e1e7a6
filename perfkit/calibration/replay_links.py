"""From a trace to a run that can be replayed: which steps, and what waits for what in them.

`record_run` is the table of contents. What a trace says for certain is the order of the host, of
each stream and of each collective, and which call launched which kernel. That a stream or a host
waited for something is found from its time: it began when that ended, and not before.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from perfkit.calibration.activity import BLOCKING
from perfkit.calibration.replay_run import Item, Link, Run
from perfkit.ground.results import Table
from perfkit.readers.kineto import MARK, TraceFile

_S = 1e-9
#: Two times of one device, or of it and its host, are equal within this [s]: a choice, about what a
#: kernel needs to begin after another one.
_EQUAL = 2e-6
#: From the end of what a stream waited for to the begin of its next work, and from the end of work
#: to the return of a call that waited for it, at most [s]: a choice.
_LATEST = 20e-6
#: A launch is with its device after this time at most [s]: a choice.
_LONGEST_LATENCY = 12e-6
#: Gaps on a stream up to this are of the device alone [s]: a choice.
_LARGEST_GAP = 5e-6
#: Launches of CUDA wait once about a thousand are outstanding: with fewer than half of these, a call
#: does not wait for room [-], a choice.
_QUEUE = 500
#: A launch that waits for room takes longer than this multiple of the median launch, and this time
#: at least [-, s]: choices.
_LONG, _LEAST_LONG = 10.0, 50e-6
#: About so many items has a run at most [-]: a choice, for the time of replays. More steps than fit
#: are left out, but for two; `count_left_out` says how many.
MOST_ITEMS = 20_000


class Recorded(NamedTuple):
    """What a trace holds of all its ranks.

    Parameters
    ----------
    files : sequence of TraceFile
        One per rank.
    works : sequence of polars.DataFrame
        Work of each rank, of `perfkit.calibration.activity.list_work`.
    steps, collectives : polars.DataFrame
        Of all ranks, as `Trace.steps` and `Trace.collectives` list them.
    time : float
        Of an iteration [s].
    has_device : bool
        Whether there is work of a device.
    """

    files: Sequence[TraceFile]
    works: Sequence[Table]
    steps: Table
    collectives: Table
    time: float
    has_device: bool


class Window(NamedTuple):
    """Steps that are replayed.

    Parameters
    ----------
    lead : int or None
        Step before those that count; None where one step alone counts from its begin [-].
    steps : tuple of int
        Steps that count [-].
    """

    lead: int | None
    steps: tuple[int, ...]

    @property
    def all(self) -> set[int]:
        """All of them."""
        return {*self.steps} | ({self.lead} if self.lead is not None else set())


def choose_steps(steps: Table, most: int) -> Window:
    """Choose the longest run of consecutive steps that all ranks keep.

    Parameters
    ----------
    steps : polars.DataFrame
        Of `Trace.steps`.
    most : int
        Steps at most, with the one before them [-].

    Returns
    -------
    window : Window
        The steps, and the one before them where one was recorded.
    """
    by_step = steps.group_by("step").agg(pl.all("kept")).sort("step")
    numbers, kept = by_step["step"].to_list(), by_step["kept"].to_list()
    best: list[int] = []
    current: list[int] = []
    for number, is_kept in zip(numbers, kept, strict=True):
        follows = bool(current) and number == current[-1] + 1
        if not is_kept:
            current = []
        elif follows:
            current = [*current, number]
        else:
            current = [number]
        if len(current) > len(best):
            best = current
    if not best:
        best = numbers[:1]
    before = best[0] - 1
    if before in numbers and most > 1:
        return Window(before, tuple(best[: most - 1]))
    if len(best) > 1 and most > 1:
        return Window(best[0], tuple(best[1:most]))
    return Window(None, (best[0],))


def record_run(trace: Recorded) -> Run:
    """Make a run of a trace that can be replayed.

    Parameters
    ----------
    trace : Recorded
        Of any number of ranks.

    Returns
    -------
    run : Run
        Its items, and what each comes after.

    Raises
    ------
    ValueError
        For a trace without work of a device, whose waits nothing tells.
    """
    if not trace.has_device:
        raise ValueError(say_no_device(trace.files))
    count = sum(len(work) for work in trace.works)
    steps = max(trace.steps["step"].n_unique(), 1)
    most = max(int(MOST_ITEMS / max(2 * count / steps, 1)), 2)
    window = choose_steps(trace.steps, most)
    run = Run([], [], [], [], [], window.lead, window.steps)
    meetings = _Meetings(run, trace.collectives)
    origin = min(file.events["ts"].to_list()[0] for file in trace.files)
    for file, work in zip(trace.files, trace.works, strict=True):
        rank = int(file.rank or 0)
        _RankRecorder(run, rank, file, work, meetings, origin).record(window)
    _align_clocks(run)
    return run


def count_left_out(trace: Recorded, run: Run) -> int:
    """Count the consecutive steps that would count, had a run room for them.

    Parameters
    ----------
    trace : Recorded
        Of any number of ranks.
    run : Run
        Of this trace.

    Returns
    -------
    steps : int
        Zero if the run has all of them [-].
    """
    whole = choose_steps(trace.steps, max(trace.steps["step"].n_unique(), 1) + 1)
    return len(whole.steps) - len(run.steps)


def say_no_device(files: Sequence[TraceFile]) -> str:
    """Why a trace without work of a device tells no fixes.

    Parameters
    ----------
    files : sequence of TraceFile
        One per rank.

    Returns
    -------
    text : str
        One sentence.
    """
    return (
        f"trace is of {files[0].source!r}, which has no work of a device; fixes need a trace of a GPU with its "
        "kernels: pass ProfilerActivity.CPU and ProfilerActivity.CUDA to torch.profiler.profile"
    )


class _Call(NamedTuple):
    """A call of the host that launches or waits [s]."""

    begin: float
    end: float
    name: str
    event: int
    launches: bool
    blocks: bool


class _Met(NamedTuple):
    """A collective of a rank, as `Trace.collectives` lists it."""

    key: tuple[int, str, int]
    transfer: float | None
    nbytes: float
    group: str
    ranks: int
    operation: str


class _Meetings:
    """Collectives of all ranks: which kernels meet, and what is known of each."""

    def __init__(self, run: Run, collectives: Table) -> None:
        self.run = run
        self.numbers: dict[tuple[int, str, int], int] = {}
        self.met: dict[tuple[int, int], _Met] = {}
        columns = (
            "rank",
            "index",
            "iteration",
            "group",
            "order",
            "transfer_s",
            "nbytes",
            "ranks",
            "operation",
        )
        shortest: dict[tuple[str, str, float], float] = {}
        for row in collectives.select(*columns, "time_s").iter_rows(named=True):
            met = _Met(
                (row["iteration"], row["group"], row["order"]),
                row["transfer_s"],
                row["nbytes"] or 0.0,
                row["group"],
                row["ranks"] or 1,
                row["operation"],
            )
            self.met[row["rank"], row["index"]] = met
            alike = (met.operation, met.group, met.nbytes)
            shortest[alike] = min(shortest.get(alike, math.inf), row["time_s"])
        self.shortest = shortest

    def join(self, met: _Met, arrival: int) -> int:
        """The meeting of a collective, which a rank now joins."""
        run, item = self.run, self.run.items[arrival]
        if met.key not in self.numbers:
            meeting = Item(
                "meeting",
                item.rank,
                item.step,
                item.begin,
                item.end,
                met.operation,
                work="collective",
                role="communication",
                phase=item.phase,
                stream=item.stream,
                nbytes=met.nbytes,
                group=met.group,
                ranks=met.ranks,
            )
            self.numbers[met.key] = run.add(meeting, float(met.transfer or 0.0), [])
        number = self.numbers[met.key]
        run.links[number].append(Link(arrival, 0.0, "meet"))
        return number


class _RankRecorder:
    """Items of one rank, and what each comes after."""

    def __init__(
        self, run: Run, rank: int, file: TraceFile, work: Table, meetings: _Meetings, origin: int
    ) -> None:
        self.run, self.rank, self.work, self.meetings = run, rank, work, meetings
        self.events, self.args = file.events, file.args
        self.origin = origin
        self.names = file.events["name"].to_list()
        self.parents = file.events["parent"].to_list()
        self.launch_of = file.events["index_correlation"].to_list()
        marks = file.events.filter(MARK).select("ts", "iteration").sort("ts")
        self.mark_times = [self._seconds(ts) for ts in marks["ts"].to_list()]
        self.mark_steps = marks["iteration"].to_list()
        self.host: list[int] = []  # items of the host, in order
        self.launch_items: dict[int, int] = {}  # by the index of the call
        self.works: list[int] = []  # in the order of their begin
        self.launched: dict[int, float] = {}  # begin of the call that launched a work
        self.pageable: set[int] = set()  # copies from or to memory that the host may move

    def _seconds(self, nanoseconds: int) -> float:
        """A time of the trace since the first event of all ranks [s]."""
        return (nanoseconds - self.origin) * _S

    def _find_step(self, time: float) -> int:
        """The step whose mark began last; -1 without one."""
        place = bisect_right(self.mark_times, time) - 1
        return self.mark_steps[place] if place >= 0 else -1

    def record(self, window: Window) -> None:
        """Add the items of some steps to the run."""
        first_launch = self._find_first_launch()
        calls = []
        for call in self._list_calls():
            is_inside = self._find_step(call.begin) in window.all
            # an unmarked step begins with its first work
            if is_inside and (window.all != {-1} or call.begin >= first_launch):
                calls.append(call)
        self._add_host(calls)
        self._add_works(window)
        self._block_host(calls)
        begins = [self.run.items[number].begin for number in self.works[:1]]
        begin = min(begins, default=0.0)
        if window.lead is None and window.steps[0] in self.mark_steps:
            begin = self.mark_times[self.mark_steps.index(window.steps[0])]
        self.run.begins[self.rank] = begin
        if self.host:
            first = self.host[0]
            self.run.floors[first] = self.run.items[first].begin

    def _find_first_launch(self) -> float:
        """When the host launched the first work of the device [s]."""
        launches = self.events.filter(pl.col("stream") < 0, pl.col("index_correlation") >= 0)
        if launches.is_empty():
            return -math.inf
        return self._seconds(launches["ts"][0])

    # -- the host
    # ----------------------------------------------------------------------------------------------

    def _list_calls(self) -> list[_Call]:
        """Calls of the host that launch work or wait for it, in the order of their begin."""
        host = self.events.filter(
            pl.col("stream") < 0,
            (pl.col("index_correlation") >= 0) | pl.col("name").str.contains(BLOCKING),
        )
        calls = []
        for index, name, ts, dur, first in host.select(
            "index", "name", "ts", "dur", "index_correlation"
        ).iter_rows():
            waits = _BLOCKING.search(name) is not None
            calls.append(
                _Call(self._seconds(ts), self._seconds(ts + dur), name, index, first >= 0, waits)
            )
        return calls

    def _add_host(self, calls: Sequence[_Call]) -> None:
        """Items of the host: the begin of each launch, and the end of each wait."""
        lengths = [call.end - call.begin for call in calls if call.launches]
        long = max(_LONG * float(np.median(lengths or [0.0])), _LEAST_LONG)
        keyed: list[tuple[float, str, _Call]] = []
        for call in calls:
            if call.launches:
                keyed.append((call.begin, "launch", call))
            is_copy = "Memcpy" in call.name
            is_long = call.launches and call.end - call.begin > long
            if call.blocks or (call.launches and is_copy) or is_long:
                keyed.append((call.end, "block", call))
        keyed.sort(key=lambda entry: (entry[0], entry[1] == "block"))
        loaded = self._measure_loading()
        explained = self._measure_explained()
        before = -math.inf
        for key, kind, call in keyed:
            name, caller = call.name, self._find_caller(call.event)
            step = self._find_step(call.begin)
            item = Item(kind, self.rank, step, key, key, name, caller=caller)
            lag = max(call.begin - before, 0.0) if math.isfinite(before) else 0.0
            if kind == "block":
                # what of the call was a wait is found later
                lag += call.end - max(call.begin, before) if call.end > before else 0.0
            if math.isfinite(before):
                item.loading = float(loaded(key) - loaded(before))
                item.outside = max(key - before - float(explained(key) - explained(before)), 0.0)
            links = [Link(self.host[-1], lag, "host")] if self.host else []
            number = self.run.add(item, 0.0, links)
            self.host.append(number)
            if kind == "launch":
                self.launch_items[call.event] = number
            before = max(before, key)

    def _find_caller(self, index: int) -> str:
        """The outermost operator around a call of the host that is no step and no module."""
        caller = ""
        while self.parents[index] >= 0:
            index = self.parents[index]
            name = self.names[index]
            if name.startswith("aten::"):
                caller = name
        return caller

    def _measure_loading(self) -> "_Covered":
        """Time up to a moment in which the host loads data."""
        return self._cover(pl.col("name").str.contains(_LOADING))

    def _measure_explained(self) -> "_Explained":
        """Time up to a moment in which the host is in an operator, in a call of the device's runtime
        that does not allocate, or loads data."""
        allocates = pl.col("name").str.contains(_ALLOCATING)
        is_known = pl.col("cat").is_in(_OPERATORS) | pl.col("name").str.contains(_LOADING)
        return _Explained(self._cover(is_known | allocates), self._cover(allocates))

    def _cover(self, which: pl.Expr) -> "_Covered":
        """Time up to a moment that some events of the host cover."""
        host = self.events.filter(pl.col("stream") < 0, which)
        spans = [
            (self._seconds(ts), self._seconds(ts + dur))
            for ts, dur in host.select("ts", "dur").iter_rows()
        ]
        return _Covered(spans)

    # -- the device
    # ----------------------------------------------------------------------------------------------

    def _add_works(self, window: Window) -> None:
        """Works of the device, with what each comes after."""
        columns = (
            "index",
            "role",
            "stream",
            "start",
            "end",
            "collective",
            "name",
            "kind",
            "phase",
            "operation",
        )
        ends_of = self.work.filter(pl.col("collective") >= 0).group_by("collective")
        last = dict(ends_of.agg(pl.max("end")).rows())
        starts = self.events["ts"].to_list()
        for row in self.work.select(columns).iter_rows(named=True):
            index, collective = row["index"], row["collective"]
            if collective >= 0 and collective != index:
                continue  # part of the collective that its first kernel stands for
            launch = self.launch_of[index]
            called = self._seconds(starts[launch]) if launch >= 0 else None
            begin = self._seconds(row["start"])
            step = self._find_step(begin if called is None else called)
            if step not in window.all:
                continue
            end = self._seconds(last.get(collective, row["end"]))
            dimensions = self.args.get(row["operation"], {}).get("Input Dims", "")
            item = Item(
                "work",
                self.rank,
                step,
                begin,
                max(end, begin),
                row["name"],
                work=row["kind"],
                role=row["role"],
                phase=row["phase"],
                stream=row["stream"],
                kernel=f"{self.names[index]} {dimensions}",
                is_sized=bool(dimensions),
            )
            number = self.run.add(item, item.end - item.begin, [])
            self.works.append(number)
            if "Pageable" in self.names[index]:
                self.pageable.add(number)
            if called is not None:
                self.launched[number] = called
            if launch in self.launch_items:
                self.run.links[number].append(Link(self.launch_items[launch], 0.0, "launch"))
            if collective >= 0:
                self._describe_collective(item, number, index)
        self._link_works()

    def _describe_collective(self, item: Item, number: int, index: int) -> None:
        """Size and ranks of a collective; where it meets other ranks, its transfer is the
        meeting's."""
        met = self.meetings.met.get((self.rank, index))
        if met is None:
            return
        item.nbytes, item.group, item.ranks = met.nbytes, met.group, met.ranks
        item.name = met.operation
        item.transfer = item.end - item.begin
        if met.transfer is not None:
            item.meets = self.meetings.join(met, number)
            self.run.seconds[number] = 0.0
        else:
            alike = self.meetings.shortest.get((met.operation, met.group, met.nbytes))
            item.transfer = min(item.transfer, alike or item.transfer)

    def _find_end(self, number: int) -> int:
        """The item with which a work ends: its meeting, or itself."""
        meets = self.run.items[number].meets
        return meets if meets >= 0 else number

    def _link_works(self) -> None:
        """Link each work to the one before it on its stream, to its launch, and to what its stream
        waited for."""
        run, items = self.run, self.run.items
        latency = self._find_latency()
        by_end = sorted(self.works, key=lambda number: items[number].end)
        ends = [items[number].end for number in by_end]
        last_of_stream: dict[int, int] = {}
        typical_gap = self._find_gap()
        by_launch = self._sort_by_launch()
        for number in self.works:
            item, ready = items[number], -math.inf
            before = last_of_stream.get(item.stream)
            links = []
            if before is not None:
                gap = item.begin - items[before].end
                lag = min(gap, typical_gap) if gap > _LARGEST_GAP else gap
                links.append(Link(self._find_end(before), lag, "stream"))
                ready = items[before].end + lag
            for link in run.links[number]:
                taken = item.begin - items[link.item].begin
                links.append(Link(link.item, min(taken, latency), "launch"))
                ready = max(ready, items[link.item].begin + min(taken, latency))
            if item.role == "communication":
                links += self._link_input(number, by_launch)
            late = item.begin - ready
            if late > _EQUAL and math.isfinite(ready):
                awaited = self._find_awaited(number, ready, by_end, ends)
                if awaited is not None:
                    lag = item.begin - items[awaited].end
                    late = 0.0
                    if lag > _LATEST:
                        lag, late = 0.0, lag
                    links.append(Link(self._find_end(awaited), lag, "wait"))
            if not links:
                run.floors[number] = item.begin
                late = 0.0
            run.links[number] = links
            run.delays[number] = max(late, 0.0) if math.isfinite(late) else 0.0
            for link in links:  # what the input explains is no delay
                if link.kind == "input" and link.lag == 0:
                    shortfall = item.begin - max(items[link.item].end, ready)
                    run.delays[number] = min(run.delays[number], max(shortfall, 0.0))
            last_of_stream[item.stream] = number
        self._allow_waits()

    def _find_latency(self) -> float:
        """From the begin of a launch to the begin of its kernel on a free device: what the fastest
        tenth of the kernels take before which their stream is idle [s]."""
        idle, last = [], dict[int, float]()
        for number in self.works:
            item = self.run.items[number]
            called = self.launched.get(number)
            is_idle = item.begin - last.get(item.stream, -math.inf) > _LARGEST_GAP
            if called is not None and is_idle:
                idle.append(item.begin - called)
            last[item.stream] = item.end
        positive = [taken for taken in idle if taken > 0]
        if not positive:
            return _LONGEST_LATENCY
        return min(float(np.quantile(positive, 0.1)), _LONGEST_LATENCY)

    def _find_gap(self) -> float:
        """Median gap between kernels that follow one another at once on a stream [s]."""
        gaps = []
        last: dict[int, float] = {}
        for number in self.works:
            item = self.run.items[number]
            if item.stream in last:
                gap = item.begin - last[item.stream]
                if 0 <= gap <= _LARGEST_GAP:
                    gaps.append(gap)
            last[item.stream] = item.end
        return float(np.median(gaps)) if gaps else 1e-6

    def _sort_by_launch(self) -> "_ByLaunch":
        """Works that compute, in the order of their launch."""
        pairs = sorted(
            (called, number)
            for number, called in self.launched.items()
            if self.run.items[number].role != "communication"
        )
        return _ByLaunch([called for called, _ in pairs], [number for _, number in pairs])

    def _link_input(self, number: int, by_launch: "_ByLaunch") -> list[Link]:
        """A collective comes after the work that was launched before it: PyTorch makes its stream
        wait for the stream on which it was called."""
        items = self.run.items
        called = self.launched.get(number)
        if called is None:
            return []
        place = bisect_right(by_launch.times, called) - 1
        if place < 0:
            return []
        before = by_launch.numbers[place]
        if items[before].stream == items[number].stream:
            return []
        if items[before].end > items[number].begin + _EQUAL:
            return []
        late = items[number].begin - items[before].end
        return [Link(self._find_end(before), late if late <= _LATEST else 0.0, "input")]

    def _find_awaited(
        self, number: int, ready: float, by_end: Sequence[int], ends: Sequence[float]
    ) -> int | None:
        """The work of another stream that ended just before this one began."""
        items, item = self.run.items, self.run.items[number]
        place = bisect_right(ends, item.begin + _EQUAL) - 1
        while place >= 0 and ends[place] > max(ready, item.begin - _LATEST):
            other = items[by_end[place]]
            if other.stream != item.stream and other.begin < item.begin - _EQUAL:
                return by_end[place]
            place -= 1
        return self._find_collective(number, ready, by_end, ends)

    def _find_collective(
        self, number: int, ready: float, by_end: Sequence[int], ends: Sequence[float]
    ) -> int | None:
        """The last collective that ended after a work was launched and before it began; the rest of
        its time, in which other streams fill the device, is a delay."""
        items, item = self.run.items, self.run.items[number]
        place = bisect_right(ends, item.begin) - 1
        while place >= 0 and ends[place] > ready:
            other = items[by_end[place]]
            if other.role == "communication" and other.stream != item.stream:
                return by_end[place]
            place -= 1
        return None

    def _allow_waits(self) -> None:
        """A collective for which no work was seen to wait may be awaited by the first computation
        that was launched after it and began after its end."""
        run, items = self.run, self.run.items
        awaited = {
            link.item
            for number in self.works
            for link in run.links[number]
            if link.kind == "wait" and items[number].role != "communication"
        }
        computing = [number for number in self.works if items[number].role == "compute"]
        begins = [items[number].begin for number in computing]
        for number in self.works:
            item = items[number]
            if item.role != "communication" or self._find_end(number) in awaited:
                continue
            called = self.launched.get(number, -math.inf)
            for place in range(bisect_right(begins, item.end - _EQUAL), len(computing)):
                later = computing[place]
                if self.launched.get(later, math.inf) > called:
                    # what is not explained comes after what a work waits for
                    lag = items[later].begin - run.delays[later] - item.end
                    run.links[later].append(Link(self._find_end(number), min(lag, 0.0), "maybe"))
                    break

    # -- waits of the host
    # ----------------------------------------------------------------------------------------------

    def _block_host(self, calls: Sequence[_Call]) -> None:
        """Link each call that may wait to the work that it waited for; the rest of its time is its
        own."""
        run, items = self.run, self.run.items
        by_end = sorted(self.works, key=lambda number: items[number].end)
        ends = [items[number].end for number in by_end]
        queued = _Outstanding(
            sorted(self.launched.values()),
            sorted(items[number].begin for number in self.works if number in self.launched),
        )
        by_key = {(call.end, call.name): call for call in calls}
        for position, number in enumerate(self.host):
            item = items[number]
            if item.kind != "block":
                continue
            call = by_key[item.end, item.name]
            before = items[self.host[position - 1]].end if position else call.begin
            begin = max(call.begin, before)
            awaited = self._find_blocking(call, begin, by_end, ends, queued)
            if awaited is None:
                continue
            residual = max(call.end - max(items[awaited].end, begin), 0.0)
            own = max(call.begin - before, 0.0)
            links = [Link(self._find_end(awaited), residual, "blocked")]
            if position:
                links.append(Link(self.host[position - 1], own + residual, "host"))
            run.links[number] = links

    def _find_blocking(
        self,
        call: _Call,
        begin: float,
        by_end: Sequence[int],
        ends: Sequence[float],
        queued: "_Outstanding",
    ) -> int | None:
        """The work whose end a call waited for: the last one that ended while it ran."""
        items = self.run.items
        is_copy = call.launches and "Memcpy" in call.name
        is_full = call.launches and queued.count(begin) >= _QUEUE
        place = bisect_right(ends, call.end) - 1
        while place >= 0 and ends[place] > begin:
            number = by_end[place]
            of_call = (is_copy and number in self.pageable) and self.launch_items.get(
                call.event
            ) in {link.item for link in self.run.links[number] if link.kind == "launch"}
            launched_before = self.launched.get(number, -math.inf) < call.begin
            if (call.blocks or is_full) and launched_before:
                is_near = call.end - ends[place] <= max(_LATEST, 0.5 * (call.end - begin))
                return number if is_near else None
            if of_call and items[number].begin >= call.begin - _EQUAL:
                return number
            place -= 1
        return None


_BLOCKING = re.compile(BLOCKING)
#: Annotations of loading, calls that allocate, and categories of operators and calls.
_LOADING = r"DataLoader\)#"
_ALLOCATING = "^(cuda|hip)(Malloc|Free|HostAlloc)"
_OPERATORS = ("cpu_op", "cuda_runtime", "cuda_driver")


class _ByLaunch(NamedTuple):
    """Works in the order of their launch: when [s], and which."""

    times: list[float]
    numbers: list[int]


class _Outstanding(NamedTuple):
    """When works were launched, and when they began, both in order [s]."""

    launched: list[float]
    begun: list[float]

    def count(self, time: float) -> int:
        """How many had been launched and had not begun."""
        return bisect_right(self.launched, time) - bisect_right(self.begun, time)


class _Covered:
    """Time up to a moment that some spans cover."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self.edges, self.covered = np.zeros(1), np.zeros(1)
        if spans:
            low, high = np.array(sorted(spans)).T
            high = np.maximum.accumulate(high)
            low = np.maximum(low, np.append(-np.inf, high[:-1]))
            self.edges = np.ravel(np.column_stack([low, np.maximum(high, low)]))
            lengths = np.diff(self.edges) * (np.arange(len(self.edges) - 1) % 2 == 0)
            self.covered = np.append(0.0, np.cumsum(lengths))

    def __call__(self, time: float) -> float:
        """Covered time before a moment [s]."""
        return float(np.interp(time, self.edges, self.covered))


class _Explained(NamedTuple):
    """Time up to a moment in operators and calls, those that allocate among them, and in these
    alone."""

    called: _Covered
    allocating: _Covered

    def __call__(self, time: float) -> float:
        """Time before a moment in operators and calls that do not allocate [s]."""
        return self.called(time) - self.allocating(time)


def _align_clocks(run: Run) -> None:
    """Move the times of each rank to the clock of the first one, by the ends of the collectives in
    which both met: a collective ends on all its ranks together."""
    arrivals: dict[int, dict[int, float]] = {}
    for item in run.items:
        if item.meets >= 0:
            arrivals.setdefault(item.meets, {})[item.rank] = item.end
    shifts: dict[int, float] = {}
    for rank in run.ranks:
        differences = []
        for ends in arrivals.values():
            known = [other for other in ends if other in shifts and other != rank]
            if rank in ends and known:
                differences.append(ends[known[0]] + shifts[known[0]] - ends[rank])
        shifts[rank] = float(np.median(differences)) if differences else 0.0
    for number, item in enumerate(run.items):
        if item.kind != "meeting":
            item.begin += shifts[item.rank]
            item.end += shifts[item.rank]
            run.floors[number] += shifts[item.rank]
    for rank, shift in shifts.items():
        run.begins[rank] += shift
    for number, ends in arrivals.items():
        begins = [run.items[link.item].begin for link in run.links[number] if link.kind == "meet"]
        meeting = run.items[number]
        meeting.begin = max(begins)
        meeting.end = float(np.median([ends[rank] + shifts[rank] for rank in ends]))
