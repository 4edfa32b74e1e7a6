"""Changes of a recorded run: what each would do to times and links, at worst, most likely and at
best.

Each function makes a changed copy of a `Run`. What a trace does not tell is a field of `Case`, all
of them choices: docs/formulas.md, table 5.3, says what each changes, and on what it was judged.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from perfkit.calibration.replay_run import Item, Link, Run

#: Collectives that carry gradients once the backward pass has them, and weights ahead of it.
_GRADIENTS = ("all_reduce", "reduce_scatter")
#: Classes of kernels that compilers merge.
_MERGED = ("elementwise", "rowwise")
#: Classes of kernels that do most of the work of a pass.
_PRODUCTS = ("gemm", "bmm", "attention", "convolution")
#: Parts into which gradients are cut: PyTorch's DistributedDataParallel takes buckets of 25 MiB
#: (`bucket_cap_mb`) [B]; its first one, of 1 MiB, is not cut off here.
_BUCKET = 25 * 2**20
#: Buckets at least, where their bytes are not known, and at most [-]: choices.
_FEWEST_BUCKETS, _USUAL_BUCKETS, _MOST_BUCKETS = 2, 8, 64
#: Start-up of a collective among the ranks of a node or of a few nodes at most [s]: a choice.
_START_UP = 60e-6
#: Collectives of which more than this share is awaited by products of their own pass carry
#: activations [-]; a lone step whose host is in no operator for more than this share of its time may
#: be no usual one [-]: choices.
_AWAITED, _OUTSIDE = 0.5, 0.5


@dataclass(frozen=True)
class Case:
    """What is assumed where a trace does not tell: the end at which a change brings least, the most
    likely one, or the end at which it brings most.

    Parameters
    ----------
    start_up : float
        Share of the shortest collective of a kind that a faster link does not shorten [-].
    link_left : float
        Share of the rest that it does not shorten either, as protocols and reductions [-].
    growth : float
        How many times longer kernels take with twice the batch [-].
    fixed : float
        Time of a kernel that does not grow with the batch [s].
    host_left : float
        Share of the host's time that graphs of kernels leave [-].
    outside_left : float
        Share of its time in no operator that they leave where that time is in doubt [-].
    keeps_stops : bool
        Whether the host still waits inside a step where it does now, so that graphs are between
        these calls.
    pauses_left : float
        Share of what a host takes beyond the median of the ranks that stays [-].
    compiled_host : float
        Share of the host's time for each kernel that compiled code leaves [-].
    merged : float
        Share of the time of element-wise kernels that compiled code leaves [-].
    hidden : float
        Share of exchanged activations that parts of a batch can hide [-].
    gathers_wait : bool
        Whether a gather of weights waits for the inputs of the one before it; else the link alone
        holds it up.
    needed : str
        What the device needs of that for which its host waited: ``all``, ``copies`` to it, or
        ``nothing``.
    loaded : float
        Share of loading that more workers hide [-].
    late : float
        Share of gradients that are there only at the end of the backward pass, as those of an
        embedding [-].
    hooks : float
        Time that hooks of gradients and copies into buckets take, as a share of what the update
        computes; on the host, as a share of its time in the backward pass [-].
    waits : float
        Share of a lone rank's collective beyond the shortest alike that is a wait for others [-].
    """

    start_up: float
    link_left: float
    growth: float
    fixed: float
    host_left: float
    outside_left: float
    keeps_stops: bool
    pauses_left: float
    compiled_host: float
    merged: float
    hidden: float
    gathers_wait: bool
    needed: Literal["all", "copies", "nothing"]
    loaded: float
    late: float
    hooks: float
    waits: float


LEAST = Case(
    start_up=1.0,
    link_left=0.25,
    growth=2.2,
    fixed=0.0,
    host_left=0.15,
    outside_left=1.0,
    keeps_stops=True,
    pauses_left=0.5,
    compiled_host=0.75,
    merged=1.0,
    hidden=0.0,
    gathers_wait=True,
    needed="all",
    loaded=0.5,
    late=0.5,
    hooks=0.3,
    waits=1.0,
)
LIKELY = Case(
    start_up=0.8,
    link_left=0.05,
    growth=1.85,
    fixed=2e-6,
    host_left=0.05,
    outside_left=0.0,
    keeps_stops=False,
    pauses_left=0.0,
    compiled_host=0.55,
    merged=0.6,
    hidden=0.4,
    gathers_wait=True,
    needed="copies",
    loaded=1.0,
    late=0.2,
    hooks=0.15,
    waits=0.5,
)
MOST = Case(
    start_up=0.0,
    link_left=0.0,
    growth=1.4,
    fixed=6e-6,
    host_left=0.0,
    outside_left=0.0,
    keeps_stops=False,
    pauses_left=0.0,
    compiled_host=0.35,
    merged=0.3,
    hidden=1.0,
    gathers_wait=False,
    needed="nothing",
    loaded=1.0,
    late=0.0,
    hooks=0.0,
    waits=0.0,
)

#: A change of a run in a case.
Apply = Callable[[Run, Case], Run]


class Collectives(NamedTuple):
    """Collectives of one operation and phase.

    Parameters
    ----------
    operation, phase : str
        Of all of them.
    numbers : list of int
        Their items.
    role : str
        ``gradients``, ``weights`` or ``activations``: what they carry.
    """

    operation: str
    phase: str
    numbers: list[int]
    role: str


def group_collectives(run: Run) -> list[Collectives]:
    """Group the collectives of a run by operation and phase, and say what each group carries.

    Parameters
    ----------
    run : Run
        Recorded.

    Returns
    -------
    groups : list of Collectives
        Those with the most time come first.

    Notes
    -----
    Weights are gathered. What the backward pass or the update reduces are gradients, unless the
    backward pass itself waits for it: tensor-parallel layers pass gradients of activations on.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for number, item in enumerate(run.items):
        if item.is_collective:
            groups.setdefault((item.name, item.phase), []).append(number)
    gathers_weights = any(name == "all_gather" for name, _ in groups)
    awaited = _find_awaited_by_passes(run)
    found = []
    for (name, phase), numbers in groups.items():
        is_late = phase in ("backward", "update", "")
        is_awaited = sum(number in awaited for number in numbers) > _AWAITED * len(numbers)
        role = "activations"
        if (
            name == "all_gather"
            and phase != "update"
            and any(n == "reduce_scatter" for n, _ in groups)
        ):
            role = "weights"
        elif (name == "all_reduce" and is_late and not is_awaited) or (
            name == "reduce_scatter" and is_late and gathers_weights
        ):
            role = "gradients"
        found.append(Collectives(name, phase, numbers, role))
    return sorted(found, key=lambda group: -sum(run.seconds[number] for number in group.numbers))


