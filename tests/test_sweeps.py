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


def build_wide(batch: int, width: int) -> pk.DLRM:
    return pk.DLRM(batch=batch, top=[width, width])


@pytest.mark.parametrize(
    ("build", "grid", "settings"),
    [
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
            {"rows": [[10**6] * 8, [10**5] * 8, [10**4] * 3], "batch": [512, 1024]},
            {"platform": "h100-sxm-8"},
        ),
        (build_wide, {"batch": [512, 1024], "width": [64, 256]}, {"platform": "h100-sxm-8"}),
        (
            SMALL(),
            {"batch": [4, 8], "sequence": [64, 96]},
            {"platform": pk.load_platform("h100-sxm-8").with_host(0.5)},
        ),
    ],
)
def test_every_row_is_one_prediction(
    build: Any, grid: dict[str, list[Any]], settings: dict[str, Any]
) -> None:
    found = pk.sweep(build, grid, progress=False, **settings).table()
    rows = pandas.DataFrame({name: found[name].to_list() for name in grid})
    alone = pk.sweep(build, rows, progress=False, events=True, **settings).table()
    for name in ("time", "low", "high", "needs", "samples_per_s"):
        # where the host of several ranks sets the pace
        estimated = "ranks" in grid and name in ("low", "high")
        assert found[name].to_list() == pytest.approx(
            alone[name].to_list(), rel=0.05 if estimated else 1e-9
        ), name
    assert found.select("bottleneck", "fits").equals(alone.select("bottleneck", "fits"))
    given = {name: found[name].to_list()[0] for name in grid}
    at = {"platform": None, "ranks": 1, "execution": None} | settings
    at = {name: given.pop(name, value) for name, value in at.items()}
    workload = (
        pk.Transformer.bert(layers=2, **given)
        if isinstance(build, pk.Transformer)
        else build(**given)
    )
    assert found["time"][0] == pytest.approx(
        pk.predict(workload, at.pop("platform"), **at).time, rel=1e-9
    )


def test_what_cannot_be_priced_says_why_beside_the_rest() -> None:
    grid = {"batch": [*range(1, 9)], "ranks": [1, 4], "hidden": [768, 770]}
    found = pk.sweep(SMALL, grid, "h100-sxm-8", progress=False)
    priced = found.table().filter(polars.col("time").is_not_null())
    assert priced.select("batch", "ranks", "hidden").rows() == [
        (b, r, 768) for b in range(1, 9) for r in (1, 4) if b % r == 0
    ]
    assert found.table().filter(polars.col("error").is_null()).equals(priced)
    assert "heads is 12; it must divide hidden, 770" in found.table()["error"][1]
    assert repr(found).startswith(
        "Sweep(32 configurations of bert on h100-sxm-8 over batch, ranks, hidden: "
    )


def test_warnings_of_a_sweep_say_which_platform_they_belong_to_and_its_report_shows_the_platforms() -> (
    None
):
    names = ["a100-sxm-8", "h100-sxm-8"]
    found = pk.sweep(
        pk.Transformer.bert,
        {"batch": [8, 16], "dtype": ["bf16"], "platform": names},
        progress=False,
    )
    alone = {
        name: pk.predict(pk.Transformer.bert(batch=8, dtype="bf16"), name).warnings
        for name in names
    }
    own = [
        f"platform {name}: {text}"
        # numbers are those of the first configuration
        + " (batch 8)" * (" long" in text or " takes " in text)
        for name in names
        for text in alone[name]
        if text not in alone[names[name == names[0]]]
    ]
    assert (
        len(own) > 2
        and {*own} <= {*found.warnings}
        and all(": " in text for text in found.warnings)
    )
    assert [part.name for _, part in found.sections() if isinstance(part, pk.Platform)] == names
    assert (
        "several platforms" in repr(found)
        and found.chart().to_dict()["title"] == "bert-base on several platforms"
    )
    slow = pk.sweep(
        pk.DLRM, {"batch": [64, 128], "pooling": [1, 2]}, "h100-sxm-8", progress=False
    ).warnings
    assert [text.partition(" (")[2] for text in slow if "device alone takes" in text] == [
        "batch 64, pooling 1)"
    ]
    many = pk.sweep(
        SMALL, {"batch": [2, 4], "ranks": [1, 2]}, "h100-sxm-8", events=True, progress=False
    ).warnings
    assert len(many) == len({*many}) and not any("platform h100" in text for text in many)


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
    many, one = (
        {"batch": [2, 4], "dtype": ["bf16"], "sequence": [64]},
        {"batch": [2, 4], "dtype": "bf16", "sequence": 64},
    )
    tables = [
        pk.sweep(pk.Transformer.bert, grid, "h100-sxm-8", progress=False).table()
        for grid in (many, one)
    ]
    assert tables[0].equals(tables[1])


def test_charts_have_a_line_for_each_of_the_others() -> None:
    found = pk.sweep(
        SMALL, {"batch": [2, 4], "platform": ["h100-sxm-8", "a100-sxm-8"]}, progress=False
    )
    chart = found.chart().to_dict()
    rows = [row for values in chart["datasets"].values() for row in values]
    assert {row["series"] for row in rows} == {"h100-sxm-8", "a100-sxm-8"}
    assert (
        found.chart("platform", "needs").to_dict()["layer"][-1]["encoding"]["x"]["field"]
        == "platform"
    )
    one = (
        pk.sweep(SMALL, {"dtype": ["bf16"], "batch": [2, 4]}, "h100-sxm-8", progress=False)
        .chart()
        .to_dict()
    )
    assert all(
        layer["encoding"][look]["legend"] is None
        for layer in one["layer"][-1:]
        for look in ("color", "shape")
    )


