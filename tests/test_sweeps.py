"""Sweeps: every row is what one prediction says, in the order of the grid, whichever way it was
found."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas
import polars
import pytest

import perfkit as pk

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
SMALL = partial(pk.Transformer.bert, layers=2)


EIGHT_LARGE = [10**6 for _ in range(8)]
EIGHT_SMALL = [10**5 for _ in range(8)]


def build_wide(batch: int, width: int) -> pk.DLRM:
    return pk.DLRM(batch=batch, top=[width, width])


GRIDS = [
    (SMALL, {"batch": [4, 8], "sequence": [64, 128], "platform": ["h100-sxm-8", "zen5-2"]}, {}),
    (
        SMALL,
        {"batch": [8, 16], "ranks": [1, 2, 4], "execution": ["eager", "graphs"]},
        {"platform": "a100-sxm-8"},
    ),
    (
        pk.Transformer.bert,
        {"heads": [6, 12], "batch": [4, 8], "dtype": ["fp32", "bf16"], "layers": [1, 3]},
        {"platform": "h200-sxm-8"},
    ),
    (
        pk.DLRM,
        {"dim": [16, 64, 128], "pooling": [2, 20], "batch": [512, 1024]},
        {"platform": "h100-sxm-8"},
    ),
    (
        pk.DLRM,
        {"rows": [EIGHT_LARGE, EIGHT_SMALL, [10**4, 10**4, 10**4]], "batch": [512, 1024]},
        {"platform": "h100-sxm-8"},
    ),
    (build_wide, {"batch": [512, 1024], "width": [64, 256]}, {"platform": "h100-sxm-8"}),
    (
        SMALL(),
        {"batch": [4, 8], "sequence": [64, 96]},
        {"platform": pk.load_platform("h100-sxm-8").with_host(0.5)},
    ),
]


@pytest.mark.parametrize(("build", "grid", "settings"), GRIDS)
def test_every_row_is_one_prediction(
    build: Any, grid: dict[str, list[Any]], settings: dict[str, Any]
) -> None:
    table = pk.sweep(build, grid, progress=False, **settings).table()
    rows = pandas.DataFrame({name: table[name].to_list() for name in grid})
    alone = pk.sweep(build, rows, progress=False, events=True, **settings).table()
    for name in ("time_s", "low_s", "high_s", "needs_bytes", "samples_per_s"):
        # where the host of several ranks sets the pace
        is_estimated = "ranks" in grid and name in ("low_s", "high_s")
        rel = 0.05 if is_estimated else 1e-9
        assert table[name].to_list() == pytest.approx(alone[name].to_list(), rel=rel), name
    assert table.select("bottleneck", "fits").equals(alone.select("bottleneck", "fits"))


@pytest.mark.parametrize(("build", "grid", "settings"), GRIDS)
def test_the_first_row_is_what_predict_says(
    build: Any, grid: dict[str, list[Any]], settings: dict[str, Any]
) -> None:
    table = pk.sweep(build, grid, progress=False, **settings).table()
    sizes = {name: table[name].to_list()[0] for name in grid}
    where = {"platform": None, "ranks": 1, "execution": None, **settings}
    for name in where:
        if name in sizes:
            where[name] = sizes.pop(name)
    is_model = isinstance(build, pk.Transformer)
    workload = SMALL(**sizes) if is_model else build(**sizes)
    predicted = pk.predict(workload, **where)
    assert table["time_s"][0] == pytest.approx(predicted.time, rel=1e-9)


def test_what_cannot_be_priced_says_why_beside_the_rest() -> None:
    grid = {"batch": [*range(1, 9)], "ranks": [1, 4], "hidden": [768, 770]}
    found = pk.sweep(SMALL, grid, "h100-sxm-8", progress=False)
    priced = found.table().filter(polars.col("time_s").is_not_null())
    possible = []
    for batch, ranks in product(range(1, 9), (1, 4)):
        if batch % ranks == 0:
            possible.append((batch, ranks, 768))
    assert priced.select("batch", "ranks", "hidden").rows() == possible
    assert found.table().filter(polars.col("error").is_null()).equals(priced)
    assert "heads is 12; it must divide hidden, 770" in found.table()["error"][1]
    assert repr(found).startswith(
        "Sweep(32 configurations of bert on h100-sxm-8 over batch, ranks, hidden: "
    )


def test_warnings_of_a_sweep_say_which_platform_they_belong_to() -> None:
    grid = {"batch": [8, 16], "dtype": ["bf16"], "platform": ["a100-sxm-8", "h100-sxm-8"]}
    found = pk.sweep(pk.Transformer.bert, grid, progress=False)
    model = pk.Transformer.bert(batch=8, dtype="bf16")
    of_a100 = pk.predict(model, "a100-sxm-8").warnings
    of_h100 = pk.predict(model, "h100-sxm-8").warnings
    expected = [name_platform("a100-sxm-8", text) for text in of_a100 if text not in of_h100]
    expected += [name_platform("h100-sxm-8", text) for text in of_h100 if text not in of_a100]
    assert len(expected) > 2
    assert set(expected) <= set(found.warnings)
    for text in found.warnings:
        assert ": " in text


def name_platform(platform: str, warning: str) -> str:
    """A warning as a sweep says it; numbers are those of the first configuration."""
    if " long" in warning or " takes " in warning:
        return f"platform {platform}: {warning} (batch 8)"
    return f"platform {platform}: {warning}"


def test_a_report_of_a_sweep_shows_its_platforms() -> None:
    names = ["a100-sxm-8", "h100-sxm-8"]
    grid = {"batch": [8, 16], "dtype": ["bf16"], "platform": names}
    found = pk.sweep(pk.Transformer.bert, grid, progress=False)
    shown = [part.name for _, part in found.sections() if isinstance(part, pk.Platform)]
    assert shown == names
    assert "several platforms" in repr(found)
    assert found.chart().to_dict()["title"] == "bert-base on several platforms"


def test_a_warning_of_many_configurations_is_said_once_and_names_the_first_one() -> None:
    grid = {"batch": [64, 128], "pooling": [1, 2]}
    slow = pk.sweep(pk.DLRM, grid, "h100-sxm-8", progress=False)
    [text] = [text for text in slow.warnings if "device alone takes" in text]
    assert text.partition(" (")[2] == "batch 64, pooling 1)"
    grid = {"batch": [2, 4], "ranks": [1, 2]}
    many = pk.sweep(SMALL, grid, "h100-sxm-8", events=True, progress=False)
    assert len(many.warnings) == len(set(many.warnings))
    for text in many.warnings:
        assert "platform h100" not in text


class Lists(ThreadPoolExecutor):
    """An executor as Dask's is: it maps over lists, and refuses what can be gone through once."""

    def map(self, task: Any, *parts: Any, **settings: Any) -> Any:
        assert all(isinstance(part, list) for part in parts)
        return super().map(task, *parts, **settings)


