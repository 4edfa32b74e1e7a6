"""Lookups of tables in device memory, as others measured them: each source is predicted with what the
others give, or half of the configurations with the other half.

    python -m benchmarks.lookups

Rows of device memory of a shared table of published times. Three kernels: PyTorch's bag before and
after a change of its kernel, FBGEMM's, and hash tables (dynamicemb and HugeCTR), which search a row
before they read it. Constants are those of one multiprocessor, so that a kernel of one GPU says
something of others. Where it is not stated how hot hot rows are, the time must lie between that with
all rows in L2 and that with none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import ERROR_COLUMNS
from benchmarks.helpers.table_times import list_optimizers, read_table_times
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.checks import summarize_errors
from perfkit.fitting import LookupRoofline
from perfkit.models.distributions import Zipf, unique_rows
from perfkit.models.embedding import WARP
from perfkit.models.roofline import round_up, smooth_maximum
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.file import list_gallery
from perfkit.platform.lookup_kernels import BAG, OVERLAPPED
from perfkit.platform.platform import Platform
from perfkit.platform.single_kernels import time_tables
from perfkit.workloads.layers import exact_traffic
from perfkit.workloads.tables import EmbeddingTable


class Card(NamedTuple):
    """A GPU of the published times.

    Parameters
    ----------
    name : str
        Its name.
    platform : str
        A platform of such GPUs.
    multiprocessors : float
        Its multiprocessors [-].
    """

    name: str
    platform: str
    multiprocessors: float


#: The H20 is an H100 with fewer multiprocessors and more memory bandwidth (78, 4.0 TB/s:
#: https://zangshuxian.com/new/674733024499207168).
_CARDS = (
    Card("H100", "h100-sxm-8", 132.0),
    Card("H20", "h100-sxm-8", 78.0),
    Card("A100", "a100-sxm-8", 108.0),
    Card("MI350X", "mi355x", 256.0),
)
_H20 = {"peak": 78 / 132, "memory": 4.0 / 3.35}
#: Tables that take turns in the logs of the A100, and distinct rows of the first batch of their
#: traces, which say the exponent of a Zipf law [-].
_TABLES_OF_LOG = 12
_DISTINCT = {"medium reuse": 79_867, "low reuse": 202_853}
_ASSUMED = "embedding_forward"
_CAUSES = {
    (
        "FBGEMM",
        "pytorch/FBGEMM",
    ): "a wave of 64 lanes a row of 8 numbers: bound by waves, and the only row",
    (
        "hash",
        "NVIDIA-Merlin",
    ): "other software: cuCollections adds to rows without sorting, faster than it looks them up",
}


@dataclass(frozen=True)
class Case:
    """A published time.

    Parameters
    ----------
    number, kernel, source : str
        Its row, ``old bag``, ``new bag``, ``FBGEMM`` or ``hash``, and where from.
    card : Card
        The GPU.
    table : EmbeddingTable
        Table, with the law of its lookups; uniform where that is not known.
    tables, bags : int
        Tables that take turns, and bags of a table [-].
    direction, optimizer : str
        ``forward`` or ``backward``, and what updates rows.
    release, mode : str
        Of a hash table of dynamicemb; ``evaluation``, ``training`` or ``backward``. Of others, the
        release is empty and the mode is the direction.
    half : str
        Optimizer of the hash table, by which configurations are halved.
    is_known : bool
        Whether it is stated how often rows are looked up.
    measured : float
        Time [s].
    """

    number: str
    kernel: str
    source: str
    card: Card
    table: EmbeddingTable
    tables: int
    bags: int
    direction: str
    optimizer: str
    release: str
    mode: str
    half: str
    is_known: bool
    measured: float

    @property
    def lookups(self) -> float:
        """Lookups of a table [-]."""
        return float(self.bags * self.table.pooling)

    @property
    def group(self) -> tuple[str, str]:
        """What one kernel is timed in: release and mode."""
        return (self.release, self.mode)


@cache
def _load(card: Card) -> Platform:
    """A platform of one card."""
    if card.platform not in list_gallery():
        return pk.Platform.from_datasheet(card.platform)
    platform = pk.load_platform(card.platform)
    if card.name == "H20":
        return platform.with_scale(**_H20)
    return platform


@cache
def find_exponent(rows: int, lookups: float, distinct: float) -> float:
    """Exponent of the Zipf law of which so many lookups reach so many distinct rows [-]."""
    low, high = 0.0, 3.0
    for _ in range(30):
        middle = (low + high) / 2
        if float(unique_rows(Zipf(rows, middle), lookups)) > distinct:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def count_distinct(rows: int, lookups: float) -> float:
    """Distinct rows of lookups whose density is x^-1.05 on [1, rows), cut to whole numbers [-]."""
    ends = np.arange(1, rows + 1, dtype=float) ** -0.05
    chances = (ends[:-1] - ends[1:]) / (ends[0] - ends[-1])
    return float(-np.expm1(lookups * np.log1p(-chances)).sum())


def _find_law(row: Mapping[str, str]) -> Any:
    """Law of the lookups of a published row; None where it is uniform, or not stated."""
    rows, lookups = int(row["rows"]), float(row["pooling"]) * float(row["batch"])
    if row["alpha"] == "1.05":
        return Zipf(rows, 1.05, shift=0.5)
    for words, distinct in _DISTINCT.items():
        if words in row["remarks"]:
            return Zipf(rows, find_exponent(rows, lookups, distinct))
    return None


def _find_kernel(row: Mapping[str, str]) -> str:
    """The kernel of a published row."""
    if "hash table" in row["remarks"]:
        return "hash"
    if "EmbeddingBag" not in row["remarks"]:
        return "FBGEMM"
    return "new bag" if "with this change" in row["remarks"] else "old bag"


def _find_card(device: str) -> Card:
    """The card of a published row."""
    [card] = [card for card in _CARDS if card.name in device]
    return card


def _find_release(row: Mapping[str, str]) -> str:
    """Release of a hash table of dynamicemb; empty for others."""
    if "dynamicemb" not in row["remarks"]:
        return ""
    version = "version 1" if "version 1" in row["remarks"] else "version 2"
    return f"{row['date'][:7]} {version}"


def _find_mode(row: Mapping[str, str]) -> str:
    """Whether a hash table of dynamicemb is evaluated or trained; the direction of others."""
    if "dynamicemb" not in row["remarks"] or row["direction"] == "backward":
        return row["direction"]
    return "evaluation" if "eval mode" in row["remarks"] else "training"


def _read_case(row: Mapping[str, str], half: str) -> Case:
    """A published time."""
    kernel = _find_kernel(row)
    law = _find_law(row)
    table = EmbeddingTable(
        int(row["rows"]), int(row["dim"]), float(row["pooling"]), law=law, name=row["id"]
    )
    tables = 1
    if "12 tables" in row["remarks"]:
        tables = _TABLES_OF_LOG
    optimizer = "sgd"
    if row["optimizer"] == "adam":
        optimizer = "adam"
    return Case(
        number=row["id"],
        kernel=kernel,
        source=row["source"].split()[0],
        card=_find_card(row["device"]),
        table=table,
        tables=tables,
        bags=int(row["batch"]),
        direction=row["direction"],
        optimizer=optimizer,
        release=_find_release(row),
        mode=_find_mode(row),
        half=half,
        is_known=row["alpha"] != "" or law is not None or kernel == "FBGEMM",
        measured=1e-6 * float(row["time_us"]),
    )


def read_cases() -> list[Case]:
    """All published times of device memory."""
    rows = [row for row in read_table_times() if row["placement"] == "device"]
    halves = list_optimizers(rows)
    return [_read_case(row, half) for row, half in zip(rows, halves, strict=True)]


class Work(NamedTuple):
    """What a kernel does.

    Parameters
    ----------
    waiting : float
        Lookups of a multiprocessor, times the numbers of a row in whole warps for a bag [-].
    moving : float
        Time of its bytes alone [s].
    hits : float
        Share of its rows that L2 has [-].
    """

    waiting: float
    moving: float
    hits: float


@cache
def size(case: Case) -> Work:
    """What the kernel of a case does, with bytes at the share of the bandwidth that is assumed."""
    platform, table = _load(case.card), case.table
    share = platform.kernels[_ASSUMED]["memory_efficiency"]
    waiting = case.lookups / case.card.multiprocessors
    if case.kernel.endswith("bag"):
        waiting *= float(round_up(table.dim, WARP))
    if case.direction == "backward":
        nbytes = float(exact_traffic(table, case.bags, case.optimizer))
        nbytes += case.bags * (table.dim * table.itemsize + 8) + 8 * case.lookups
        return Work(waiting, nbytes / (share * platform.device.main_bandwidth), 0.0)
    nothing = {"launch": 0.0, "per_lookup": 0.0, "per_number": 0.0, "hit": 1.0, "sharpness": 1.0}
    bare = LookupRoofline.build({**nothing, "memory_efficiency": share}, source="bytes alone")
    alone = replace(platform, kernels={**platform.kernels, f"{_ASSUMED}.bare": bare})
    times = time_tables(alone, [table] * case.tables, batch=case.bags, variant="bare")
    return Work(waiting, float(times.seconds[0]), float(times.l2_hits[0]))


@dataclass(frozen=True)
class Constants:
    """What was fitted.

    Parameters
    ----------
    launch, each : float
        Time without lookups, and of what a multiprocessor waits for [s].
    hit : float
        Time of a row in L2 over that of one from memory [-].
    sharpness : float
        1 where waiting and moving add up, large where the longer counts [-].
    """

    launch: float
    each: float
    hit: float
    sharpness: float

    def time(self, case: Case, hits: float | None = None) -> float:
        """Time of a case [s]; with other hits than those of its law, if they are given."""
        work = size(case)
        hits = work.hits if hits is None else hits
        waiting = self.each * work.waiting * (1 - (1 - self.hit) * hits)
        return self.launch + float(smooth_maximum(waiting, work.moving, sharpness=self.sharpness))


def _solve(columns: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Least squares of relative errors, none below zero."""
    weights = 1.0 / np.array(targets)
    table = np.array(columns, dtype=float).T * weights[:, None]
    chosen = list(range(table.shape[1]))
    while chosen:
        values, *_ = np.linalg.lstsq(table[:, chosen], np.ones(len(table)), rcond=None)
        if (values >= 0).all():
            break
        chosen.pop(int(np.argmin(values)))
    found = [0.0] * table.shape[1]
    for position, value in zip(chosen, values, strict=True):
        found[position] = float(value)
    return found


