"""Fixtures that several test modules share."""

import gc
import json
import os
from collections.abc import Generator, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import perfkit as pk
from perfkit.fitting import Additive, Pipelined
from perfkit.ground.hardware import Link, MemoryLevel, Quantity
from perfkit.measure.kernels import draw_cases
from perfkit.models.kernels import term_names
from tests.quick import DURATIONS, LONGEST

ROOT = Path(__file__).resolve().parent.parent
collect_ignore = ["golden", "fuzz", "torchrec_trip.py"]  # answers, inputs and a program: no tests
gc.disable()  # until all is imported

# A busy machine is no failure, and the same tree is judged the same way twice. With more examples, or with new ones:
#     HYPOTHESIS_PROFILE=nightly pytest    HYPOTHESIS_PROFILE=explore pytest
settings.register_profile(
    "perfkit",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", deadline=None, derandomize=True, max_examples=200)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "perfkit"))

#: Plausible time of one of each term of `perfkit.models.kernels.TERMS` on one core [s].
COSTS: Mapping[str, float] = {
    "launch": 2e-6,
    "flops": 1e-11,
    "tiled_flops": 5e-12,
    "products": 2e-8,
    "product_rows": 1e-8,
    "outputs": 1e-10,
    "left": 5e-11,
    "right": 5e-11,
    "nbytes": 1e-11,
    "beyond_l2": 1e-11,
    "beyond_l3": 3e-11,
    "elements": 1e-10,
    "rows": 1e-8,
    "columns": 2e-9,
    "bags": 5e-9,
    "lookups": 2e-9,
    "sorted_lookups": 1e-9,
    "row_bytes": 2e-11,
    "page_walks": 3e-8,
    "unique_bytes": 1e-11,
}


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What other modules left alive is not looked through again and again, by captures and by
    Python."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin; all others keep their order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


class Meter:
    """Processor time of this process and of those it has waited for [s]."""

    def __init__(self) -> None:
        self.read = self.total()

    def total(self) -> float:
        return sum(os.times()[:4])

    def advance(self) -> float:
        """Time since the last call."""
        before, self.read = self.read, self.total()
        return self.read - before


METER = Meter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """A busy machine makes no test dearer: a report has the processor time of its phase."""
    report = yield
    report.processor_s = METER.advance()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Keep what each test took, by which `tests.quick` chooses."""
    spent = dict[str, float]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds = getattr(report, "processor_s", 0.0)
            if isinstance(report, pytest.TestReport) and seconds:
                spent[report.nodeid] = spent.get(report.nodeid, 0.0) + seconds
    if DURATIONS.parent.is_dir():
        known = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}
        rounded = {test: round(seconds, 2) for test, seconds in spent.items()}
        DURATIONS.write_text(json.dumps(known | rounded, indent=1, sort_keys=True), "utf-8")


@pytest.fixture(scope="module")
def few_calls() -> Iterator[None]:
    """Small steps are captured by three calls, as large ones are, and those that draw numbers by four,
    instead of up to 17.

    For modules that set captured operations beside others: what later calls find is tested in
    tests/test_recorded_notes.py, and kept answers are made with all of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("torch") is None:  # nothing is captured
            yield
            return
        patch.setattr("perfkit.recording.comparisons.USUAL_OPERATIONS", 0)
        patch.setattr("perfkit.recording.comparisons.MOST_CALLS", 2)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of other people's measurements, which lie beside the repository; without it the test
    is skipped."""
    folder = Path(os.environ.get("PERFKIT_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no validation data at {folder} (set PERFKIT_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def toy() -> pk.Platform:
    """An invented CPU of two ranks on which every class of operations has a model with known
    parameters."""

    def quantity(value: float, unit: str) -> Quantity:
        return Quantity(value, unit, "assumed", "invented for tests")

    kernels, invented = {}, {"kind": "assumed", "source": "invented for tests"}
    for kind, variant in sorted({(case.kind, case.variant) for case in draw_cases(0, density=0.1)}):
        terms = {name: COSTS.get(name, 1e-11) for name in term_names(kind, variant)}
        kernels[f"{kind}.{variant}"] = Additive.build(terms, spread=0.05, **invented)
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
    curve = Pipelined.build(
        {"alpha": 5e-5, "beta": 4e-10, "sharpness": 0.6},
        spread=0.05,
        **invented,
    )
    near = MemoryLevel("L2", quantity(2.0**20, "B"), quantity(120e9, "B/s"))
    middle = MemoryLevel("L3", quantity(2.0**25, "B"), quantity(80e9, "B/s"))
    far = MemoryLevel("DRAM", quantity(2.5e10, "B"), quantity(20e9, "B/s"))
    return pk.Platform(
        "toy",
        pk.Device("invented core", "cpu", {"fp32": quantity(1e11, "FLOP/s")}, (near, middle, far)),
        pk.Network(2, links={"intra": Link(quantity(5e9, "B/s"), quantity(5e-5, "s"))}),
        kernels=kernels,
        collectives={f"{name}.2": curve for name in names},
    )