def _find_awaited_by_passes(run: Run) -> set[int]:
    """Collectives for which work of the forward or backward pass waited that products of the same
    pass follow, so that these need them."""
    last_product: dict[tuple[int, int, str], float] = {}
    for item in run.items:
        if item.work in _PRODUCTS:
            place = (item.rank, item.step, item.phase)
            last_product[place] = max(last_product.get(place, -math.inf), item.begin)
    awaited = set()
    for number, links in enumerate(run.links):
        item = run.items[number]
        if item.role != "compute" or item.phase not in ("forward", "backward"):
            continue
        last = last_product.get((item.rank, item.step, item.phase), -math.inf)
        for link in links:
            if link.kind == "wait" and item.begin <= last:
                awaited.add(link.item)
    return awaited


# -- links
# --------------------------------------------------------------------------------------------------


def speed_up(run: Run, case: Case, numbers: Iterable[int], factor: float = 2.0) -> Run:
    """Transfers over a link that is so many times faster; start-ups stay."""
    changed = run.copy()
    shortest: dict[tuple[str, int], float] = {}
    for number, item in enumerate(run.items):
        if item.is_collective and run.seconds[number] > 0:
            alike = (item.name, item.ranks)
            shortest[alike] = min(shortest.get(alike, math.inf), run.seconds[number])
    for number in numbers:
        item, seconds = run.items[number], run.seconds[number]
        waited = 0.0
        if item.kind == "work":
            waited = case.waits * (seconds - min(item.transfer, seconds))
        start_up = case.start_up * min(shortest.get((item.name, item.ranks), 0.0), _START_UP)
        moved = max(seconds - waited - start_up, 0.0)
        changed.seconds[number] = seconds - moved * (1.0 - case.link_left) * (1.0 - 1.0 / factor)
    return changed