def fit_bag(cases: Sequence[Case]) -> Constants:
    """Time of a number, and of a row in L2 where some have skewed lookups; cards differ."""
    targets = [case.measured - BAG.launch for case in cases]
    works = [size(case) for case in cases]
    missing = [work.waiting * (1 - work.hits) for work in works]
    hitting = [work.waiting * work.hits for work in works]
    if max(work.hits for work in works) < 0.1:  # none has enough to say it
        [each] = _solve([[work.waiting for work in works]], targets)
        return Constants(BAG.launch, each, 1.0, OVERLAPPED)
    each, of_hit = _solve([missing, hitting], targets)
    return Constants(BAG.launch, each, min(of_hit / each, 1.0), OVERLAPPED)


def fit_hash(cases: Sequence[Case]) -> Constants:
    """Start and search of a hash table, beside what its bytes take."""
    works = [size(case) for case in cases]
    targets = [max(case.measured - size(case).moving, 1e-9) for case in cases]
    columns = [[work.waiting for work in works]]
    if len({case.lookups for case in cases}) > 1:
        columns.append([1.0] * len(works))
    each, *launch = _solve(columns, targets)
    return Constants(sum(launch), each, 1.0, 1.0)


def _judge(cases: Sequence[Case], constants: Constants, rule: str) -> Iterator[dict[str, Any]]:
    """Errors of cases."""
    for case in cases:
        before = size(case).moving + BAG.launch
        predicted = constants.time(case)
        row: dict[str, Any] = {
            "number": case.number,
            "kernel": case.kernel,
            "case": f"{case.card.name}, {case.lookups:,.0f}",
            "release": case.release,
            "mode": case.mode,
            "direction": case.direction,
            "rule": rule,
            "source": case.source,
            "measured": case.measured,
            "before": before / case.measured - 1,
            "hits": size(case).hits,
        }
        if case.is_known:
            row |= {"predicted": predicted, "error": predicted / case.measured - 1}
            row["cause"] = _find_cause(case, row["error"])
        else:
            low, high = constants.time(case, 1.0), constants.time(case, 0.0)
            row |= {"low": low, "high": high, "inside": low <= case.measured <= high}
        yield row