def test_closed_sums_are_the_event_loop() -> None:
    """200 random configurations, each by itself in the event loop of `predict`."""
    rng, shares = np.random.default_rng(15), []
    for ranks in (1, 4, 8, 64):
        heads, batch, length = (
            rng.integers(2, 17, 50),
            rng.integers(1, 65, 50),
            rng.integers(8, 1025, 50),
        )
        drawn = {
            "heads": heads,
            "hidden": 64 * heads,
            "batch": ranks * batch,
            "sequence": length,
            "dtype": "bf16",
        }
        grid, build = pandas.DataFrame(drawn), partial(pk.Transformer.gpt2, layers=2)
        both = [
            pk.sweep(build, grid, "h100-sxm-8x8", ranks=ranks, progress=False, events=e)
            for e in (False, True)
        ]
        shares += (both[0].table()["time"] / both[1].table()["time"] - 1).abs().to_list()
    assert len(shares) == 200 and max(shares) <= 1e-9


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid is {}"),
        (5, "grid is 5; it must be a pandas or polars frame, or lists by name"),
        ({"batch": {}}, "give values of an argument"),
        ({"batch": []}, "give values of an argument"),
        ({"batches": [8]}, "argument is 'batches'; known are"),
        ({"layers": [0]}, "layers is 0"),
    ],
)
def test_grids_that_make_no_sense_are_refused(grid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.sweep(pk.Transformer.bert, grid, "h100-sxm-8", progress=False)


def test_a_model_that_cannot_be_changed_says_what_to_give_instead() -> None:
    with pytest.raises(
        ValueError, match=r"grid names \['dim'\], which do not fit: .*functools.partial\(pk.DLRM"
    ):
        pk.sweep(pk.DLRM(rows=[1000] * 4, dim=16), {"dim": [64, 128]}, "h100-sxm-8", progress=False)
    batches = pk.sweep(
        pk.DLRM(rows=[1000] * 4, dim=16), {"batch": [64, 128]}, "h100-sxm-8", progress=False
    ).table()
    built = [
        pk.predict(pk.DLRM(rows=[1000] * 4, dim=16, batch=batch), "h100-sxm-8").time
        for batch in (64, 128)
    ]
    assert batches["time"].to_list() == pytest.approx(built, rel=1e-9)


def test_decision_figures() -> None:
    model = pk.Transformer.gpt2(batch=16, sequence=512, layers=4, dtype="bf16")
    r = pk.predict(model, "h100-sxm-8", ranks=4)
    assert r.throughput == {
        name: n / r.time for name, n in (("iterations", 1), ("samples", 16), ("tokens", 16 * 512))
    }
    paid = r.cost(2.5, tokens=1e9)
    assert (
        paid["cost"]
        == pytest.approx(2.5 * 4 * 1e9 / (16 * 512) * r.time / 3600)
        == 2.5 * paid["gpu_hours"]
    )
    drawn = r.cost(0, power=700, tokens=1e9)
    assert (
        drawn["energy_kwh"] == pytest.approx(0.7 * paid["gpu_hours"]) and "energy_kwh" not in paid
    )
    assert r.cost(2.5, tokens=1e9, epochs=3) == {
        name: pytest.approx(3 * value) for name, value in paid.items()
    }
    for wrong in ({"power": -1}, {"epochs": 0}):
        with pytest.raises(ValueError, match=r"(power|epochs) is"):
            r.cost(0, tokens=1e9, **wrong)
    shown = dict(next(part for heading, part in r.sections() if heading == "Time and memory"))
    assert (
        shown["tokens a second"] == f"{r.throughput['tokens']:,.0f}"
        and shown["share of the peak (MFU)"] == f"{r.mfu:.1%}"
    )
    products = 4 * 12 * 768**2 + 50257 * 768  # weights that multiply tokens
    scores = 4 * 2 * 512 * 768  # products with keys and values, half of them in the future
    assert r.mfu == pytest.approx(
        3 * 16 * 512 * (2 * products + scores) / (r.time * 4 * 989.4e12), rel=1e-2
    )
    again = pk.Transformer.gpt2(
        batch=16, sequence=512, layers=4, dtype="bf16", checkpoint=True
    ).graphs()[0]
    assert again.model_flops == model.graphs()[0].model_flops
    for amount in ({}, {"samples": 1, "tokens": 1}, {"epochs": 3}):
        with pytest.raises(
            ValueError,
            match=r"amount, as in samples=1e6, is .*known are iterations, samples, tokens",
        ):
            r.cost(2.5, **amount)


def list_reasons(build: Callable[..., Any], grid: dict[str, list[Any]], ranks: int) -> list[Any]:
    """Why each configuration of a grid is refused, one after the other."""
    reasons = []
    for values in product(*grid.values()):
        try:
            pk.predict(build(**dict(zip(grid, values, strict=True))), "h100-sxm-8", ranks=ranks)
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
            partial(pk.DLRM, rows=[1000] * 2, dim=16),
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
    assert any(expected) and not all(expected)
    assert found["error"].to_list() == expected
    assert found["time"].is_null().to_list() == [reason is not None for reason in expected]


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
    alone = [
        pk.predict(build(heads=heads, hidden=hidden), "h100-sxm-8", ranks=2).time
        for heads, hidden in product(*grid.values())
    ]
    assert found["time"].to_list() == pytest.approx(alone, rel=1e-9)