# -- overlap
# --------------------------------------------------------------------------------------------------


def overlap_gradients(run: Run, case: Case, numbers: Sequence[int]) -> Run:
    """Reduce gradients in buckets while the backward pass computes the next ones."""
    changed = run.copy()
    by_step: dict[tuple[int, str, int], list[int]] = {}
    for number in numbers:
        item = run.items[number]
        rank = item.rank if item.kind == "work" else -1
        by_step.setdefault((item.step, item.group, rank), []).append(number)
    for (step, _, _), of_step in by_step.items():
        _cut_into_buckets(run, changed, case, step, of_step)
    _drop_possible_waits(run, changed, numbers)
    if case.hooks > 0:
        _scale_host(changed, 1.0 + case.hooks, phases=("backward",))
        _add_copies(run, changed, case)
    return changed


def _add_copies(run: Run, changed: Run, case: Case) -> None:
    """Make the backward pass of each step longer by what hooks and copies take."""
    updates: dict[tuple[int, int], float] = {}
    passes: dict[tuple[int, int], float] = {}
    for number, item in enumerate(run.items):
        if item.role == "compute" and item.phase in ("update", "backward"):
            sums = updates if item.phase == "update" else passes
            place = (item.rank, item.step)
            sums[place] = sums.get(place, 0.0) + run.seconds[number]
    for number, item in enumerate(run.items):
        place = (item.rank, item.step)
        if item.role == "compute" and item.phase == "backward" and passes[place] > 0:
            longer = case.hooks * updates.get(place, 0.0) / passes[place]
            changed.seconds[number] = run.seconds[number] * (1.0 + longer)


def _drop_possible_waits(run: Run, changed: Run, numbers: Sequence[int]) -> None:
    """Take away waits for collectives that the trace does not show."""
    moved = set(numbers)
    for number, links in enumerate(run.links):
        if any(link.kind == "maybe" and link.item in moved for link in links):
            changed.links[number] = [
                link
                for link in changed.links[number]
                if link.kind != "maybe" or link.item not in moved
            ]


def _cut_into_buckets(
    run: Run, changed: Run, case: Case, step: int, numbers: Sequence[int]
) -> None:
    """Replace the collectives of a step by buckets that are ready one after another."""
    items = run.items
    arrivals = {
        items[link.item].rank
        for number in numbers
        for link in run.links[number]
        if link.kind == "meet"
    }
    ranks = sorted(arrivals) or [items[numbers[0]].rank]
    last = min(items[number].end for number in numbers)
    computed: dict[int, list[int]] = {}
    for rank in ranks:
        computed[rank] = [
            number
            for number, item in enumerate(items)
            if item.rank == rank
            and item.step == step
            and item.role == "compute"
            and item.phase == "backward"
            and item.begin < last
        ]
        if not computed[rank]:
            return
    nbytes = sum(items[number].nbytes for number in numbers)
    count = math.ceil(nbytes / _BUCKET) if nbytes else _USUAL_BUCKETS
    count = min(max(count, _FEWEST_BUCKETS), _MOST_BUCKETS)
    count = max(count, len(numbers))
    seconds = sum(run.seconds[number] for number in numbers)
    before: int | None = None
    for bucket in range(count):
        share = min((bucket + 1) / count / max(1.0 - case.late, 1e-9), 1.0)
        links = []
        for rank in ranks:
            works = computed[rank]
            done = np.cumsum([run.seconds[number] for number in works])
            place = int(np.searchsorted(done, share * done[-1] * (1 - 1e-9)))
            links.append(Link(works[min(place, len(works) - 1)], 0.0, "meet"))
        if before is not None:
            links.append(Link(before, 0.0, "stream"))
        like = items[numbers[0]]
        begin = max(changed.items[link.item].begin for link in links)
        item = Item(
            "meeting",
            like.rank,
            step,
            begin,
            begin,
            like.name,
            work="collective",
            role="communication",
            phase=like.phase,
            group=like.group,
            ranks=like.ranks,
        )
        before = changed.add(item, seconds / count, links)
    for number in numbers:
        changed.seconds[number] = 0.0
        if before is not None:
            changed.links[number] = [*changed.links[number], Link(before, 0.0, "stream")]