def test_an_executor_gives_the_same_rows() -> None:
    grid = {"batch": [*range(1, 20)], "ranks": [1, 2]}
    with Lists(2) as pool:
        shared = pk.sweep(SMALL, grid, "h100-sxm-8", executor=pool, progress=False)
    assert shared.table().equals(pk.sweep(SMALL, grid, "h100-sxm-8", progress=False).table())
    with pytest.raises(ValueError, match=r"executor is 4; it must be one of concurrent\.futures"):
        pk.sweep(SMALL, grid, "h100-sxm-8", executor=4)  # type: ignore[arg-type]


def test_a_single_value_needs_no_list() -> None:
    lists = {"batch": [2, 4], "dtype": ["bf16"], "sequence": [64]}
    values = {"batch": [2, 4], "dtype": "bf16", "sequence": 64}
    expected = pk.sweep(pk.Transformer.bert, lists, "h100-sxm-8", progress=False).table()
    found = pk.sweep(pk.Transformer.bert, values, "h100-sxm-8", progress=False).table()
    assert found.equals(expected)


def test_charts_have_a_line_for_each_of_the_others() -> None:
    grid = {"batch": [2, 4], "platform": ["h100-sxm-8", "a100-sxm-8"]}
    found = pk.sweep(SMALL, grid, progress=False)
    series = set()
    for rows in found.chart().to_dict()["datasets"].values():
        series.update(row["series"] for row in rows)
    assert series == {"h100-sxm-8", "a100-sxm-8"}
    by_platform = found.chart("platform", "needs_bytes").to_dict()
    assert by_platform["layer"][-1]["encoding"]["x"]["field"] == "platform"