def _find_cause(case: Case, error: float) -> str:
    """Why a case is off by more than 20 %."""
    if abs(error) <= 0.2:
        return ""
    for (kernel, source), cause in _CAUSES.items():
        if case.kernel == kernel and case.source.startswith(source):
            return cause
    return "releases of one library differ by more than cards do"


def judge_bags(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Torch's bag: each source of the old kernel with the other, the new one with perfkit's own."""
    old = [case for case in cases if case.kernel == "old bag"]
    for source in dict.fromkeys(case.source for case in old):
        others = [case for case in old if case.source != source and case.is_known]
        members = [case for case in old if case.source == source]
        yield from _judge(members, fit_bag(others), "other source")
    own = Constants(BAG.launch, BAG.per_number, BAG.hit, OVERLAPPED)
    new = [case for case in cases if case.kernel == "new bag"]
    yield from _judge(new, own, "own steps")


def judge_hash(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Hash tables of dynamicemb: tables of one optimizer with those of the other."""
    members = [case for case in cases if case.kernel == "hash" and case.source.endswith("examples")]
    for half in ("sgd", "adam"):
        for group in dict.fromkeys(case.group for case in members):
            of_group = [case for case in members if case.group == group]
            fitted = fit_hash([case for case in of_group if case.half != half])
            yield from _judge(
                [case for case in of_group if case.half == half], fitted, "other half"
            )


def judge_across(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Hash tables of HugeCTR, which search alone, with those of dynamicemb in evaluation (both
    versions of the newer release), and FBGEMM's kernel by its bytes."""
    hashed = [case for case in cases if case.kernel == "hash"]
    evaluated = []
    for case in hashed:
        if case.release.startswith("2025-09") and case.mode == "evaluation":
            evaluated.append(case)
    other = [case for case in hashed if not case.source.endswith("examples")]
    yield from _judge(other, fit_hash(evaluated), "other source")
    by_bytes = Constants(BAG.launch, 0.0, 1.0, 1.0)
    yield from _judge([c for c in cases if c.kernel == "FBGEMM"], by_bytes, "bytes alone")


def judge_swapped(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Stricter splits of dynamicemb: the larger batch with the smaller one and the reverse, where a
    start cannot be told from a search, and each release with the others."""
    members = [case for case in cases if case.kernel == "hash" and case.source.endswith("examples")]
    rows: list[dict[str, Any]] = []
    for lookups in (65_536.0, 1_048_576.0):
        for group in dict.fromkeys(case.group for case in members):
            of_group = [case for case in members if case.group == group]
            fitted = fit_hash([case for case in of_group if case.lookups != lookups])
            rows += _judge([c for c in of_group if c.lookups == lookups], fitted, "other batch")
    for release, mode in dict.fromkeys(case.group for case in members):
        of_mode = [case for case in members if case.mode == mode]
        others = [case for case in of_mode if case.release != release]
        own = [case for case in of_mode if case.release == release]
        rows += _judge(own, fit_hash(others), "other release")
    return rows


def compare_skewed(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Skewed lookups over uniform ones of the same card, measured and predicted with the other
    source, which says nothing of hits."""
    old = [case for case in cases if case.kernel == "old bag" and case.is_known]
    fitted = fit_bag([case for case in old if case.tables == 1])
    of_card = [case for case in old if case.tables > 1]
    [uniform] = [case for case in of_card if case.table.law is None]
    rows = []
    for case in of_card:
        if case is not uniform:
            measured = case.measured / uniform.measured
            predicted = fitted.time(case) / fitted.time(uniform)
            error = predicted / measured - 1
            rows.append(
                {"number": case.number, "ratio": measured, "predicted": predicted, "error": error}
            )
    return rows


def judge_all() -> list[dict[str, Any]]:
    """Errors of all published times of device memory."""
    with keep_quiet():
        cases = read_cases()
        return [*judge_bags(cases), *judge_hash(cases), *judge_across(cases)]


_COLUMNS = {
    "row": "{number}",
    "kernel": "{kernel}",
    "card, lookups": "{case}",
    "release": "{release}",
    "mode": "{mode}",
    "L2 has": "{hits:.0%}",
    "with": "{rule}",
    "measured": "{measured:time}",
    "predicted": "{predicted:time}",
    "error": "{error:+.0%}",
    "bytes alone": "{before:+.0%}",
    "between": "{low:time} and {high:time}",
    "inside": "{inside}",
    "cause": "{cause}",
}
_FIGURES = {
    "times": "{what}",
    **ERROR_COLUMNS,
    "mean of bytes alone": "{before:.1f}",
}


def _sum_up(what: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of some rows [%]."""
    judged = [row for row in rows if "error" in row]
    figures = summarize_errors([row["error"] for row in judged])
    before = 100 * float(np.mean([abs(row["before"]) for row in judged]))
    return {"what": what, **figures, "before": before}


def list_figures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of all times, and of each kernel."""
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    figures = [_sum_up("all", rows)]
    for direction in ("forward", "backward"):
        of_direction = [row for row in rows if row["direction"] == direction]
        figures.append(_sum_up(direction, of_direction))
    for kernel in kernels:
        figures.append(_sum_up(kernel, [row for row in rows if row["kernel"] == kernel]))
    return figures


@command({})
def main(given: Any) -> None:
    """Lookups of tables in device memory: each source with what the others give."""
    rows = judge_all()
    print(lay_out(rows, _COLUMNS), end="\n\n")
    print(lay_out(list_figures(rows), _FIGURES), end="\n\n")
    with keep_quiet():
        cases = read_cases()
        swapped = judge_swapped(cases)
        for rule in dict.fromkeys(row["rule"] for row in swapped):
            figures = _sum_up("", [row for row in swapped if row["rule"] == rule])
            print(f"dynamicemb with the {rule}: mean {figures['mean']:.1f} %")
        for row in compare_skewed(cases):
            text = f"measured {row['ratio']:.2f}, predicted {row['predicted']:.2f}"
            print(f"{row['number']}, skewed over uniform: {text} ({row['error']:+.0%})")
    for lookups in (65_536, 1_048_576):
        share = count_distinct(8_388_608, lookups) / lookups
        law = float(unique_rows(Zipf(8_388_608, 1.05, shift=0.5), lookups)) / lookups
        print(f"distinct rows of {lookups:,} lookups: {share:.4f}, of the Zipf law {law:.4f}")