def prefetch_weights(
    run: Run, case: Case, gathers: Sequence[int], reductions: Sequence[int]
) -> Run:
    """Gather weights while the layer before computes, and let nothing but the update wait for
    reduced gradients."""
    changed = run.copy()
    items = run.items
    arrivals: dict[int, list[int]] = {}
    for number in gathers:
        of_number = [link.item for link in run.links[number] if link.kind == "meet"] or [number]
        for arrival in of_number:
            arrivals.setdefault(items[arrival].rank, []).append(arrival)
    for of_rank in arrivals.values():
        of_rank.sort(key=lambda number: items[number].begin)
        for place, number in enumerate(of_rank):
            previous = of_rank[max(place - 1, 0)]
            kept = [link for link in run.links[number] if link.kind == "stream"]
            if place and case.gathers_wait:
                kept += [link for link in run.links[previous] if link.kind in ("input", "launch")]
            elif not place:
                kept = run.links[number]
            changed.links[number] = list(kept)
            changed.delays[number] = 0.0
    ends = set(reductions)
    for number, links in enumerate(run.links):
        if items[number].role == "compute" and items[number].phase != "update":
            kept = [link for link in links if not (link.kind == "wait" and link.item in ends)]
            if len(kept) < len(links):
                changed.links[number] = kept
    _let_updates_wait(run, changed, reductions)
    changed.order = None
    return changed


def _let_updates_wait(run: Run, changed: Run, numbers: Sequence[int]) -> None:
    """The first work of each update comes after the last of some collectives."""
    items = run.items
    last: dict[int, int] = {}
    for number in numbers:
        step = items[number].step
        if step not in last or items[number].begin > items[last[step]].begin:
            last[step] = number
    seen: set[tuple[int, int]] = set()
    for number, item in enumerate(items):
        place = (item.rank, item.step)
        if item.phase == "update" and item.role == "compute" and place not in seen:
            if item.step in last and item.begin < items[last[item.step]].begin:
                continue
            seen.add(place)
            if item.step in last:
                link = Link(last[item.step], 0.0, "wait")
                changed.links[number] = [*changed.links[number], link]


def split_exchanges(run: Run, case: Case, numbers: Sequence[int]) -> Run:
    """Hide a part of exchanged activations behind the computation of another part of the batch."""
    changed = run.copy()
    for number in numbers:
        changed.seconds[number] = run.seconds[number] * (1.0 - case.hidden)
    return changed


# -- ranks
# --------------------------------------------------------------------------------------------------


class Straggler(NamedTuple):
    """A rank for which others wait.

    Parameters
    ----------
    rank : int
        Which [-].
    late : float
        How much later than the median of the ranks it came to collectives, per step [s].
    meetings : int
        Collectives per step to which it came last [-].
    slower : float
        How many times longer its computation takes than the median of the other ranks [-].
    host_slower : float
        The same of the time of its host [-].
    alike : bool
        Whether all ranks run the same kernels, so that one is slow; otherwise work is shared
        unevenly.
    """

    rank: int
    late: float
    meetings: int
    slower: float
    host_slower: float
    alike: bool


