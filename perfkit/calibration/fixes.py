"""What would help most: changes of a recorded step, ranked by the time that each would save."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl

from perfkit.calibration.fix_changes import (
    LEAST,
    LIKELY,
    MOST,
    Apply,
    Case,
    Collectives,
    Pauses,
    Straggler,
    balance_rank,
    double_batch,
    even_hosts,
    find_outside,
    find_pauses,
    find_stops,
    find_straggler,
    free_host,
    group_collectives,
    launch_graphs,
    list_chains,
    load_ahead,
    merge_kernels,
    overlap_gradients,
    prefetch_weights,
    speed_up,
    split_exchanges,
)
from perfkit.calibration.replay_links import MOST_ITEMS, Recorded, count_left_out, record_run
from perfkit.calibration.replay_run import Beside, Run, replay, sort_items
from perfkit.ground.results import Picture, Sections, Table, Tabular, write_notes
from perfkit.ground.units import format_bytes, format_interval, format_time

#: Contention of kernels with collectives beside them, where the trace does not show it, at least,
#: most likely and at most [-]: none; a choice between these; and what was fitted to published steps
#: of A100 (`context.overlap` of its platform: 0.55, of H100: 0.46).
_CONTENTIONS = (0.0, 0.3, 0.55)
#: Contention at most [-]: a choice, so that work ends that stands still beside a collective.
_MOST_CONTENTION = 0.9
#: Changes that save less than this share of an iteration are counted, not listed [-]: a choice.
_LEAST_SHARE = 0.005
#: Share of a gain by which replays miss it even if all is known [-]: a choice, looked at on the
#: development seeds of `benchmarks.fixes`.
_OFF = 0.04
#: The same of overlap, where the order of collectives changes [-]: a choice, too.
_OFF_OVERLAPPED = 0.3
#: Half the width of an 80 % interval of a mean step, as a share of it [-]: of a single step, and at
#: least; choices. The standard deviation of steps is 0.7 to 1.7 % in public traces of V100 and A100
#: with several steps.
_USUAL_SPREAD, _LEAST_SPREAD = 0.01, 0.003
#: Gradients whose reduction hides by more than this share are reduced in buckets already [-]: a
#: choice.
_HIDDEN = 0.1
#: Changes that are taken together, at most [-]: a choice.
_TOGETHER = 3
#: A replay that differs from the trace by more than this share of its time says nothing of what
#: would help [-]: a choice; replays of public traces are within 3 %, but for one that is ten
#: thousand times off.
_MOST_APART = 0.25
#: Shares of an iteration from which on a note tells of time that nothing explains, of ranks that
#: begin apart, and of a replay that is off [-]: a choice.
_NOTED = 0.02


@dataclass(frozen=True)
class Fix:
    """A change, and what it would save.

    Parameters
    ----------
    kind : str
        ``overlap``, ``balance``, ``pauses``, ``link``, ``batch``, ``graphs``, ``compile``, ``waits`` or
        ``loading``.
    what : str
        What is changed, in a few words.
    words : str
        What the trace shows, in a sentence.
    advice : str
        What to do.
    gain : float
        Time by which an iteration becomes shorter; for a larger batch, for the same samples [s].
    low, high : float
        80 % interval of it [s].
    """

    kind: str
    what: str
    words: str
    advice: str
    gain: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float]:
        """80 % interval of the gain [s]."""
        return self.low, self.high


@dataclass(frozen=True, eq=False)
class Fixes(Tabular):
    """Changes of a recorded iteration, those that save most first.

    Parameters
    ----------
    time : float
        Of an iteration, as recorded [s].
    replayed : float
        The same in the replay [s].
    fixes : tuple of Fix
        Each alone.
    together : tuple of Fix
        The best of several kinds, which go together.
    gain, low, high : float
        What these save together, and the 80 % interval [s].
    little : int
        Changes that were tried and save less than 0.5 % of an iteration [-].
    unexplained : float
        Time of an iteration on the busiest rank in which its device waits for nothing that the
        trace names; the replay keeps it [s].
    warnings : tuple of str
        What the trace cannot tell.
    refusal : str
        Why no change was tried: the replay does not take the time that the trace says; empty if
        changes were tried.
    """

    report_title = "What would help most"

    time: float
    replayed: float
    fixes: tuple[Fix, ...]
    together: tuple[Fix, ...]
    gain: float
    low: float
    high: float
    little: int
    unexplained: float
    warnings: tuple[str, ...]
    refusal: str = ""

    def table(self) -> Table:
        """Every change.

        Returns
        -------
        frame : polars.DataFrame
            fix, what [-]; gain_s, low_s, high_s: the time that an iteration becomes shorter, and
            its 80 % interval [s]; gain_share of the iteration [-]; words, advice.
        """
        kinds = {
            "fix": pl.String,
            "what": pl.String,
            "gain_s": pl.Float64,
            "low_s": pl.Float64,
            "high_s": pl.Float64,
            "gain_share": pl.Float64,
            "words": pl.String,
            "advice": pl.String,
        }
        rows = []
        for fix in self.fixes:
            share = fix.gain / self.replayed
            rows.append(
                (fix.kind, fix.what, fix.gain, fix.low, fix.high, share, fix.words, fix.advice)
            )
        return pl.DataFrame(rows, kinds, orient="row")

    def chart(self) -> Picture:
        """Draw what each change saves, with its interval.

        Returns
        -------
        chart : altair.LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        rows = [
            {"what": fix.what, "gain_s": fix.gain, "low_s": fix.low, "high_s": fix.high}
            for fix in self.fixes
        ]
        return plots.gain_bars(rows, time=self.replayed)

    def explain(self, most: int | None = None) -> str:
        """The changes in words.

        Parameters
        ----------
        most : int, optional
            Changes that are told, and those that are part of what goes together; all by default
            [-].

        Returns
        -------
        text : str
            Several lines.
        """
        lines = [self.headline()]
        for place, fix in enumerate(self.fixes, 1):
            is_told = most is None or place <= most
            if not is_told and (len(self.together) < 2 or fix not in self.together):
                continue
            gain = format_interval(fix.gain, fix.low, fix.high)
            lines.append(f"  {place}. {fix.what}: {gain} less, {fix.gain / self.replayed:.0%}")
            lines.append(f"     {fix.words} {fix.advice}")
        if len(self.together) > 1:
            names = " + ".join(fix.what for fix in self.together)
            gain = format_interval(self.gain, self.low, self.high)
            lines.append(f"  together, {names}: {gain} less, {self.gain / self.replayed:.0%}")
        lines += write_notes("note", self.warnings)
        return "\n".join(lines)

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        if not self.fixes:
            return
        yield "", self.chart()
        yield (
            "Change by change",
            self.table().select("what", "gain_s", "low_s", "high_s", "gain_share"),
        )
        rows: list[Sequence[str]] = [("change", "what the trace shows", "what to do")]
        rows += [(fix.what, fix.words, fix.advice) for fix in self.fixes]
        yield "What they rest on", rows

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        if self.refusal:
            return self.refusal
        if not self.fixes:
            return f"of an iteration of {format_time(self.replayed)}, no change of those tried saves {100 * _LEAST_SHARE:g} %"
        first = self.fixes[0]
        gain = format_interval(first.gain, first.low, first.high)
        return f"{first.what} would save most: {gain} of {format_time(self.replayed)}"

    def __repr__(self) -> str:
        return self.headline()


