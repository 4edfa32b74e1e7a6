"""Rare kernels: probes state the sizes that captures find, and platforms without these probes say so."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk

torch = pytest.importorskip("torch", reason="probes run in torch: pip install 'perfkit[measure]'")

from perfkit.calibration.cpu_plan import KERNEL_SECONDS, RARE_SHARE, list_parts, plan_cpu  # noqa: E402
from perfkit.calibration.fit_kernels import fit_each_class  # noqa: E402
from perfkit.measure.kernels import Case, draw_cases  # noqa: E402
from perfkit.measure.operations import prepare  # noqa: E402
from perfkit.measure.rare_kernels import draw_rare_cases  # noqa: E402
from perfkit.measure.records import MeasuredKernel  # noqa: E402
from perfkit.models.kernels import TERMS, additive, term_names  # noqa: E402
from perfkit.platform.kernels import find_stand_in, is_other_code  # noqa: E402
from perfkit.prediction.classes import classify  # noqa: E402
from perfkit.workloads.columns import OperationSizes  # noqa: E402
from perfkit.workloads.row_operations import count_runs  # noqa: E402
from perfkit.workloads.vocabulary import find_entry  # noqa: E402


def choose_smallest() -> dict[str, Case]:
    """The case of each class that moves and computes least; scattered products are a class of their own
    here."""
    chosen: dict[str, Case] = {}
    for case in draw_rare_cases(density=0.25):
        scattered = " scattered" if case.kind == "bmm" and "elements" in case.sizes else ""
        name = f"{case.kind}.{case.variant}{scattered}"
        known = chosen.get(name)
        if known is None or weigh(case) < weigh(known):
            chosen[name] = case
    return chosen


def weigh(case: Case) -> float:
    table = case.sizes.get("table_rows", 0) * case.sizes.get("dim", 0)
    return case.sizes.get("flops", 0) + case.sizes.get("elements", 0) + table


CASES = choose_smallest()


@pytest.mark.parametrize("name", CASES)
def test_a_probe_is_what_a_capture_finds(name: str) -> None:
    """The call of a probe, read as captures read calls, has the class and the sizes that the probe states."""
    case = CASES[name]
    calls, nbytes = prepare(case)
    call = calls[0]
    schema = call.func._schema
    defaults = [argument.default_value for argument in schema.arguments]
    arguments = [*call.args, *defaults[len(call.args) :]]
    entry = find_entry(schema.name.partition("::")[2], pointwise=case.kind == "elementwise")
    sizes = entry.sizes(arguments, call())._asdict()
    assert (entry.kind, entry.name_variant(schema.name.partition("::")[2], arguments)) == (
        case.kind,
        case.variant,
    )
    assert nbytes > 0
    for term in term_names(case.kind, case.variant):
        if term in ("unique_bytes", "row_bytes", "page_walks", "nbytes", "beyond_l2", "beyond_l3"):
            continue
        stated = {field: 0.0 for field in OperationSizes._fields} | case.sizes
        found: Any = TERMS[term]({key: np.asarray(float(value)) for key, value in sizes.items()})
        expected: Any = TERMS[term]({key: np.asarray(value) for key, value in stated.items()})
        assert found == pytest.approx(expected, rel=1e-9), term


def test_runs_are_numbers_that_are_neighbours_in_all_tensors() -> None:
    x = torch.zeros(6, 5, 4)
    assert count_runs(x, [x, x]) == 0
    assert count_runs(x, [x, 2.0]) == 0
    assert count_runs(x, [x, torch.zeros(6, 5, 1)]) == 30
    assert count_runs(x, [x, torch.zeros(4)]) == 30
    # the last two dimensions are one run
    assert count_runs(x, [x, torch.zeros(6, 1, 1)]) == 6
    assert count_runs(x, [x, torch.zeros(5, 4)]) == 6


def test_a_window_beyond_the_image_holds_nothing() -> None:
    """EfficientNet pools with a window of as many pixels as it has channels, on small images."""

    def make_step() -> Any:
        pictures = torch.rand(2, 3, 4, 4, requires_grad=True)
        pool = torch.nn.AvgPool2d(1280, ceil_mode=True)
        return lambda: pool(pictures).sum().backward()

    graph = pk.capture(make_step)
    pools = [i for i, label in enumerate(graph.labels) if label.kind == "pooling"]
    assert graph.features.k[pools].tolist() == [16.0, 16.0]


def test_few_rows_of_a_table_do_not_count_the_table() -> None:
    def find_bytes(table_rows: int) -> float:
        def make_step() -> Any:
            table, rows = torch.rand(table_rows, 8), torch.arange(10) % 4
            return lambda: table[rows]

        return float(pk.capture(make_step).traffic[0])

    assert find_bytes(1000) == find_bytes(100_000) == 10 * 8 * 4 + 10 * 8
    # all of a small table is read
    assert find_bytes(4) == 4 * 8 * 4 + 10 * 8 * 4 + 10 * 8


def test_what_stands_in_for_other_code_is_uncertain() -> None:
    """zen3-2 was calibrated before these probes: its time for rows is that of single numbers, with a wide
    interval, also where iterations had copies."""
    here = pk.load_platform("zen3-2")
    assert is_other_code(here.kernels, "copy", "index.rows")
    plain = find_stand_in(here.kernels, "copy", variant="index")
    rows = find_stand_in(here.kernels, "copy", variant="index.rows")
    assert plain is not None and rows is not None
    assert dict(rows) == dict(plain)
    assert rows.spread == pytest.approx(np.hypot(plain.spread, 1.0))

    def make_step() -> Any:
        table, chosen = torch.rand(100, 8), torch.arange(50)
        return lambda: table[chosen]

    graph = pk.capture(make_step)
    [model] = classify([graph], here, "fp32").models
    assert model.context is not None and model.context.spread > 1.0
    # a platform that timed rows is as sure as before
    timed = replace(here, kernels={**here.kernels, "copy.index.rows": plain})
    [model] = classify([graph], timed, "fp32").models
    assert model.context is not None and model.context.spread < 1.0
    # kernels of a GPU for rows are like those for single numbers
    assert not is_other_code(pk.load_platform("a100-sxm-8").kernels, "copy", "index.rows")


def test_broadcast_functions_are_fitted_with_their_rows() -> None:
    """A call takes 1 us, a row 10 ns, and a number read and written 1 ns; older files have no rows."""
    kernels = []
    for elements, rows in (
        (100, 0),
        (1000, 0),
        (10_000, 0),
        (1000, 100),
        (10_000, 2000),
        (50_000, 400),
    ):
        sizes = {"elements": float(elements)}
        if rows:
            sizes["rows"] = float(rows)
        nbytes = 8.0 * elements
        seconds = 1e-6 + 1e-8 * rows + 1e-9 * nbytes / 8
        kernels.append(
            MeasuredKernel(
                "elementwise", "mul", sizes, nbytes=nbytes, median=seconds, q1=seconds, q3=seconds
            )
        )
    caches = {"l2": 1e9, "l3": 1e9}
    fit = fit_each_class(kernels, caches)["elementwise.mul"]
    assert fit["rows"] == pytest.approx(1e-8, rel=0.01)
    older = fit_each_class(kernels[:3], caches)["elementwise.mul"]
    assert "rows" not in older


def test_maxima_of_bags_by_hand() -> None:
    """10 bags of 3 columns with 4 rows each: 30 ln 4 changes of the maximum; bags of one row have none."""
    sizes = {"bags": np.array([10.0]), "dim": np.array([3.0]), "lookups": np.array([40.0])}
    assert additive(sizes, bag_maxima=1.0) == pytest.approx(30 * np.log(4))
    alone = sizes | {"lookups": np.array([10.0])}
    assert additive(alone, bag_maxima=1.0) == pytest.approx(0.0)


def test_a_quick_plan_has_fewer_rare_kernels() -> None:
    """A part of the time of kernels is theirs: at 45 ms each less than 20 s, and a third of that with quick."""
    full = draw_rare_cases(density=1.0)
    few = draw_rare_cases(density=0.25)
    assert {(case.kind, case.variant) for case in few} == {
        (case.kind, case.variant) for case in full
    }
    assert 0.045 * len(full) < 20.0
    assert len(few) < len(full) / 2
    plan = plan_cpu(ranks=1, quick=False, models="standard")
    kernels = next(part for part in list_parts(plan, 1) if part.name == "kernels")
    of_each = KERNEL_SECONDS + plan.kernel_seconds
    of_rare = KERNEL_SECONDS + RARE_SHARE * plan.kernel_seconds
    expected = of_each * len(draw_cases(density=1.0)) + of_rare * len(full)
    assert kernels.seconds == pytest.approx(expected)