def find_straggler(run: Run) -> Straggler | None:
    """Find the rank for which the others wait longest.

    Parameters
    ----------
    run : Run
        Recorded.

    Returns
    -------
    straggler : Straggler or None
        None where no two ranks meet.
    """
    items, steps = run.items, len(run.steps)
    late: dict[int, float] = {}
    count: dict[int, int] = {}
    for number, item in enumerate(items):
        if item.kind != "meeting" or item.step not in run.steps:
            continue
        begins = {
            items[link.item].rank: items[link.item].begin
            for link in run.links[number]
            if link.kind == "meet"
        }
        if len(begins) < 2:
            continue
        last = max(begins, key=lambda rank: begins[rank])
        others = [begin for rank, begin in begins.items() if rank != last]
        late[last] = late.get(last, 0.0) + begins[last] - float(np.median(others))
        count[last] = count.get(last, 0) + 1
    if not late:
        return None
    busy, hosts, names = _sum_by_rank(run)
    rank = max(late, key=lambda rank: late[rank])
    other_ranks = [other for other in run.ranks if other != rank]
    usual = float(np.median([busy[other] for other in other_ranks]))
    usual_host = float(np.median([hosts[other] for other in other_ranks]))
    return Straggler(
        rank=rank,
        late=late[rank] / steps,
        meetings=round(count[rank] / steps),
        slower=busy[rank] / usual if usual > 0 else 1.0,
        host_slower=hosts[rank] / usual_host if usual_host > 0 else 1.0,
        alike=all(names[other] == names[rank] for other in other_ranks),
    )


def _sum_by_rank(run: Run) -> tuple[dict[int, float], dict[int, float], dict[int, Counter[str]]]:
    """Time of computation and of the host of each rank, and the kernels that it runs."""
    busy, hosts = dict.fromkeys(run.ranks, 0.0), dict.fromkeys(run.ranks, 0.0)
    names: dict[int, Counter[str]] = {rank: Counter() for rank in run.ranks}
    for number, item in enumerate(run.items):
        if item.step not in run.steps:
            continue
        if item.role == "compute":
            busy[item.rank] += run.seconds[number]
            names[item.rank][item.kernel.split(" [")[0]] += 1
        elif item.kind in ("launch", "block"):
            hosts[item.rank] += sum(link.lag for link in run.links[number] if link.kind == "host")
    return busy, hosts, names


def balance_rank(run: Run, case: Case, straggler: Straggler) -> Run:
    """A slow rank becomes as fast as the median of the others; or the work of each class of kernels
    is shared evenly, if ranks run different kernels."""
    del case
    changed = run.copy()
    if straggler.alike:
        _copy_times(run, changed, straggler)
        return changed
    sums: dict[tuple[int, str, str], float] = {}
    for number, item in enumerate(run.items):
        if item.role == "compute":
            place = (item.rank, item.phase, item.work)
            sums[place] = sums.get(place, 0.0) + run.seconds[number]
    even: dict[tuple[str, str], float] = {}
    for (_, phase, work), seconds in sums.items():
        even[phase, work] = even.get((phase, work), 0.0) + seconds / len(run.ranks)
    for number, item in enumerate(run.items):
        if item.role == "compute":
            own = sums[item.rank, item.phase, item.work]
            if own > 0:
                changed.seconds[number] *= even[item.phase, item.work] / own
    return changed


def _copy_times(run: Run, changed: Run, straggler: Straggler) -> None:
    """Give all kernels of a rank the median times of the same kernels on other ranks if it is slower
    in sum (noise of single kernels is not the rank's), and its host the median pace if that is
    shorter."""
    works: dict[int, list[int]] = {rank: [] for rank in run.ranks}
    for number, item in enumerate(run.items):
        if item.role == "compute":
            works[item.rank].append(number)
    own = works.pop(straggler.rank)
    others = [numbers for numbers in works.values() if len(numbers) == len(own)]
    if others and straggler.slower > 1.0:
        usual = np.median(
            [[run.seconds[number] for number in numbers] for numbers in others], axis=0
        )
        for number, seconds in zip(own, usual.tolist(), strict=True):
            changed.seconds[number] = seconds
    if straggler.host_slower > 1.0:
        _scale_host(changed, 1.0 / straggler.host_slower, rank=straggler.rank)


class Pauses(NamedTuple):
    """Times in which the host of one rank is slower than those of others at the same place.

    Parameters
    ----------
    launches : dict of int to float
        By item of a host, its time where it is the median of the ranks, if that is less [s].
    seconds : float
        What the hosts take longer, per step, mean over ranks [s].
    longest : float
        The longest of these times [s].
    rank : int
        The rank of it [-].
    """

    launches: dict[int, float]
    seconds: float
    longest: float
    rank: int


