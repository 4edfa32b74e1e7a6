"""Columns of frames say the unit of their numbers at the end of their names, and former names are still read."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import perfkit as pk
from perfkit import plots
from perfkit.ground.files import find_reference
from perfkit.readers.training_logs import parse_training_log
from tests import samples
from tests.test_training_logs import PRIMUS, write

pytestmark = pytest.mark.filterwarnings("ignore")

#: Ends of names that say a unit.
ENDINGS = (
    "_s",
    "_ns",
    "_bytes",
    "_percent",
    "_Gbps",
    "_flop_per_s_per_gpu",
    "_per_s",
    "_per_s_per_gpu",
    "_flop_per_byte",
)
#: Names that are units; `cost` is in the currency of the price that was given.
UNITS = {
    "seconds",
    "hours",
    "hours_as_predicted",
    "days",
    "gpu_hours",
    "nbytes",
    "flops",
    "cost",
}
#: Settings of strategies, models and grids, which are counts and shares.
SETTINGS = {
    *vars(pk.Strategy()),
    *("ranks", "batch", "sequence", "micro_batch", "rows", "dim", "pooling", "exponent"),
}
#: Sizes of operations, see `perfkit.workloads.columns.OperationSizes`: all but `flops` and `nbytes` are counts.
SIZES = {
    *("m", "n", "k", "elements", "lookups", "bags", "table", "launches", "calls", "bare"),
    *("group", "part"),
}
#: Counts, and numbers of ranks, steps, lines and operations.
COUNTS = {
    *("rank", "operation", "operations", "other_operations", "index", "order", "iteration"),
    *("iterations", "step", "line", "last", "matched", "shards", "tables", "runs", "nodes"),
    *("gpus", "adapters", "unique_rows", "ranks_of_node", "n"),
    *("most_zero", "vocabulary_multiple", "loss_chunks"),
}
#: Shares, ratios, logarithms of them, and what somebody chose as worth.
RATIOS = {
    *("share", "exposed", "kept", "efficiency", "goodput", "mfu", "chance", "gap", "ratio"),
    *("scale", "spread", "before", "factor", "elasticity", "left_out", "gain", "error", "worth"),
    *("noise", "relative_noise", "errors", "slower", "exposed_measured"),
    *("large_now", "large_after", "small_now", "small_after", "step_now", "step_after"),
}
ENDINGS_OF_RATIOS = ("_share", "_ratio", "_error")
PURE = SETTINGS | SIZES | COUNTS | RATIOS
#: Columns of rows that have their unit beside them, in the column `unit`.
BESIDE_UNIT = {"a", "b", "a_low", "a_high", "b_low", "b_high", "value", "stderr"}

GPT = pk.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")
DLRM = pk.DLRM(batch=4096, rows=[10**6, 10**5, 10**4], dim=64, embedding="fused")
RUNS = [
    {"tp": tp, "dp": 8 // tp, "micro_batch": n, "seconds": 3 / n}
    for tp in (1, 2, 4)
    for n in (1, 2)
]


@cache
def predict() -> pk.Prediction:
    return pk.predict(GPT, "h100-sxm-8", ranks=8)


@cache
def shard() -> pk.ShardingResult:
    return pk.shard(DLRM, "h100-sxm-8", ranks=2, steps=50)


@cache
def tune() -> pk.Tuning:
    return pk.tune(GPT, "a100-sxm-8", RUNS)


@cache
def read_trace() -> pk.Trace:
    return pk.read_trace([samples.FOLDER / f"step_rank{rank}.kineto.json" for rank in range(2)])


#: One result of each public class that gives frames.
RESULTS: dict[str, Callable[[], Any]] = {
    "Comparison": lambda: pk.Comparison.load(find_reference("measured", "h100-1.check-1.json")),
    "Deviation": lambda: predict().against(0.02),
    "Diagnosis": lambda: pk.diagnose(samples.FOLDER / "all_reduce_8_gpus.log"),
    "Exploration": lambda: pk.explore(GPT, "h100-sxm-8", ranks=8),
    "Exploration of plans": lambda: pk.explore(DLRM, "h100-sxm-8", 2),
    "Goodput": lambda: predict().cost(2.0, tokens=1e12, mtbf="llama-3", checkpoint=60.0),
    "Graph": lambda: GPT.graphs()[0],
    "MissingMeasurements": lambda: pk.what_to_measure("h100-sxm-8", GPT),
    "PlanJudgement": lambda: pk.judge_plan(DLRM, "h100-sxm-8", shard().plan, ranks=2, steps=50),
    "PlanPrice": lambda: shard().prediction,
    "Platform": lambda: pk.load_platform("h100-sxm-8"),
    "PlatformComparison": lambda: pk.compare("a100-sxm-8", "h100-sxm-8"),
    "Prediction": predict,
    "ShardingResult": shard,
    "Sweep": lambda: pk.sweep(GPT, {"batch": [8, 16]}, "h100-sxm-8", progress=False),
    "Sweep over ranks": lambda: pk.scaling(GPT, "h100-sxm-8", [1, 2]),
    "TableSet": lambda: pk.TableSet(pk.draw_tables(3), batch=64),
    "Trace": read_trace,
    "TrainingLog": lambda: parse_training_log(write(PRIMUS), file="a.log"),
    "Tuning": tune,
}
#: Arguments of methods that cannot be called without.
ARGUMENTS: dict[tuple[str, str], Any] = {
    ("Exploration", "cost"): lambda found: partial(found.cost, 2.0, tokens=1e9),
    ("Trace", "compare"): lambda trace: partial(trace.compare, predict()),
    ("Trace", "roofline"): lambda trace: partial(trace.roofline, "h100-sxm-8"),
    ("Tuning", "price"): lambda tuning: partial(tuning.price, RUNS),
}
#: Frames of public functions.
FUNCTIONS: dict[str, Callable[[], pl.DataFrame]] = {
    "allocate": lambda: pk.allocate({"one": GPT, "other": GPT}, "h100-sxm-8", 4),
    "fabrics": pk.fabrics,
    "platforms": pk.platforms,
    "stacks": pk.stacks,
}
#: Other columns of some frames.
FURTHER: dict[str, Callable[[], pl.DataFrame]] = {
    "costs with failures": lambda: pk.explore(GPT, "h100-sxm-8", ranks=8).cost(
        2.0, tokens=1e12, mtbf="llama-3", checkpoint=60.0
    ),
    "sensitivity": lambda: predict().sensitivity().table(),
    "account of an operation": lambda: predict().explain_operation(10).table(),
    "changes that help a trace": lambda: read_trace().fixes().table(),
    "ranks of a trace": lambda: read_trace().jitter().by_rank(),
    "wait for ranks of a trace": lambda: read_trace().jitter().table(),
    "collectives on nodes": lambda: read_trace().collectives(1),
    "stragglers by rank": lambda: read_trace().stragglers("rank"),
    "modules in time": lambda: predict().timeline("module"),
    "a recorded rank": lambda: read_trace().timeline("module"),
}


def gives_frame(member: Any) -> bool:
    """Whether a function, a property or a cached property says that it returns a frame."""
    for name in ("fget", "func"):
        member = getattr(member, name, None) or member
    return getattr(member, "__annotations__", {}).get("return") == "polars.DataFrame"


def list_members(kind: type) -> Iterator[str]:
    """Names of methods, properties and fields of a class that are frames."""
    for name in dir(kind):
        if not name.startswith("_") and gives_frame(inspect.getattr_static(kind, name, None)):
            yield name
    for name, stated in inspect.get_annotations(kind).items():
        if stated == "polars.DataFrame" and not name.startswith("_"):
            yield name


def list_frames() -> Iterator[tuple[str, pl.DataFrame]]:
    """Every frame that a public function or class gives, with its name."""
    for name, call in (FUNCTIONS | FURTHER).items():
        yield name, call()
    for title, make in RESULTS.items():
        kind, result = title.split(" ")[0], make()
        for member in list_members(getattr(pk, kind)):
            value = getattr(result, member)
            if (kind, member) in ARGUMENTS:
                value = ARGUMENTS[kind, member](result)
            yield f"{title}.{member}", value() if callable(value) else value


def says_unit(column: str) -> bool:
    """Whether a column ends with a unit, or is a pure number."""
    return column in UNITS | PURE or column.endswith((*ENDINGS, *ENDINGS_OF_RATIOS))


def test_every_public_class_and_function_with_frames_is_looked_at() -> None:
    classes, functions = set(), set()
    for name in pk.__all__:
        found = getattr(pk, name)
        if inspect.isclass(found) and any(list_members(found)):
            classes.add(name)
        elif not inspect.isclass(found) and gives_frame(found):
            functions.add(name)
    assert classes == {title.split(" ")[0] for title in RESULTS}
    assert functions == set(FUNCTIONS)


def test_columns_of_numbers_say_their_unit_or_have_none() -> None:
    silent = []
    for name, frame in list_frames():
        for column, kind in frame.schema.items():
            has_unit = "unit" in frame.columns and column in BESIDE_UNIT
            if kind.is_numeric() and not says_unit(column) and not has_unit:
                silent.append(f"{name}: {column}")
    assert not silent, "end the name with its unit, or add it to the lists of pure numbers"


def test_a_name_without_unit_is_found() -> None:
    assert not any(map(says_unit, ("time", "low", "needs", "bandwidth", "memory", "bubble")))
    assert all(map(says_unit, ("time_s", "needs_bytes", "tokens_per_s", "ranks", "idle_share")))


# -- files that people have


def rename_back(frame: pl.DataFrame) -> pl.DataFrame:
    """A sweep as it was saved before names said units."""
    former = {"time_s": "time", "low_s": "low", "high_s": "high", "needs_bytes": "needs"}
    return frame.rename(former)


@pytest.mark.parametrize(("today", "former"), [("time_s", "time"), ("needs_bytes", "needs")])
def test_a_saved_sweep_with_former_names_is_drawn_alike(
    tmp_path: Path, today: str, former: str
) -> None:
    frame = RESULTS["Sweep"]().table().drop("error")
    rename_back(frame).write_csv(tmp_path / "sweep.csv")
    read = pl.read_csv(tmp_path / "sweep.csv")
    drawn = plots.sweep_lines(read, x="batch", y=former).to_dict()
    assert drawn == plots.sweep_lines(frame, x="batch", y=today).to_dict()
    assert plots.sweep_lines(read, x=former, y="samples_per_s").to_dict()["layer"]


def test_a_column_of_ones_own_keeps_its_name_on_a_chart() -> None:
    rows = [{"batch": batch, "memory": 2.0 * batch} for batch in (1, 2)]
    assert "memory:Q" not in str(plots.sweep_lines(rows, x="batch", y="batch").to_dict())
    drawn = plots.sweep_lines(rows, x="batch", y="memory").to_dict()
    assert drawn["layer"][0]["encoding"]["y"]["field"] == "memory"


def test_a_saved_table_of_runs_with_former_names_is_fitted_again(tmp_path: Path) -> None:
    table = tune().table()
    table.write_csv(tmp_path / "runs.csv")
    table.rename({"predicted_s": "predicted"}).write_csv(tmp_path / "former.csv")
    again = [pl.read_csv(tmp_path / name) for name in ("runs.csv", "former.csv")]
    for frame in again:
        assert pk.tune(GPT, "a100-sxm-8", frame).table().equals(table)