class _Candidate(NamedTuple):
    """A change that is tried.

    `batches` is how many times more samples an iteration has with it; `order` says which of several
    changes comes first; `frees_kernels` whether contention makes it save more, as collectives become
    shorter.
    """

    kind: str
    what: str
    words: str
    advice: str
    apply: Apply
    order: int
    batches: float = 1.0
    frees_kernels: bool = False


class _Gain(NamedTuple):
    """What a change saves, and the ends of it [s]."""

    likely: float
    low: float
    high: float


def find_fixes(trace: Recorded) -> Fixes:
    """Replay a trace with changes, and rank these by what they save.

    Parameters
    ----------
    trace : Recorded
        Of any number of ranks.

    Returns
    -------
    fixes : Fixes
        Ranked, with intervals.

    Raises
    ------
    ValueError
        For a trace without work of a device.
    """
    run = record_run(trace)
    base = replay(run).time
    if abs(base / trace.time - 1.0) > _MOST_APART:
        return _refuse(trace, run, base)
    contention = estimate_contention(run)
    spread = _find_spread(trace)
    candidates = _list_candidates(run)
    gains = []
    for candidate in candidates:
        if not _saves_little(run, candidate, base):
            gain = _try(run, [candidate], base, contention, spread)
            gains.append((candidate, gain))
    gains.sort(key=lambda pair: -pair[1].likely)
    kept = [pair for pair in gains if pair[1].likely >= _LEAST_SHARE * base]
    fixes = tuple(_make_fix(candidate, gain) for candidate, gain in kept)
    chosen = _choose_together([candidate for candidate, _ in kept])
    together = _Gain(0.0, 0.0, 0.0)
    if len(chosen) > 1:
        together = _try(run, chosen, base, contention, spread)
    names = {candidate.what for candidate in chosen}
    return Fixes(
        time=trace.time,
        replayed=base,
        fixes=fixes,
        together=tuple(fix for fix in fixes if fix.what in names),
        gain=together.likely,
        low=together.low,
        high=together.high,
        little=len(candidates) - len(kept),
        unexplained=_sum_unexplained(run),
        warnings=tuple(_list_notes(trace, run, base, contention)),
    )