def find_pauses(run: Run) -> Pauses | None:
    """Find where hosts pause that make the same calls in the same order.

    Parameters
    ----------
    run : Run
        Recorded.

    Returns
    -------
    pauses : Pauses or None
        None for fewer than three ranks, and for hosts whose calls differ.
    """
    calls: dict[int, list[int]] = {rank: [] for rank in run.ranks}
    for number, item in enumerate(run.items):
        if item.kind == "launch":
            calls[item.rank].append(number)
    names = {
        rank: [run.items[number].name for number in numbers] for rank, numbers in calls.items()
    }
    first = names[run.ranks[0]]
    if len(run.ranks) < _FEWEST_HOSTS or any(names[rank] != first for rank in run.ranks):
        return None
    lags = np.array([[_find_own(run, number) for number in calls[rank]] for rank in run.ranks])
    usual = np.median(lags, axis=0)
    launches: dict[int, float] = {}
    seconds, longest, slowest = 0.0, 0.0, run.ranks[0]
    for row, rank in enumerate(run.ranks):
        for place, number in enumerate(calls[rank]):
            longer = float(lags[row, place] - usual[place])
            if longer <= 0:
                continue
            launches[number] = float(usual[place])
            if run.items[number].step in run.steps:
                seconds += longer / len(run.steps) / len(run.ranks)
            if longer > longest:
                longest, slowest = longer, rank
    return Pauses(launches, seconds, longest, slowest)


#: Fewest ranks whose median says what is usual [-].
_FEWEST_HOSTS = 3


def _find_own(run: Run, number: int) -> float:
    """The host's own time before a call [s]."""
    return sum(link.lag for link in run.links[number] if link.kind == "host")


def even_hosts(run: Run, case: Case, pauses: Pauses) -> Run:
    """Hosts that pause take what the median of the ranks takes at that place, and a share of what
    they take beyond it."""
    changed = run.copy()
    for number, usual in pauses.launches.items():
        changed.links[number] = [
            link._replace(lag=usual + case.pauses_left * max(link.lag - usual, 0.0))
            if link.kind == "host"
            else link
            for link in run.links[number]
        ]
    return changed


# -- the host
# --------------------------------------------------------------------------------------------------


def _scale_host(
    changed: Run, factor: float, *, rank: int | None = None, phases: Sequence[str] | None = None
) -> None:
    """Make the host's own time shorter, but for loading."""
    phase_of = _find_phases(changed) if phases is not None else {}
    for number, item in enumerate(changed.items):
        if item.kind not in ("launch", "block") or (rank is not None and item.rank != rank):
            continue
        if phases is not None and phase_of.get(number, "") not in phases:
            continue
        changed.links[number] = [
            link._replace(lag=item.loading + factor * max(link.lag - item.loading, 0.0))
            if link.kind == "host"
            else link
            for link in changed.links[number]
        ]


def _find_phases(run: Run) -> dict[int, str]:
    """Phase of each launch, from the work that it launches."""
    phases = {}
    for number, item in enumerate(run.items):
        for link in run.links[number]:
            if link.kind == "launch":
                phases[link.item] = item.phase
    return phases


class Outside(NamedTuple):
    """Time of the host in no operator.

    Parameters
    ----------
    seconds : float
        In a step of a rank [s].
    is_in_doubt : bool
        Whether a step that runs again and again may not have it: it is most of the host's time, or
        the step is the only one and unmarked, so that it may be the first.
    """

    seconds: float
    is_in_doubt: bool


def find_outside(run: Run) -> Outside:
    """Find how long the host is in no operator, and whether that is launch cost.

    Parameters
    ----------
    run : Run
        Recorded.

    Returns
    -------
    outside : Outside
        Of the steps that count.
    """
    outside, whole = 0.0, 0.0
    for number, item in enumerate(run.items):
        if item.kind in ("launch", "block") and item.step in run.steps:
            own = max(_find_own(run, number) - item.loading, 0.0)
            outside += min(item.outside, own)
            whole += own
    is_unmarked = run.lead is None and run.steps == (-1,)
    is_mostly_outside = len(run.steps) == 1 and outside > _OUTSIDE * whole
    per_step = outside / len(run.steps) / max(len(run.ranks), 1)
    return Outside(per_step, is_unmarked or is_mostly_outside)


