"""Lookups and updates of tables beyond device memory on an H100, fitted to one half of the published
times and judged on the other.

python -m benchmarks.host_tables

NVIDIA/recsys-examples, corelib/dynamicemb/benchmark/README.md at two commits: a table of 128 fp32 columns,
lookups by a power law of 1.05 without pooling, means of 100 batches in turn. `uvm` and `uvm_caching` are
FBGEMM's, and perfkit's constants are those that fit the table of 8,388,608 rows. `host_caching` and
`host_hybrid` are dynamicemb's, a hash table with a cache, and one with a fixed part in device memory:
nothing in perfkit predicts them, so two numbers each are fitted to what they take longer than the same
hash table in device memory. All are judged on the table of 67,108,864 rows; of `host_hybrid`, which was
measured with that one alone, the second commit is judged by a fit to the first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.errors import ERROR_COLUMNS
from benchmarks.helpers.table_times import list_optimizers, read_table_times
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.checks import summarize_errors
from perfkit.models import host_tables
from perfkit.models.caches import lru_misses, rotating_misses
from perfkit.models.distributions import Zipf, distinct_rows
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.gallery import load_platform
from perfkit.prediction.cost import price
from perfkit.prediction.host_tables import find_link_bandwidth
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.sizes import alter
from perfkit.workloads.tables import EmbeddingTable

_PLATFORM = "h100-sxm-8"
#: Bytes of a row of 128 fp32 numbers [B], rows of the table that constants are fitted to, and batches
#: that are looked up in turn [-].
_ROW_BYTES, _FITTED_ROWS, _BATCHES = 512.0, 8_388_608, 100
#: The commit whose times of `host_hybrid` are fitted.
_FITTED_COMMIT = "PR 138"
_PLACEMENTS = ("uvm", "uvm_caching", "host_caching", "host_hybrid")
#: Why a judged configuration is off by more than 20 %, by placement, direction and lookups.
_CAUSES = {
    ("uvm_caching", "forward", 1_048_576): "counted misses hardly show in the measured time",
    ("uvm_caching", "backward", 65_536): "0.1 ms more than of the smaller table; no form knows why",
    ("uvm_caching", "backward", 1_048_576): "the kernel takes longer, also where all rows hit",
    ("host_caching", "forward", 65_536): "one start for evaluation and training, 0.1 ms apart",
    ("host_caching", "forward", 1_048_576): "a miss takes twice what the link takes",
    ("host_caching", "backward", 1_048_576): "updates of missed rows are not in the form",
    ("host_hybrid", "forward", 1_048_576): "evaluation above training, in this commit alone",
}


@dataclass(frozen=True)
class Case:
    """A published time.

    Parameters
    ----------
    placement, direction : str
        Where the rows lie, and ``forward`` or ``backward``.
    rows, lookups : int
        Rows of the table, and lookups of a batch [-].
    optimizer : str
        Of the table.
    evaluates : bool
        Whether nothing is trained.
    load_factor : float
        Share of the rows in device memory; 0 if none was stated [-].
    version, commit : str
        Of the software.
    measured : float
        Time [s].
    """

    placement: str
    direction: str
    rows: int
    lookups: int
    optimizer: str
    evaluates: bool
    load_factor: float
    version: str
    commit: str
    measured: float

    @property
    def is_fitted(self) -> bool:
        """Whether it is in the half that is fitted."""
        if self.placement == "host_hybrid":
            return self.commit == _FITTED_COMMIT
        return self.rows == _FITTED_ROWS

    @property
    def law(self) -> Zipf:
        """Law of the lookups: integers below a number that follows the power law."""
        return Zipf(self.rows, 1.05, shift=0.5)

    @property
    def states(self) -> int:
        """Numbers that the optimizer keeps for each weight [-]."""
        return find_optimizer(self.optimizer).states

    @property
    def distinct(self) -> float:
        """Distinct rows of a batch [-]."""
        return float(distinct_rows([self.law], [self.lookups])[0])

    @property
    def missed(self) -> float:
        """Rows of a batch that a cache of the load factor misses while batches take turns [-]."""
        cached = self.load_factor * self.rows
        if cached >= self.rows:
            return 0.0
        count = float(self.lookups)
        [fresh] = lru_misses([self.law], [count], [1.0], capacity=cached)
        without_one, touched = distinct_rows(
            [self.law] * 2, [(_BATCHES - 1) * count, _BATCHES * count]
        )
        oldest = (touched - without_one) / count
        return count * float(rotating_misses(fresh, oldest, touched, capacity=cached))


def read_cases() -> list[Case]:
    """All published times of this benchmark, those in device memory included."""
    rows = [row for row in read_table_times() if row["source"].startswith("NVIDIA/recsys-examples")]
    cases = []
    for row, optimizer in zip(rows, list_optimizers(rows), strict=True):
        cases.append(
            Case(
                placement=row["placement"],
                direction=row["direction"],
                rows=int(row["rows"]),
                lookups=int(row["batch"]),
                optimizer=optimizer,
                evaluates="eval mode" in row["remarks"],
                load_factor=float(row["cache_load_factor"] or 0),
                version="version 1" if "version 1" in row["remarks"] else "version 2",
                commit="PR 138" if "PR 138" in row["source"] else "PR 128",
                measured=1e-6 * float(row["time_us"]),
            )
        )
    return cases


# -- FBGEMM ----------------------------------------------------------------------------------------


@cache
def time_on_device(rows: int, lookups: int, optimizer: str, direction: str) -> float:
    """Time of the same kernel if all rows lay in device memory [s]."""
    law = Zipf(rows, 1.05, shift=0.5)
    table = EmbeddingTable(rows, 128, 1.0, law=law, name="table 0")
    layers: dict[str, Any] = {"bottom": [16], "top": [16]}
    model = DLRM(
        rows=[rows], dim=128, batch=lookups, embedding="exact", optimizer=optimizer, **layers
    )
    (graph,) = alter(model, {"tables": (table,)}).graphs(1, accelerator=True)
    (costs,) = price([graph], load_platform(_PLATFORM))
    total = 0.0
    for seconds, label in zip(costs.seconds, graph.labels, strict=True):
        if label.kind == f"embedding_{direction}":
            total += float(seconds)
    return total


def time_fbgemm(case: Case) -> float:
    """Predicted time of `uvm` and `uvm_caching` [s]."""
    link = find_link()
    total = time_on_device(case.rows, case.lookups, case.optimizer, case.direction)
    updates = host_tables.update_on_host(
        case.distinct, _ROW_BYTES, bandwidth=link, states=case.states
    )
    if case.placement == "uvm":
        if case.direction == "backward":
            return total + updates + host_tables.UVM_UPDATE_START
        misses = miss_on_the_way(case, host_tables.FLIGHT)
        return total + host_tables.read_from_host(
            case.lookups, _ROW_BYTES, bandwidth=link, misses=misses
        )
    if case.direction == "backward":
        of_weights = host_tables.update_on_host(case.distinct, _ROW_BYTES, bandwidth=link)
        return total + updates - of_weights + host_tables.CACHE_UPDATE_START
    cache_time = host_tables.keep_cache(case.lookups, case.missed, _ROW_BYTES, bandwidth=link)
    return total + cache_time + host_tables.CACHE_START


def find_link() -> float:
    """Bandwidth of the link to the host [B/s]."""
    return find_link_bandwidth(load_platform(_PLATFORM), 1)


def miss_on_the_way(case: Case, flight: float) -> float:
    """Share of the lookups whose row is not on its way for `flight` [s]."""
    capacity = flight * find_link()
    [misses] = lru_misses([case.law], [float(case.lookups)], [_ROW_BYTES], capacity=capacity)
    return float(misses)


def fit_fbgemm(cases: Sequence[Case]) -> dict[str, float]:
    """The constants of `perfkit.models.host_tables`, fitted to these times."""
    link = find_link()

    def choose(placement: str, direction: str) -> list[Case]:
        return [c for c in cases if (c.placement, c.direction) == (placement, direction)]

    def time_row_states(case: Case, numbers: float) -> float:
        """Time of so many numbers for each weight of the distinct rows, one way [s]."""
        return numbers * case.distinct * _ROW_BYTES / link

    looked_up = choose("uvm", "forward")
    measured = np.array([case.measured for case in looked_up])
    device = np.array([_time_alone(case) for case in looked_up])
    squares = []
    flights = np.arange(0.5e-6, 2e-6, 0.02e-6)
    for flight in flights:
        shares = np.array([miss_on_the_way(case, flight) for case in looked_up])
        count = np.array([float(case.lookups) for case in looked_up])
        predicted = device + shares * count * _ROW_BYTES / link
        squares.append(float(((predicted / measured - 1) ** 2).sum()))
    flight = float(flights[int(np.argmin(squares))])
    start, both_ways = _fit(
        choose("uvm", "backward"),
        [lambda case: 1.0, lambda case: time_row_states(case, 1 + case.states)],
        _time_alone,
    )
    cached = choose("uvm_caching", "backward")
    [cache_update] = _fit(
        cached,
        [lambda case: 1.0],
        lambda case: _time_alone(case) + both_ways * time_row_states(case, case.states),
    )
    cache_start, of_lookup = _fit(
        choose("uvm_caching", "forward"),
        [lambda case: 1.0, lambda case: case.lookups],
        lambda case: _time_alone(case) + both_ways * case.missed * _ROW_BYTES / link,
    )
    return {
        "FLIGHT": flight,
        "BOTH_WAYS": both_ways,
        "UVM_UPDATE_START": start,
        "CACHE_START": cache_start,
        "CACHE_LOOKUP": of_lookup,
        "CACHE_UPDATE_START": cache_update,
    }


def _time_alone(case: Case) -> float:
    """Time of the kernel of a case with all rows in device memory [s]."""
    return time_on_device(case.rows, case.lookups, case.optimizer, case.direction)


def _fit(
    cases: Sequence[Case],
    terms: Sequence[Callable[[Case], float]],
    known: Callable[[Case], float],
) -> list[float]:
    """Factors of some terms that leave the least squares of relative errors beside what is known."""
    columns = np.array([[term(case) / case.measured for term in terms] for case in cases])
    rest = np.array([1 - known(case) / case.measured for case in cases])
    factors: list[float] = np.linalg.lstsq(columns, rest, rcond=None)[0].tolist()
    return factors


# -- hash tables of dynamicemb ---------------------------------------------------------------------


def time_hash_tables(cases: Sequence[Case]) -> dict[Case, float]:
    """Times of `host_caching` and `host_hybrid`: that of the same hash table in device memory, what
    crosses the link, and a start and a time for each lookup, which are fitted to one half [s]."""
    on_device: dict[Any, float] = {}
    for case in cases:
        if case.placement == "device":
            on_device[_identify(case)] = case.measured

    def know(case: Case) -> float:
        return on_device[_identify(case)] + _time_link(case)

    predicted = {}
    for placement in ("host_caching", "host_hybrid"):
        for direction in ("forward", "backward"):
            chosen = [c for c in cases if (c.placement, c.direction) == (placement, direction)]
            fitted = [case for case in chosen if case.is_fitted]
            start, of_lookup = _fit(
                fitted, [lambda case: 1.0, lambda case: float(case.lookups)], know
            )
            for case in chosen:
                predicted[case] = know(case) + start + of_lookup * case.lookups
    return predicted


def _identify(case: Case) -> tuple[Any, ...]:
    """What a hash table in device memory and one beyond it have in common."""
    kind = (case.version, case.commit, case.direction, case.evaluates)
    return (*kind, case.lookups, case.optimizer)


def _time_link(case: Case) -> float:
    """Time of the rows of a hash table that cross the link [s]."""
    link = find_link()
    if case.placement == "host_caching":
        return host_tables.BOTH_WAYS * case.missed * _ROW_BYTES / link
    beyond = (1 - case.load_factor) * case.lookups  # keys are spread by their hash
    if case.direction == "forward":
        return host_tables.read_from_host(beyond, _ROW_BYTES, bandwidth=link)
    return host_tables.update_on_host(beyond, _ROW_BYTES, bandwidth=link)


# -- tables ----------------------------------------------------------------------------------------

_FIGURES = {"rows": "{what}", **ERROR_COLUMNS}
_CONSTANTS = {"constant": "{name}", "in perfkit": "{kept:.3g}", "fitted again": "{fitted:.3g}"}
_JUDGED = {
    "placement": "{placement}",
    "direction": "{direction}",
    "lookups": "{lookups}",
    "optimizer": "{optimizer}",
    "measured": "{measured_s:.3g} ms",
    "predicted": "{predicted_s:.3g} ms",
    "error": "{error:+.0%}",
    "cause": "{cause}",
}


def judge_cases() -> list[dict[str, Any]]:
    """Every published time with its prediction, error and half."""
    cases = read_cases()
    of_hash_tables = time_hash_tables(cases)
    rows = []
    for case in cases:
        if case.placement == "device":
            continue
        predicted = of_hash_tables[case] if case in of_hash_tables else time_fbgemm(case)
        error = predicted / case.measured - 1
        rows.append({"case": case, "predicted": predicted, "error": error})
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors of the judged half by placement, and of all together [%]."""
    judged = [row for row in rows if not row["case"].is_fitted]
    figures = []
    for placement in (*_PLACEMENTS, "all"):
        errors = [row["error"] for row in judged if placement in (row["case"].placement, "all")]
        figures.append({"what": placement, "n": len(errors), **summarize_errors(errors)})
    return figures


@command({})
def main(given: Any) -> None:
    """Tables beyond device memory: the constants, the errors of the judged half, and each miss."""
    rows = judge_cases()
    fitted_cases = [row["case"] for row in rows if row["case"].is_fitted]
    constants = []
    for name, fitted in fit_fbgemm(fitted_cases).items():
        constants.append({"name": name, "kept": getattr(host_tables, name), "fitted": fitted})
    print(lay_out(constants, _CONSTANTS), end="\n\n")
    print("Errors of the judged half in %")
    print(lay_out(summarize(rows), _FIGURES), end="\n\n")
    lines = []
    for row in rows:
        case = row["case"]
        if case.is_fitted or abs(row["error"]) <= 0.2:
            continue
        lines.append(
            {
                **vars(case),
                "measured_s": 1e3 * case.measured,
                "predicted_s": 1e3 * row["predicted"],
                "error": row["error"],
                "cause": _CAUSES.get((case.placement, case.direction, case.lookups), ""),
            }
        )
    print("Judged times that are off by more than 20 %")
    print(lay_out(lines, _JUDGED))