def _refuse(trace: Recorded, run: Run, base: float) -> Fixes:
    """No change, where the replay does not take the time that the trace says."""
    refusal = (
        f"no advice on what would help: a replay of the recorded launches, kernels and waits takes {format_time(base)}, "
        f"the trace says {format_time(trace.time)}, and beyond {_MOST_APART:.0%} apart gains of one are none of the other"
    )
    if base < trace.time:
        refusal += (
            "; other work of the host fills that time, or a pause: mark steps with profiler.step()"
        )
    return Fixes(
        time=trace.time,
        replayed=base,
        fixes=(),
        together=(),
        gain=0.0,
        low=0.0,
        high=0.0,
        little=0,
        unexplained=_sum_unexplained(run),
        warnings=(),
        refusal=refusal,
    )


def _make_fix(candidate: _Candidate, gain: _Gain) -> Fix:
    """A change with what it saves."""
    return Fix(
        kind=candidate.kind,
        what=candidate.what,
        words=candidate.words,
        advice=candidate.advice,
        gain=gain.likely,
        low=gain.low,
        high=gain.high,
    )


def _choose_together(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The best changes of several kinds that go together: kernels are either compiled or launched
    as graphs, and a larger batch changes what an iteration is."""
    chosen: list[_Candidate] = []
    for candidate in candidates:
        kinds = {each.kind for each in chosen}
        is_second_way = candidate.kind in ("graphs", "compile") and kinds & {"graphs", "compile"}
        if candidate.kind == "batch" or candidate.kind in kinds or is_second_way:
            continue
        chosen.append(candidate)
        if len(chosen) == _TOGETHER:
            break
    return chosen


def _try(
    run: Run,
    candidates: Sequence[_Candidate],
    base: float,
    contention: "Contention",
    spread: float,
) -> _Gain:
    """Replay a run with changes in all cases [s]."""
    may_wait = any(link.kind == "maybe" for links in run.links for link in links)
    ends = [contention.low, contention.high]
    if all(candidate.frees_kernels for candidate in candidates):
        ends.reverse()
    trials = [
        _Trial(LEAST, ends[1], True),
        _Trial(LIKELY, contention.likely, False),
        _Trial(MOST, ends[0], False),
    ]
    if may_wait:
        trials.append(_Trial(LIKELY, contention.likely, True))
    gains: list[float] = []
    likely: list[float] = []
    changed_runs: dict[Case, Run] = {}
    batches = math.prod(candidate.batches for candidate in candidates)
    for trial in trials:
        if trial.case not in changed_runs:
            changed = run
            for candidate in sorted(candidates, key=lambda each: each.order):
                changed = candidate.apply(changed, trial.case)
            if changed.order is None:
                changed.order = sort_items(changed)
            changed_runs[trial.case] = changed
        changed = changed_runs[trial.case].copy()
        changed.contention = changed.recorded_contention = trial.contention
        gain = base - replay(changed, tight=trial.tight).time / batches
        gains.append(gain)
        if trial.case is LIKELY:
            likely.append(gain)
    middle = float(np.mean(likely))
    off = _OFF
    if any(candidate.kind == "overlap" for candidate in candidates):
        off = _OFF_OVERLAPPED
    margin = math.hypot(spread * base, off * middle)
    return _Gain(middle, min(gains) - margin, max(gains) + margin)


class _Trial(NamedTuple):
    """What is assumed in a replay: a case, the contention, and whether streams also wait where the
    trace only allows it."""

    case: Case
    contention: float
    tight: bool


def _saves_little(run: Run, candidate: _Candidate, base: float) -> bool:
    """Whether a change saves nothing worth telling even at best."""
    best = base - replay(candidate.apply(run, MOST)).time / candidate.batches
    return best < _LEAST_SHARE * base


def _find_spread(trace: Recorded) -> float:
    """Half the width of an 80 % interval of the mean step of a trace, as a share of it [-]; of a
    single step, what is usual."""
    kept = trace.steps.filter("kept").group_by("step").agg(pl.mean("time_s"))["time_s"]
    if len(kept) < 2:
        return _USUAL_SPREAD
    times = kept.to_numpy()
    spread = float(1.2816 * times.std(ddof=1) / times.mean() / math.sqrt(len(times)))
    return max(spread, _LEAST_SPREAD)


class Contention(NamedTuple):
    """Share of its rate that work loses to a collective beside it.

    Parameters
    ----------
    low, likely, high : float
        At least, most likely, and at most [-].
    is_measured : bool
        Whether the trace shows it; otherwise it is assumed.
    highest : float
        The high end before it was cut to `_MOST_CONTENTION` [-].
    """

    low: float
    likely: float
    high: float
    is_measured: bool
    highest: float


def estimate_contention(run: Run) -> Contention:
    """Share of its rate that work loses to a collective beside it: quartiles over equal kernels that
    ran with and without one, or what is assumed where these are few.

    Parameters
    ----------
    run : Run
        Recorded.

    Returns
    -------
    contention : Contention
        Measured or assumed.
    """
    begins = [item.begin for item in run.items]
    ends = [item.end for item in run.items]
    beside = Beside(run).measure(begins, ends)
    alone: dict[tuple[int, str], list[float]] = {}
    slowed: list[tuple[int, float]] = []
    for number, item in enumerate(run.items):
        if item.role != "compute" or run.seconds[number] < _LEAST_SECONDS:
            continue
        share = beside[number] / run.seconds[number]
        if share < _ALONE:
            alone.setdefault((item.rank, item.kernel), []).append(run.seconds[number])
        elif share > _BESIDE:
            slowed.append((number, share))
    found, weights = [], []
    for number, share in slowed:
        item, seconds = run.items[number], run.seconds[number]
        usual = alone.get((item.rank, item.kernel))
        if item.is_sized and usual:
            found.append((1.0 - float(np.median(usual)) / seconds) / share)
            weights.append(seconds)
    if len(found) < _LEAST_PAIRS:
        low, likely, high = _CONTENTIONS
        return Contention(low, likely, high, is_measured=False, highest=high)
    order = np.argsort(found)
    done = np.cumsum(np.array(weights)[order]) / sum(weights)
    low, likely, high = (
        float(np.array(found)[order][np.searchsorted(done, quantile)])
        for quantile in (0.25, 0.5, 0.75)
    )
    # noise may make equal kernels faster beside a collective
    clipped = np.clip([low, likely, high], 0.0, _MOST_CONTENTION).tolist()
    return Contention(clipped[0], clipped[1], clipped[2], is_measured=True, highest=high)


#: Kernels that tell of contention take this time at least [s], and are as many [-]: choices.
_LEAST_SECONDS, _LEAST_PAIRS = 10e-6, 8
#: A kernel runs alone if a collective is in flight for less than the first share of its time, and
#: beside one for more than the second [-]: choices.
_ALONE, _BESIDE = 0.02, 0.5


# -- what is tried
# --------------------------------------------------------------------------------------------------


def _list_candidates(run: Run) -> list[_Candidate]:
    """All changes that a run may have."""
    groups = group_collectives(run)
    candidates = [*_list_overlaps(run, groups)]
    candidates += _list_links(run, groups)
    candidates += _list_balances(run)
    candidates += _list_host_changes(run)
    candidates += _list_waits(run)
    candidates.append(_propose_batch(run, groups))
    return candidates


def _count(number: float, word: str) -> str:
    """A number with its word, as ``2 kernels``; a mean that rounds to none is less than one."""
    whole = round(number)
    if whole == 0 and number > 0:
        return f"less than one {word}"
    return f"{whole:,} {word}" + ("s" if whole != 1 else "")


def _name_pass(phase: str) -> str:
    """A phase in words."""
    if phase in ("forward", "backward"):
        return f"the {phase} pass"
    return "the update" if phase == "update" else "the step"


def measure_exposed(run: Run, numbers: Sequence[int]) -> float:
    """Time of an iteration in which some collectives are in flight, and nothing computes beside
    them; mean over ranks [s]."""
    chosen = set(numbers)
    total = 0.0
    for rank in run.ranks:
        spans, works = [], []
        for number, item in enumerate(run.items):
            if item.step not in run.steps:
                continue
            if number in chosen and (item.kind == "meeting" or item.rank == rank):
                spans.append((item.begin, item.end))
            elif item.role == "compute" and item.rank == rank:
                works.append((item.begin, item.end))
        total += _subtract(spans, works)
    return total / max(len(run.ranks), 1) / len(run.steps)


def _subtract(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """Length of the union of spans without that of others [s]."""
    if not spans:
        return 0.0
    edges = [(begin, 1, 0) for begin, _ in spans] + [(end, -1, 0) for _, end in spans]
    edges += [(begin, 0, 1) for begin, _ in others] + [(end, 0, -1) for _, end in others]
    edges.sort()
    total, before, inside, hidden = 0.0, edges[0][0], 0, 0
    for time, opens, hides in edges:
        if inside > 0 and hidden == 0:
            total += time - before
        inside, hidden, before = inside + opens, hidden + hides, time
    return total


def _describe_group(run: Run, group: Collectives) -> str:
    """What a group of collectives does in a step."""
    numbers = [number for number in group.numbers if run.items[number].step in run.steps]
    whole = sum(run.items[number].end - run.items[number].begin for number in numbers)
    lone = len({run.items[number].rank for number in numbers if run.items[number].kind == "work"})
    share = max(lone, 1)
    count = len(numbers) / len(run.steps) / share
    per_step = whole / len(run.steps) / share
    exposed = measure_exposed(run, numbers)
    nbytes = sum(run.items[number].nbytes for number in numbers) / len(run.steps) / share
    size = f" of {format_bytes(nbytes)} together" if nbytes else ""
    ranks = run.items[group.numbers[0]].ranks
    verb = "takes" if round(count) == 1 else "take"
    return (
        f"{_count(count, group.operation)} a step{size} among {ranks} ranks in {_name_pass(group.phase)} {verb} "
        f"{format_time(per_step)}, of which nothing hides {format_time(exposed)}"
    )


def _list_overlaps(run: Run, groups: Sequence[Collectives]) -> list[_Candidate]:
    """Collectives that computation could hide."""
    candidates = []
    weights = [group for group in groups if group.role == "weights"]
    gradients = [group for group in groups if group.role == "gradients"]
    if weights:
        gathers = [number for group in weights for number in group.numbers]
        reductions = [
            number
            for group in gradients
            if group.operation == "reduce_scatter"
            for number in group.numbers
        ]
        words = "; ".join(_describe_group(run, group) for group in (*weights, *gradients))
        candidates.append(
            _Candidate(
                "overlap",
                "overlap gathered weights and reduced gradients with computation",
                f"{words}.",
                "Prefetch in FSDP (forward_prefetch and backward_prefetch, or set_modules_to_forward_prefetch), and "
                "let nothing read gradients before the update.",
                partial(_prefetch, gathers, reductions),
                order=8,
            )
        )
    for group in gradients:
        if weights and group.operation == "reduce_scatter":
            continue
        if _find_hidden(run, group) > _HIDDEN:
            continue  # they are reduced in buckets already
        candidates.append(
            _Candidate(
                "overlap",
                f"overlap {group.operation} of gradients with the backward pass",
                f"{_describe_group(run, group)}.",
                "Wrap the model in DistributedDataParallel and mind bucket_cap_mb, or reduce each gradient in a hook as "
                "soon as it is there.",
                partial(_bucket, group.numbers),
                order=8,
            )
        )
    for group in groups:
        if group.role == "activations":
            candidates.append(
                _Candidate(
                    "overlap",
                    f"overlap {group.operation} of {_name_pass(group.phase)} with computation",
                    f"{_describe_group(run, group)}; the next kernels need its result, so only work on other samples or "
                    "tables can run beside it.",
                    "Split the batch in two, exchange the inputs of the next step ahead (TorchRec's "
                    "TrainPipelineSparseDist), or use asynchronous tensor parallelism.",
                    partial(_split, group.numbers),
                    order=8,
                )
            )
    return candidates


def _find_hidden(run: Run, group: Collectives) -> float:
    """Share of the time of some collectives that computation hides [-]."""
    numbers = [number for number in group.numbers if run.items[number].step in run.steps]
    lone = len({run.items[number].rank for number in numbers if run.items[number].kind == "work"})
    whole = sum(run.items[number].end - run.items[number].begin for number in numbers)
    whole /= len(run.steps) * max(lone, 1)
    return 1.0 - measure_exposed(run, numbers) / whole if whole > 0 else 1.0


def _prefetch(gathers: Sequence[int], reductions: Sequence[int], run: Run, case: Case) -> Run:
    """See `prefetch_weights`."""
    return prefetch_weights(run, case, gathers, reductions)


def _bucket(numbers: Sequence[int], run: Run, case: Case) -> Run:
    """See `overlap_gradients`."""
    return overlap_gradients(run, case, numbers)


def _split(numbers: Sequence[int], run: Run, case: Case) -> Run:
    """See `split_exchanges`."""
    return split_exchanges(run, case, numbers)


def _list_links(run: Run, groups: Sequence[Collectives]) -> list[_Candidate]:
    """A link that is twice as fast."""
    if not groups:
        return []
    numbers = [number for group in groups for number in group.numbers]
    smaller = ""
    if any(group.role == "gradients" for group in groups):
        smaller = "send gradients in bf16; "
    parts = "; ".join(_describe_group(run, group) for group in groups[:2])
    return [
        _Candidate(
            "link",
            "links twice as fast",
            f"{parts}.",
            f"Check with the logs of nccl-tests (perfkit.diagnose) that the links run as they should; {smaller}or "
            "rent faster links.",
            partial(_speed, numbers),
            order=1,
            frees_kernels=True,
        )
    ]


def _speed(numbers: Sequence[int], run: Run, case: Case) -> Run:
    """See `speed_up`."""
    return speed_up(run, case, numbers)


def _list_balances(run: Run) -> list[_Candidate]:
    """Ranks for which others wait."""
    candidates = []
    straggler = find_straggler(run)
    if straggler is not None:
        why = (
            f"its kernels take {straggler.slower:.2f} times as long as on the median of the others"
        )
        advice = "Look at clocks, temperature and power of this GPU, and exchange it."
        if straggler.host_slower > max(1.0, straggler.slower):
            why += f", and its host {straggler.host_slower:.2f} times"
            advice = "Look at what else runs on the cores of this rank: loaders, pinning, garbage collection."
        if not straggler.alike:
            why += "; ranks run different kernels"
            advice = "Share the work evenly: plan tables anew (perfkit.shard), or sort samples by length."
        candidates.append(
            _Candidate(
                "balance",
                f"balance rank {straggler.rank}",
                f"Rank {straggler.rank} comes last to {_count(straggler.meetings, 'collective')} of a step, together "
                f"{format_time(straggler.late)} after the median of the other ranks: {why}.",
                advice,
                partial(_balance, straggler),
                order=2,
            )
        )
    pauses = find_pauses(run)
    if pauses is not None and any(item.kind == "meeting" for item in run.items):
        candidates.append(
            _Candidate(
                "pauses",
                "even out pauses of the hosts",
                f"Hosts make the same calls, and each pauses at other places: beyond the median of the ranks at the same "
                f"call they take {format_time(pauses.seconds)} of a step, at once up to {format_time(pauses.longest)} (rank "
                f"{pauses.rank}), and all ranks wait for each pause.",
                "Collect garbage in all ranks at the same step (gc.disable(), gc.collect()), bind each process to cores "
                "of its own, and keep loaders and logging off these.",
                partial(_even, pauses),
                order=2,
            )
        )
    return candidates


def _even(pauses: Pauses, run: Run, case: Case) -> Run:
    """See `even_hosts`."""
    return even_hosts(run, case, pauses)


def _balance(straggler: Straggler, run: Run, case: Case) -> Run:
    """See `balance_rank`."""
    return balance_rank(run, case, straggler)


def _list_host_changes(run: Run) -> list[_Candidate]:
    """Fewer launches of the host."""
    steps, ranks = len(run.steps), len(run.ranks)
    counted = [number for number, item in enumerate(run.items) if item.step in run.steps]
    launches = sum(1 for number in counted if run.items[number].kind == "launch")
    host = sum(
        link.lag
        for number in counted
        if run.items[number].kind in ("launch", "block")
        for link in run.links[number]
        if link.kind == "host"
    )
    busy = sum(run.seconds[number] for number in counted if run.items[number].role == "compute")
    chains = [chain for chain in list_chains(run) if run.items[chain[0]].step in run.steps]
    merged = sum(len(chain) for chain in chains)
    seconds = sum(run.seconds[number] for chain in chains for number in chain)
    launched = launches / steps / ranks
    times = (
        f"the host takes {format_time(host / steps / ranks)} for {launched:,.0f} launches, the device "
        f"{format_time(busy / steps / ranks)} for kernels"
    )
    merges = "No two neighbouring kernels are of a class that compilers merge"
    if chains:
        merges = (
            f"{_count(merged / steps / ranks, 'neighbouring element-wise kernel')} of a step of a rank take "
            f"{format_time(seconds / steps / ranks)} and could be {_count(len(chains) / steps / ranks, 'kernel')}"
        )
    outside, doubt = find_outside(run), ""
    if outside.is_in_doubt and outside.seconds > 0:
        doubt = (
            f"; for {format_time(outside.seconds)} the host is in no operator (Python, allocations), which a step that "
            "runs again may not have, so the least gain is that of operators and launches alone"
        )
    advice = "Use torch.compile."
    if _has_phase(run, "update"):
        advice = "Use torch.compile; of the update, foreach=True or fused=True."
    return [
        _Candidate(
            "graphs",
            "launch steps as CUDA graphs",
            f"In a step of a rank {times}{doubt}.",
            f"{_describe_stops(run)}Capture the step (torch.cuda.graph, or torch.compile with mode='reduce-overhead'); "
            "shapes must not change.",
            launch_graphs,
            order=4,
        ),
        _Candidate(
            "compile",
            "compile the model",
            f"{merges}; {times}.",
            advice,
            merge_kernels,
            order=3,
        ),
    ]


def _describe_stops(run: Run) -> str:
    """What must go before a step can be captured."""
    stops = [number for number in find_stops(run) if run.items[number].step in run.steps]
    if not stops:
        return ""
    callers: dict[str, set[str]] = {}
    for number in stops:
        item = run.items[number]
        callers.setdefault(item.caller or "no operator", set()).add(item.name)
    parts = [f"{' and '.join(sorted(callers[caller]))} in {caller}" for caller in callers]
    calls = _count(max(len(stops) / len(run.steps) / len(run.ranks), 1), "call")
    return (
        f"First remove {calls} ({', '.join(parts)}) in which the host waits for its device inside the step: none can be "
        "captured, and while they stay, graphs between them save the least gain. "
    )


def _has_phase(run: Run, phase: str) -> bool:
    """Whether work of the trace belongs to a phase."""
    return any(item.phase == phase for item in run.items)


def _list_waits(run: Run) -> list[_Candidate]:
    """Waits of the host, by the operator that makes them, and loading."""
    candidates = []
    steps, ranks = len(run.steps), len(run.ranks)
    by_caller: dict[str, list[int]] = {}
    for number, item in enumerate(run.items):
        if item.kind == "block" and any(link.kind == "blocked" for link in run.links[number]):
            if item.name.startswith(("cudaLaunch", "cuLaunch", "hipLaunch")):
                continue  # a full queue: the host is ahead of its device
            by_caller.setdefault(item.caller or item.name, []).append(number)
    for caller, numbers in by_caller.items():
        counted = [number for number in numbers if run.items[number].step in run.steps]
        if not counted:
            continue
        names = sorted({run.items[number].name for number in counted})
        candidates.append(
            _Candidate(
                "waits",
                f"no wait of the host in {caller}",
                f"In {_count(len(counted) / steps / ranks, 'call')} of {' and '.join(names)} from {caller} in a step, the host "
                "waits until its device has done all before.",
                _advise_wait(caller),
                partial(_free, numbers),
                order=5,
            )
        )
    loading = sum(
        item.loading
        for item in run.items
        if item.step in run.steps and item.kind in ("launch", "block")
    )
    if loading > 0:
        candidates.append(
            _Candidate(
                "loading",
                "load data ahead",
                f"The host loads data for {format_time(loading / steps / ranks)} of a step, while it launches nothing.",
                "Give the DataLoader more workers (num_workers, prefetch_factor) and pinned memory.",
                load_ahead,
                order=6,
            )
        )
    return candidates


def _advise_wait(caller: str) -> str:
    """What to do about a wait of the host."""
    if caller in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
        return "Keep the number on the device (no .item(), no if on a tensor), or read it every hundredth step."
    if caller in ("aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda"):
        return "Copy from pinned memory with non_blocking=True, on a stream of its own."
    if caller in ("aten::nonzero", "aten::index", "aten::masked_select", "aten::unique"):
        return "Take an operator whose result has a known size (torch.where, masks)."
    if "Malloc" in caller or "Free" in caller:
        return "Let the allocator keep its memory (expandable_segments:True, no empty_cache())."
    return "Remove the call, or wait for an event of an earlier step."


def _free(numbers: Sequence[int], run: Run, case: Case) -> Run:
    """See `free_host`."""
    return free_host(run, case, numbers)


def _propose_batch(run: Run, groups: Sequence[Collectives]) -> _Candidate:
    """Twice the batch."""
    activations = [
        number for group in groups if group.role == "activations" for number in group.numbers
    ]
    updates = _has_phase(run, "update")
    reduces = any(group.role == "gradients" for group in groups)
    same, advice = "Launches of the host take", "Take a larger batch if memory allows it."
    saved = ""
    if updates and reduces:
        same, saved = (
            "Launches of the host, updates and reduced gradients take",
            "reduction and the update",
        )
    elif updates:
        same, saved = "Launches of the host and updates take", "update"
    elif reduces:
        same, saved = "Launches of the host and reduced gradients take", "reduction"
    if saved:
        advice = (
            "Take a larger batch if memory and convergence allow it; gradient accumulation saves the "
            f"{saved} alone."
        )
    return _Candidate(
        "batch",
        "twice the batch on each rank",
        f"{same} the same time for more samples; the gain is that of the same samples.",
        advice,
        partial(_double, activations),
        order=7,
        batches=2.0,
    )


def _double(activations: Sequence[int], run: Run, case: Case) -> Run:
    """See `double_batch`."""
    return double_batch(run, case, activations)


# -- what the trace cannot tell
# --------------------------------------------------------------------------------------------------


def _sum_unexplained(run: Run) -> float:
    """Delays of an iteration on the stream that computes longest, of the rank that has most [s]."""
    busy: dict[tuple[int, int], float] = {}
    delays: dict[tuple[int, int], float] = {}
    for number, item in enumerate(run.items):
        if item.kind == "work" and item.step in run.steps:
            place = (item.rank, item.stream)
            delays[place] = delays.get(place, 0.0) + run.delays[number]
            if item.role == "compute":
                busy[place] = busy.get(place, 0.0) + run.seconds[number]
    main: dict[int, tuple[int, int]] = {}
    for place in sorted(busy, key=lambda place: busy[place]):
        main[place[0]] = place
    return max((delays[place] for place in main.values()), default=0.0) / len(run.steps)


def _list_notes(trace: Recorded, run: Run, base: float, contention: Contention) -> list[str]:
    """What makes the gains less certain."""
    notes = []
    unexplained = _sum_unexplained(run)
    if unexplained > _NOTED * base:
        notes.append(
            f"for {format_time(unexplained)} of an iteration a device waits for nothing that the trace names; every replay "
            "keeps that time"
        )
    left_out = count_left_out(trace, run)
    if left_out:
        notes.append(
            f"the replay has the first {len(run.steps)} of {_count(len(run.steps) + left_out, 'step')} that it could count; "
            f"more steps would be over {MOST_ITEMS:,} launches, waits and kernels"
        )
    if any(item.is_collective for item in run.items) and not contention.is_measured:
        notes.append(
            f"fewer than {_LEAST_PAIRS} kernels of {format_time(_LEAST_SECONDS)} or more ran both with and without a "
            f"collective beside them; they are taken to lose {contention.low:.0%} to {contention.high:.0%} of their rate, "
            f"most likely {contention.likely:.0%}"
        )
    if contention.highest > _MOST_CONTENTION:
        notes.append(
            f"a quarter of the kernels lost {contention.highest:.0%} of their rate or more beside collectives; the replay "
            f"takes {_MOST_CONTENTION:.0%} at most"
        )
    if run.lead is None:
        notes.append("the trace has one step: how much steps differ is not known")
        begins = list(run.begins.values())
        apart = max(begins) - min(begins)
        if any(item.meets >= 0 for item in run.items) and apart > _NOTED * base:
            notes.append(
                f"ranks begin the recorded step up to {format_time(apart)} apart, and wait for the last one; one step does "
                "not say whether they do so in each, so no change counts it"
            )
    lone = [item for item in run.items if item.is_collective and item.kind == "work"]
    if lone:
        notes.append(
            f"{_count(len(lone), 'collective')} of ranks that were not read with others may hold waits for these; read the "
            "traces of all ranks to see who is late"
        )
    off = base / trace.time - 1
    if abs(off) > _NOTED:
        notes.append(
            f"the replay takes {format_time(base)}, from the begin of a step to the end of its last work; the trace says "
            f"{format_time(trace.time)}"
        )
    return notes