def find_stops(run: Run) -> list[int]:
    """Find calls inside a step in which the host waits for its device, so that no graph holds what
    is before and after them.

    Parameters
    ----------
    run : Run
        Recorded.

    Returns
    -------
    stops : list of int
        Items, in the order of the host [-].
    """
    last: dict[tuple[int, int], int] = {}
    for number, item in enumerate(run.items):
        if item.kind == "launch":
            last[item.rank, item.step] = number
    stops: list[int] = []
    launched: set[tuple[int, int]] = set()
    for number, item in enumerate(run.items):
        place = (item.rank, item.step)
        if item.kind == "launch":
            launched.add(place)
        waits = any(link.kind == "blocked" for link in run.links[number])
        is_full = item.name.startswith(("cudaLaunch", "cuLaunch", "hipLaunch"))
        is_inside = place in launched and number < last.get(place, -1)
        if item.kind == "block" and waits and not is_full and is_inside:
            stops.append(number)
    return stops


def launch_graphs(run: Run, case: Case) -> Run:
    """Launch all kernels of a step at once; time of the host in no operator may stay. Where the host
    keeps its waits inside the step, graphs are between these calls, which stay as they are."""
    changed = run.copy()
    stops = set(find_stops(run)) if case.keeps_stops else set()
    after: dict[tuple[int, int], int] = {}  # waits so far, of a step of a rank
    outside_left = case.outside_left if find_outside(run).is_in_doubt else 0.0
    sums: dict[tuple[int, int, int], float] = {}
    first: dict[tuple[int, int, int], int] = {}
    for number, item in enumerate(run.items):
        if number in stops:
            after[item.rank, item.step] = after.get((item.rank, item.step), 0) + 1
        elif item.kind in ("launch", "block"):
            place = (item.rank, item.step, after.get((item.rank, item.step), 0))
            own = max(_find_own(run, number) - item.loading, 0.0)
            stays = min(outside_left * item.outside, own)
            changed.links[number] = [
                link._replace(lag=min(link.lag, item.loading + stays))
                if link.kind == "host"
                else link
                for link in run.links[number]
            ]
            sums[place] = sums.get(place, 0.0) + own - stays
            first.setdefault(place, number)
    for place, number in first.items():
        changed.links[number] = [
            link._replace(lag=link.lag + case.host_left * sums[place])
            if link.kind == "host"
            else link
            for link in changed.links[number]
        ]
    return changed


def merge_kernels(run: Run, case: Case) -> Run:
    """Merge neighbouring element-wise kernels of the forward and backward pass, as compilers do;
    the host launches fewer of them, and calls less of the framework for each."""
    changed = run.copy()
    launches = {
        number: link.item
        for number, links in enumerate(run.links)
        for link in links
        if link.kind == "launch"
    }
    _scale_host(changed, case.compiled_host, phases=("forward", "backward"))
    for number, item in enumerate(run.items):
        if is_merged(item):
            changed.seconds[number] = case.merged * run.seconds[number]
    for chain in list_chains(run):
        for number in chain[1:]:
            _drop_launch(changed, launches.get(number), case)
    return changed


def is_merged(item: Item) -> bool:
    """Whether a compiler may merge a kernel with others."""
    passes = ("forward", "backward")
    return item.kind == "work" and item.work in _MERGED and item.phase in passes


def _drop_launch(changed: Run, launch: int | None, case: Case) -> None:
    """Take away the host's time for a launch that is no more."""
    if launch is None:
        return
    loading = changed.items[launch].loading
    changed.links[launch] = [
        link._replace(lag=loading + case.merged * max(link.lag - loading, 0.0))
        if link.kind == "host"
        else link
        for link in changed.links[launch]
    ]