def test_a_chart_of_one_line_has_no_legend() -> None:
    grid = {"dtype": ["bf16"], "batch": [2, 4]}
    found = pk.sweep(SMALL, grid, "h100-sxm-8", progress=False)
    encoding = found.chart().to_dict()["layer"][-1]["encoding"]
    assert encoding["color"]["legend"] is None
    assert encoding["shape"]["legend"] is None


def test_closed_sums_are_the_event_loop() -> None:
    """200 random configurations, each by itself in the event loop of `predict`."""
    rng = np.random.default_rng(15)
    build = partial(pk.Transformer.gpt2, layers=2)
    errors: list[float] = []
    for ranks in (1, 4, 8, 64):
        heads = rng.integers(2, 17, 50)
        batch = rng.integers(1, 65, 50)
        length = rng.integers(8, 1025, 50)
        grid = pandas.DataFrame(
            {
                "heads": heads,
                "hidden": 64 * heads,
                "batch": ranks * batch,
                "sequence": length,
                "dtype": "bf16",
            }
        )
        sweep = partial(pk.sweep, build, grid, "h100-sxm-8x8", ranks=ranks, progress=False)
        closed = sweep(events=False).table()["time_s"]
        events = sweep(events=True).table()["time_s"]
        errors += (closed / events - 1).abs().to_list()
    assert len(errors) == 200
    assert max(errors) <= 1e-9


