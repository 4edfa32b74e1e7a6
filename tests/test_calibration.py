"""Calibration: times are computed from a platform with known parameters, and a fit has to find the
parameters again."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.accuracy import judge_kernels
from perfkit.calibration.cpu_context import add_context, bound_spread, expect_spread
from perfkit.calibration.fit import fit_platform
from perfkit.calibration.fit_kernels import size_cases
from perfkit.fitting import Caches, Iteration
from perfkit.measure.kernels import Case, draw_cases
from perfkit.measure.records import SizedKernel, read_measurements, read_record
from perfkit.measure.samples import dump
from perfkit.models.collectives import pipelined
from perfkit.models.kernels import additive, in_context
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer

NOMINAL = (2.0**20, 2.0**25)
CAPACITIES = {"l2": 0.7 * NOMINAL[0], "l3": 0.6 * NOMINAL[1], "pages": 2048.0}
CONTEXT = {"scale": 1.15, "cold_scale": 1.0, "launch": 1e-6}
# time of each operation of an iteration outside its kernel [s], and noise of all times
HOST, NOISE = 3e-6, 0.02
Raw = dict[str, Any]


def two(owners: tuple[int, ...]) -> Plan:
    return Plan.from_owners(owners, ranks=2)


MODELS: list[tuple[DLRM | Transformer, Plan | None]] = [
    *(
        (
            DLRM(
                rows=[r] * t,
                dim=d,
                pooling=p,
                batch=b,
                exponent=e,
                bottom=[64],
                top=[96, 32],
                sparse=s,
            ),
            None,
        )
        for t, r, d, p, b, e, s in (
            (4, 2000, 16, 3, 128, 0.0, True),
            (7, 30000, 32, 8, 256, 0.8, True),
            (5, 900, 64, 1, 512, 1.1, False),
            (10, 90000, 24, 5, 64, 0.4, True),
            (6, 12000, 16, 20, 200, 0.6, False),
        )
    ),
    *(
        (
            build(
                layers=n,
                hidden=h,
                heads=4,
                sequence=q,
                batch=b,
                vocabulary=v,
                attention=a,
                optimizer=o,
            ),
            None,
        )
        for build, n, h, q, b, v, a, o in (
            (Transformer.bert, 2, 64, 32, 4, 900, "fused", "adamw"),
            (Transformer.gpt2, 3, 96, 48, 2, 2000, "eager", "sgd"),
            (Transformer.gpt2, 2, 128, 64, 3, 1200, "fused", "adamw"),
            (Transformer.bert, 4, 64, 40, 2, 3000, "eager", "adamw"),
        )
    ),
    *(
        (
            DLRM(rows=[r] * 4, dim=16, pooling=4, batch=b, bottom=[32], top=[32], features=13),
            two(owners),
        )
        for r, b, owners in (
            (3000, 256, (0, 1, 1, 0)),
            (800, 1024, (1, 1, 1, 0)),
            (20000, 128, (0, 1, 0, 1)),
        )
    ),
]


def shake(rng: np.random.Generator, times: Any) -> Any:
    return times * np.exp(NOISE * rng.standard_normal(np.shape(times)))


def operands(case: Case) -> float:
    """Bytes of the operands of one call; a rough count is enough here."""
    s = case.sizes
    if case.kind in ("gemm", "bmm", "attention"):
        return 4.0 * s["batch"] * (s["m"] * s["k"] + s["k"] * s["n"] + s["m"] * s["n"])
    return 12.0 * s["elements"]


def kernel_rows(truth: Platform, seed: int) -> list[Raw]:
    rng, groups = np.random.default_rng([seed, 7]), dict[str, list[Raw]]()
    for case in draw_cases(seed, density=0.2):
        groups.setdefault(f"{case.kind}.{case.variant}", []).append(
            {**asdict(case), "nbytes": operands(case)}
        )
    rows = []
    for key, group in groups.items():
        kernels = [read_record(SizedKernel, row, key) for row in group]
        sizes = size_cases(kernels, (CAPACITIES["l2"], CAPACITIES["l3"]), CAPACITIES["pages"])
        for row, t in zip(group, shake(rng, additive(sizes, **truth.kernels[key])), strict=True):
            rows.append(
                {
                    **row,
                    "median": t,
                    "q1": 0.98 * t,
                    "q3": 1.03 * t,
                    "halves": [t, t],
                    "cpu_share": 1.0,
                }
            )
    return rows


def run_kernels(graph: Any, truth: Platform) -> np.ndarray:
    """Time of every operation inside an iteration."""
    costs = price([graph], truth)[0]
    return in_context(
        {"hot": costs.hot, "cold": costs.cold, "page_walks": costs.page_walks}, **CONTEXT
    )


def iteration_rows(truth: Platform) -> list[Raw]:
    rng, rows = np.random.default_rng(11), []
    for number, (workload, plan) in enumerate(MODELS):
        ranks = 2 if plan else 1
        runs: list[Raw] = []
        walls = []
        for graph in workload.graphs(ranks, plan):
            seconds = run_kernels(graph, truth)
            for place in graph.collectives:
                operation = graph[int(place)]
                seconds[place] = truth.collective_time(
                    operation.name, operation.features["nbytes"], ranks=ranks
                )
            seconds = shake(rng, seconds)
            walls.append(float(seconds.sum()) + HOST * len(graph))
            runs.append({"operation_seconds": seconds.tolist()})
        wall = float(shake(rng, max(walls)))
        runs = [
            run | {"median": wall, "q1": wall, "q3": wall, "halves": [wall, wall], "n": 10}
            for run in runs
        ]
        about = {"name": f"sample-{number}", "family": "x", "workload": dump(workload)}
        rows.append({**about, "owners": list(plan.owners) if plan else None, "runs": runs})
    return rows


@pytest.fixture(scope="module")
def truth(toy: Platform) -> Platform:
    return replace(
        toy,
        context=Context(caches=Caches.build(CAPACITIES, kind="assumed", source="test")),
    )


@pytest.fixture(scope="module")
def measurements(truth: Platform) -> Raw:
    rng, collectives = np.random.default_rng(3), []
    for key, fit in truth.collectives.items():
        for nbytes in 4.0 * 2.0 ** np.arange(8, 23):
            t = float(shake(rng, pipelined(nbytes, **fit)))
            row = {"q1": t, "median": 1.1 * t, "q3": 1.3 * t, "mean": 1.2 * t, "n": 50}
            collectives.append({"operation": key.split(".")[0], "nbytes": nbytes, **row})
    return {
        "format": 1,
        "id": "cpu-toy-2 measured 2026-11-20",
        "device": "cpu",
        "ranks": 2,
        "ranks_per_node": 2,
        "date": "2026-11-20",
        "machine": {"processor": "toy", "cores": "2"},
        "versions": {"torch": "2.x"},
        "caches": {"L1": 2.0**15, "L2": NOMINAL[0], "L3": NOMINAL[1]},
        "memory_bytes": 2.5e10,
        "kernels": kernel_rows(truth, 0),
        "collectives": collectives,
        "iterations": iteration_rows(truth),
    }


@pytest.fixture(scope="module")
def platform(measurements: Mapping[str, Any]) -> Platform:
    return fit_platform(measurements, name="found again")


def refit(platform: Platform, measurements: Mapping[str, Any]) -> Platform:
    """Fit only the iterations again; kernels, caches and collectives stay."""
    bare = replace(platform, context=Context(caches=platform.context.caches))
    return add_context(bare, read_measurements(measurements))


def test_every_class_is_fitted_and_every_number_has_its_origin(
    platform: Platform, truth: Platform
) -> None:
    assert (platform.name, platform.network.ranks) == ("found again", 2)
    assert (set(platform.kernels), set(platform.collectives)) == (
        set(truth.kernels),
        set(truth.collectives),
    )
    assert {fit.source for fit in platform.kernels.values()} == {"cpu-toy-2 measured 2026-11-20"}
    assert set(platform.numbers()["kind"]) <= {"measured", "fitted", "datasheet"}
    assert Platform.from_toml(platform.to_toml()) == platform


def test_times_of_other_sizes_are_found_again(platform: Platform, truth: Platform) -> None:
    rows = kernel_rows(truth, 1)
    errors, noise = (
        judge_kernels(platform, rows),
        np.concatenate([*judge_kernels(truth, rows).values()]),
    )
    assert noise.std() == pytest.approx(NOISE, rel=0.15) and abs(noise.mean()) < 0.3 * NOISE
    everything = np.abs(np.concatenate([*errors.values()]))
    assert set(errors) <= set(truth.kernels)
    assert np.median(everything) < 2.5 * NOISE and np.percentile(everything, 90) < 0.2
    for kind in {key.partition(".")[0] for key in errors}:
        values = np.concatenate(
            [own for key, own in errors.items() if key.partition(".")[0] == kind]
        )
        assert np.median(np.abs(values)) < 0.1, kind


def test_parameters_are_found_again(platform: Platform, truth: Platform) -> None:
    for name in ("relu", "add", "mul_", "addcdiv_"):
        found, known = platform.kernels[f"elementwise.{name}"], truth.kernels[f"elementwise.{name}"]
        assert found["launch"] == pytest.approx(known["launch"], rel=0.1)
        assert found["nbytes"] == pytest.approx(known["nbytes"], rel=0.25)
        few_sizes = found.n - len(found) < 3  # their residuals say little, and the spread is wide
        assert few_sizes == (found.spread > 0.4) and (few_sizes or found.spread < 4 * NOISE)
    assert platform.cache_capacities == pytest.approx(
        (CAPACITIES["l2"], CAPACITIES["l3"]), rel=0.35
    )
    for key, fit in platform.collectives.items():
        assert dict(fit) == pytest.approx(dict(truth.collectives[key]), rel=0.1)
        assert any("1.20 times" in note for note in fit.notes)


def test_iterations_are_found_again(
    platform: Platform, truth: Platform, measurements: Mapping[str, Any]
) -> None:
    for family in ("dlrm", "transformer"):
        fit = platform.context.iterations[family]
        assert fit["scale"] == pytest.approx(1, abs=0.1) and fit.get(
            "per_operation", 0
        ) == pytest.approx(HOST, rel=0.6)
    for row, (workload, plan) in zip(measurements["iterations"], MODELS, strict=True):
        prediction = predict(workload, platform, ranks=2 if plan else 1, plan=plan)
        assert prediction.time == pytest.approx(row["runs"][0]["median"], rel=0.15), row["name"]
        assert prediction.warnings == ()
    rows = [7000, 7000, 7000, 7000, 7000, 7000]
    unseen = DLRM(rows=rows, dim=32, pooling=6, batch=300, bottom=[48], top=[64], features=13)
    (graph,) = unseen.graphs()
    low, high = predict(unseen, platform).interval(0.95)
    assert low < float(run_kernels(graph, truth).sum()) + HOST * len(graph) < high


# Spreads.


def test_iterations_that_scatter_widen_the_interval(measurements: Raw, platform: Platform) -> None:
    """The spread comes from left-out iterations, so a fit cannot hide the noise."""
    rng, noisy = np.random.default_rng(5), copy.deepcopy(measurements)
    for row in noisy["iterations"]:
        factor = float(np.exp(0.5 * rng.standard_normal()))
        for run in row["runs"]:
            run["median"] *= factor
    scattered = refit(platform, noisy)
    calm_fits, wild_fits = platform.context.iterations, scattered.context.iterations
    for family in ("dlrm", "transformer"):
        assert 2 * calm_fits[family].spread < wild_fits[family].spread
        assert 0.1 < wild_fits[family].spread < 1.5
        assert calm_fits["any"].spread >= calm_fits[family].spread
    assert predict(MODELS[0][0], scattered).spread > predict(MODELS[0][0], platform).spread
    # One wild iteration shows in the spread of its family in full, as no fit that it is judged by
    # has seen it.
    spoilt = copy.deepcopy(measurements["iterations"][:9])
    spoilt[0]["runs"][0]["median"] *= 3.0
    spoilt_fits = refit(platform, {**measurements, "iterations": spoilt}).context.iterations
    calm = calm_fits["dlrm"].spread
    expected = expect_spread([np.log(3), calm, calm, calm, calm])
    assert spoilt_fits["dlrm"].spread > 0.9 * expected > 2 * calm


@pytest.mark.parametrize("estimate", [expect_spread, bound_spread])
def test_an_estimated_spread_is_that_of_normal_errors(
    estimate: Callable[[list[float]], float],
) -> None:
    draws = np.random.default_rng(0).normal(0, 0.1, (400, 14))
    spreads = np.array([estimate(row.tolist()) for row in draws])
    assert np.median(spreads) == pytest.approx(0.1, rel=0.25)
    fresh = np.abs(np.random.default_rng(1).normal(0, 0.1, 400))
    assert np.mean(fresh <= 1.2816 * spreads) >= 0.77, "an 80 % interval holds at least about 80 %"
    assert (
        0.05
        < expect_spread([0.01, -0.01, 0.0, 0.01])
        < 0.11
        < expect_spread([0.4, 0.0, 0.1])
        < 0.24
    ), "few errors"


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_waiting_and_computing_longer_are_kept_apart(
    measurements: Raw, platform: Platform, share: float
) -> None:
    """Only the measured waiting of ranks counts as communication; the other extra time is
    computing."""
    delay = 1e-3
    rows = copy.deepcopy(measurements)
    rng = np.random.default_rng(9)
    more = {"per_collective": share * delay, "per_resume": (1.0 - share) * delay}
    fit = Iteration.build(
        {**platform.context.parallel["dlrm"], **more}, kind="assumed", source="test"
    )
    truth = replace(
        platform,
        context=replace(platform.context, parallel={**platform.context.parallel, "dlrm": fit}),
    )
    for row, (workload, plan) in zip(rows["iterations"], MODELS, strict=True):
        if plan:
            found = predict(workload, truth, ranks=2, plan=plan)
            still = found.communication()
            for run, idle in zip(
                row["runs"], (still["exposed_s"] + still["waiting_s"]).to_list() * 2, strict=False
            ):
                run |= {"median": float(shake(rng, found.time)), "idle": idle}
    for row in rows["collectives"]:
        row["median"] = row["q1"] + delay
    again = refit(platform, rows).context.parallel["dlrm"]
    assert again["per_collective"] + again["per_resume"] == pytest.approx(delay, rel=0.25)
    assert again["per_collective"] == pytest.approx(share * delay, rel=0.3)
    for row in rows["iterations"]:
        for run in row["runs"]:
            run.pop("idle", None)
    unseen = refit(platform, rows).context.parallel["dlrm"]
    assert "per_resume" not in unseen and unseen["per_collective"] == pytest.approx(delay, rel=0.25)


# What may be missing, and what is refused.


def test_a_platform_says_what_was_not_measured(measurements: Raw, platform: Platform) -> None:
    products = [row for row in measurements["kernels"] if row["kind"] == "gemm"]
    alone = fit_platform(
        {**measurements, "kernels": products, "collectives": [], "iterations": [], "ranks": 1}
    )
    assert (
        alone.name == "cpu-1" and list(alone.context.fits()) == ["caches"] and not alone.collectives
    )
    with pytest.warns(UserWarning, match="never calibrated with transformer iterations"):
        assert predict(MODELS[5][0], alone).time > 0
    single = refit(platform, {**measurements, "iterations": measurements["iterations"][:9]})
    with pytest.warns(UserWarning, match="never calibrated with dlrm iterations on several ranks"):
        predict(MODELS[-1][0], single, ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(MODELS[0][0], single)


def test_what_cannot_be_fitted_is_refused(measurements: Raw, platform: Platform) -> None:
    for version in (None, 0, 2, "1", 1.5):
        with pytest.raises(
            ValueError, match=r"format is .*; this perfkit reads measurements of format 1; measure"
        ):
            fit_platform({**measurements, "format": version})
    other = copy.deepcopy(measurements)
    other["iterations"][0]["runs"][0]["operation_seconds"].pop()
    with pytest.raises(
        ValueError,
        match=r"iteration sample-0 was measured with \d+ operations and its graph has \d+",
    ):
        refit(platform, other)


def test_repeated_batches_of_indices_stay_near() -> None:
    """A few batches rotate on a large table: their rows fit into caches, rows of new batches do
    not."""
    sizes = {"table_rows": 10**6, "dim": 64, "lookups": 400, "bags": 400, "exponent": 0.0}

    def size(**more: int) -> dict[str, np.ndarray]:
        kernel = SizedKernel("embedding_update", "sparse", sizes | more, nbytes=1e5)
        return size_cases([kernel], (1e5, 3e7), 8192.0)

    fresh = size(index_batches=10**6)
    eight = size()
    few = size(index_batches=2)
    rows = sizes["lookups"] * 256.0
    assert fresh["beyond_l3"] > 0.8 * rows and fresh["page_walks"] > 0.8 * sizes["lookups"]
    assert eight["beyond_l3"] < 1e-3 * rows and eight["page_walks"] < 0.05 * sizes["lookups"]
    assert few["beyond_l3"] < eight["beyond_l3"] and few["beyond_l2"] <= eight["beyond_l2"]
    assert all(
        case.sizes["index_batches"] == 8
        for case in draw_cases(1)
        if case.kind.startswith("embedding")
    )
    # what measurements without the number mean
    assert size(index_batches=8)["page_walks"] == eight["page_walks"]