def list_chains(run: Run) -> list[list[int]]:
    """List neighbouring kernels of the forward and backward pass that a compiler may merge.

    Parameters
    ----------
    run : Run
        Recorded.

    Returns
    -------
    chains : list of list of int
        Items of each, two or more [-].
    """
    chains: list[list[int]] = []
    open_chain: dict[int, list[int]] = {}
    for number, item in enumerate(run.items):
        if item.kind != "work" or item.role == "communication":
            continue
        merges = is_merged(item)
        current = open_chain.get(item.rank, [])
        if merges and current and run.items[current[-1]].phase == item.phase:
            current.append(number)
            continue
        if len(current) > 1:
            chains.append(current)
        open_chain[item.rank] = [number] if merges else []
    chains += [chain for chain in open_chain.values() if len(chain) > 1]
    return chains


def free_host(run: Run, case: Case, numbers: Iterable[int]) -> Run:
    """Let the host go on where it waited for its device. What it waited for may be what the next
    work of another stream needs, which then waits in its place."""
    changed = run.copy()
    freed = set(numbers)
    works: dict[int, list[int]] = {}
    for number, links in enumerate(run.links):
        for link in links:
            if link.kind == "launch":
                works.setdefault(link.item, []).append(number)
    needed: dict[int, list[int]] = {}  # by rank, what the next work may need
    for number, item in enumerate(run.items):
        if number in freed:
            awaited = [link.item for link in run.links[number] if link.kind == "blocked"]
            needed.setdefault(item.rank, []).extend(
                work for work in awaited if _may_be_needed(run.items[work], case)
            )
            changed.links[number] = _drop_block(run.links[number])
        elif item.kind == "launch" and needed.get(item.rank):
            for work in works.get(number, [])[:1]:
                others = [
                    before
                    for before in needed[item.rank]
                    if run.items[before].stream != run.items[work].stream
                ]
                if others:
                    needed[item.rank] = []
                    links = [Link(before, 0.0, "wait") for before in others]
                    changed.links[work] = [*changed.links[work], *links]
    return changed


def _may_be_needed(awaited: Item, case: Case) -> bool:
    """Whether the device may need what the host waited for: copies to it, and at worst kernels, but
    not what the host reads."""
    if case.needed == "nothing" or "DtoH" in awaited.kernel:
        return False
    return awaited.role == "copies" or case.needed == "all"


def _drop_block(links: Sequence[Link]) -> list[Link]:
    """Links of a call that no longer waits for its device."""
    residual = max((link.lag for link in links if link.kind == "blocked"), default=0.0)
    kept = []
    for link in links:
        if link.kind == "host":
            kept.append(link._replace(lag=max(link.lag - residual, 0.0)))
        elif link.kind != "blocked":
            kept.append(link)
    return kept


def load_ahead(run: Run, case: Case) -> Run:
    """Load data while the step before runs."""
    changed = run.copy()
    for number, item in enumerate(run.items):
        if item.loading > 0:
            changed.links[number] = [
                link._replace(lag=max(link.lag - case.loaded * item.loading, 0.0))
                if link.kind == "host"
                else link
                for link in run.links[number]
            ]
    return changed


# -- the batch
# --------------------------------------------------------------------------------------------------


def _grows(item: Item) -> bool:
    """Whether a kernel computes for samples: updates of weights do not, those of looked-up rows
    do."""
    return item.phase != "update" or item.work.startswith("embedding")


def double_batch(run: Run, case: Case, activations: Iterable[int]) -> Run:
    """Twice the batch on each rank: kernels of the passes grow, and so do exchanged activations;
    hosts, updates, gradients and weights do not."""
    changed = run.copy()
    exchanged = set(activations)
    for number, item in enumerate(run.items):
        seconds = run.seconds[number]
        if number in exchanged:
            start_up = case.start_up * min(_START_UP, seconds)
            changed.seconds[number] = 2.0 * seconds - start_up
        elif item.role == "copies" or (item.role == "compute" and _grows(item)):
            fixed = min(case.fixed, seconds)
            changed.seconds[number] = fixed + case.growth * (seconds - fixed)
        if item.loading > 0:
            changed.links[number] = [
                link._replace(lag=link.lag + item.loading) if link.kind == "host" else link
                for link in changed.links[number]
            ]
    return changed