def test_rows_of_the_event_loop_are_predictions() -> None:
    """So are their intervals, which closed sums estimate where hosts of several ranks set the
    pace."""
    grid = {"batch": [8, 16]}
    found = pk.sweep(SMALL, grid, "a100-sxm-8", ranks=4, events=True, progress=False)
    for row in found.table().iter_rows(named=True):
        alone = pk.predict(SMALL(batch=row["batch"]), "a100-sxm-8", ranks=4)
        assert row["time_s"] == alone.time
        assert (row["low_s"], row["high_s"]) == alone.interval()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid is {}"),
        (5, "grid is 5; it must be a pandas or polars frame, or lists by name"),
        ({"batch": {}}, "give values of an argument"),
        ({"batch": []}, "give values of an argument"),
        ({"batches": [8]}, "argument is 'batches'; did you mean 'batch'"),
        ({"layers": [0]}, "layers is 0"),
    ],
)
def test_grids_that_make_no_sense_are_refused(grid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.sweep(pk.Transformer.bert, grid, "h100-sxm-8", progress=False)


def test_a_name_that_no_grid_has_is_told_with_its_neighbour() -> None:
    gpt = pk.Transformer.gpt2(batch=16)
    for wrong, near in (("stak", "stack"), ("layer", "layers")):
        with pytest.raises(
            ValueError, match=f"a name of grid is '{wrong}'; .*did you mean '{near}'"
        ):
            pk.sweep(gpt, {wrong: [1]}, "h100-sxm-8", progress=False)


def test_a_model_that_cannot_be_changed_says_what_to_give_instead() -> None:
    build = partial(pk.DLRM, rows=[1000, 1000, 1000, 1000], dim=16)
    with pytest.raises(
        ValueError, match=r"grid names \['dim'\], which do not fit: .*functools.partial\(pk.DLRM"
    ):
        pk.sweep(build(), {"dim": [64, 128]}, "h100-sxm-8", progress=False)
    table = pk.sweep(build(), {"batch": [64, 128]}, "h100-sxm-8", progress=False).table()
    built = [pk.predict(build(batch=batch), "h100-sxm-8").time for batch in (64, 128)]
    assert table["time_s"].to_list() == pytest.approx(built, rel=1e-9)


MODEL = pk.Transformer.gpt2(batch=16, sequence=512, layers=4, dtype="bf16")


@pytest.fixture(scope="module")
def predicted() -> pk.Prediction:
    """A model of 16 samples of 512 tokens on four ranks."""
    return pk.predict(MODEL, "h100-sxm-8", ranks=4)


def test_throughput_counts_iterations_samples_and_tokens(predicted: pk.Prediction) -> None:
    assert predicted.throughput == {
        "iterations": 1 / predicted.time,
        "samples": 16 / predicted.time,
        "tokens": 16 * 512 / predicted.time,
    }


def test_cost_and_energy_follow_from_the_time_of_all_ranks(predicted: pk.Prediction) -> None:
    iterations = 1e9 / (16 * 512)
    gpu_hours = 4 * iterations * predicted.time / 3600
    paid = predicted.cost(2.5, tokens=1e9)
    assert paid["gpu_hours"] == pytest.approx(gpu_hours)
    assert paid["cost"] == 2.5 * paid["gpu_hours"]
    assert "energy_kwh" not in paid
    drawn = predicted.cost(0, power=700, tokens=1e9)
    assert drawn["energy_kwh"] == pytest.approx(0.7 * gpu_hours)
    thrice = predicted.cost(2.5, tokens=1e9, epochs=3)
    assert thrice == {name: pytest.approx(3 * value) for name, value in paid.items()}


def test_a_cost_of_no_amount_is_refused(predicted: pk.Prediction) -> None:
    for wrong in ({"power": -1}, {"epochs": 0}):
        with pytest.raises(ValueError, match=r"(power|epochs) is"):
            predicted.cost(0, tokens=1e9, **wrong)
    both = {"samples": 1, "tokens": 1}
    for amount, fault in (
        ({}, "the amount is missing; give one of iterations, samples, tokens"),
        ({"epochs": 3}, "the amount is missing; give one of iterations, samples, tokens"),
        (both, "amounts are samples, tokens; give one of iterations, samples, tokens"),
        ({"token": 1}, "argument of cost is 'token'; known are .*; did you mean 'tokens'"),
        ({"images": 1}, "amount, .* is 'images'; known are iterations, samples, tokens"),
        ({"checkpoint_time": 60}, "is no argument of cost; did you mean checkpoint="),
        ({"tokens": 1, "deadline": 60}, "did you mean start=, and chance_by"),
    ):
        with pytest.raises(ValueError, match=fault):
            predicted.cost(2.5, **amount)


def test_a_report_shows_tokens_a_second_and_the_share_of_the_peak(
    predicted: pk.Prediction,
) -> None:
    sections = dict(predicted.sections())
    shown = dict(sections["Time and memory"])
    assert shown["tokens a second"] == f"{predicted.throughput['tokens']:,.0f}"
    # the dense peak of an H100 in bf16
    assert shown["share of 989.4 TFLOP/s, the peak in bf16 (MFU)"] == f"{predicted.mfu:.1%}"


def test_the_share_of_the_peak_counts_the_work_of_the_model(predicted: pk.Prediction) -> None:
    products = 4 * 12 * 768**2 + 50257 * 768  # weights that multiply tokens
    scores = 4 * 2 * 512 * 768  # products with keys and values, half of them in the future
    flops = 3 * 16 * 512 * (2 * products + scores)
    assert predicted.mfu == pytest.approx(flops / (predicted.time * 4 * 989.4e12), rel=1e-2)
    recomputed = pk.Transformer.gpt2(
        batch=16, sequence=512, layers=4, dtype="bf16", checkpoint=True
    )
    assert recomputed.graphs()[0].model_flops == MODEL.graphs()[0].model_flops


def list_reasons(build: Callable[..., Any], grid: dict[str, list[Any]], ranks: int) -> list[Any]:
    """Why each configuration of a grid is refused, one after the other."""
    reasons: list[str | None] = []
    for values in product(*grid.values()):
        sizes = dict(zip(grid, values, strict=True))
        try:
            pk.predict(build(**sizes), "h100-sxm-8", ranks=ranks)
            reasons.append(None)
        except ValueError as error:
            reasons.append(str(error))
    return reasons


@pytest.mark.parametrize(
    ("build", "grid", "ranks"),
    [
        (pk.Transformer.gpt2, {"batch": [2, 3, 0], "sequence": [512, 1025, 2.5, 2048]}, 2),
        (pk.Transformer.gpt2, {"batch": [4, -8], "heads": [12, 5, 7], "hidden": [768, 770]}, 1),
        (
            pk.Transformer.bert,
            {"batch": [8, 2**70], "accumulate": [1, 3], "sequence": [64, 4096]},
            4,
        ),
        (
            partial(pk.Transformer.preset, "llama-3-8b", layers=2),
            {"batch": [1, 8], "heads": [32, 12, 9]},
            1,
        ),
        (
            partial(pk.DLRM, rows=[1000, 1000], dim=16),
            {"batch": [64, 0, 3], "pooling": [1.0, -1.0, 0.5]},
            1,
        ),
        (
            partial(pk.DLRM, dim=16, pooling=1),
            {"batch": [64, 65], "rows": [[1000, 10], [0, 5], [3, 2.5]]},
            1,
        ),
    ],
)
def test_refused_configurations_have_the_reason_that_each_has_alone(
    build: Callable[..., Any], grid: dict[str, list[Any]], ranks: int
) -> None:
    found = pk.sweep(build, grid, "h100-sxm-8", ranks=ranks, progress=False).table()
    expected = list_reasons(build, grid, ranks)
    assert any(expected)
    assert not all(expected)
    assert found["error"].to_list() == expected
    assert found["time_s"].is_null().to_list() == [reason is not None for reason in expected]


def refuses_numpy(batch: int, sequence: int) -> pk.Transformer:
    """A model that arrays cannot build, and that has a limit of its own."""
    if batch * sequence > 4096:
        raise ValueError(f"{batch * sequence} tokens are too many")
    return pk.Transformer.gpt2(batch=batch, sequence=sequence)


def test_callables_that_take_no_arrays_are_asked_one_by_one() -> None:
    grid = {"batch": [1, 2, 4, 8], "sequence": [512, 1024, 2048]}
    found = pk.sweep(refuses_numpy, grid, "h100-sxm-8", progress=False).table()
    assert found["error"].to_list() == list_reasons(refuses_numpy, grid, 1)


def test_refused_configurations_cost_no_construction_each() -> None:
    """Half of the grid is refused; before, each of these was built alone, after halving."""
    calls = []

    def build(**sizes: Any) -> pk.Transformer:
        calls.append(sizes)
        return pk.Transformer.gpt2(**sizes)

    grid = {"batch": [*range(1, 101)], "sequence": [256, 512, 2048, 4096]}
    found = pk.sweep(build, grid, "h100-sxm-8", progress=False).table()
    assert found["error"].null_count() == 200
    assert len(calls) < 20


def test_sizes_that_decide_on_messages_may_be_all_that_varies_over_several_ranks() -> None:
    grid = {"heads": [4, 8], "hidden": [768, 96]}
    build = partial(pk.Transformer.gpt2, batch=4, layers=2)
    found = pk.sweep(build, grid, "h100-sxm-8", ranks=2, progress=False).table()
    alone = []
    for heads, hidden in product(*grid.values()):
        model = build(heads=heads, hidden=hidden)
        alone.append(pk.predict(model, "h100-sxm-8", ranks=2).time)
    assert found["time_s"].to_list() == pytest.approx(alone, rel=1e-9)
