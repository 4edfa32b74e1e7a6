"""Exploring strategies: what fits is ranked, the front holds what nothing beats, and faults are
named."""

from dataclasses import replace
from itertools import product
from typing import Any

import polars as pl
import pytest

import perfkit as pk
from perfkit.exploration.strategies import WORDS_OF_PARTS
from perfkit.ground.units import format_bytes
from perfkit.platform import collective_costs
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.strategies import PARTS, price_strategies

GPT = pk.Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True, fused=True)


@pytest.fixture(scope="module")
def both() -> pk.Exploration:
    """On 8 or 16 ranks."""
    return pk.explore(GPT, "a100-sxm-8x2", [8, 16])


def test_what_fits_is_ranked_and_priced_as_alone() -> None:
    found = pk.explore(GPT, "a100-sxm-8x2", [8, 16], memory=40e9)
    frame = found.table()
    assert 20 < len(frame) < found.tried
    assert (frame["needs_bytes"] + frame["reserve_bytes"]).max() <= 40e9
    assert frame["time_s"].is_sorted()
    assert set(frame["ranks"]) == {8, 16}
    assert (frame["low_s"] < frame["time_s"]).all()
    parts = frame.select([f"{part}_s" for part in PARTS])
    assert parts.sum_horizontal().to_list() == pytest.approx(frame["time_s"].to_list())
    alone = price_strategies(GPT, pk.load_platform("a100-sxm-8x2"), pk.Strategy.stack([found.best]))
    assert float(alone["time"][0]) == pytest.approx(frame["time_s"][0])
    assert found.best.ranks == 16


def test_given_strategies_are_tried_where_they_can_be(both: pk.Exploration) -> None:
    too_large = replace(both.best, micro_batch=64)
    found = pk.explore(GPT, "a100-sxm-8x2", strategies=[both.best, too_large])
    assert found.tried == 1
    assert len(found.table()) == 1
    assert found.best == both.best


def test_times_of_messages_are_asked_for_without_their_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The spread of a collective and its warnings take longer than its time, and no strategy uses
    them: a collective that is not to be shown asks for times alone."""

    def fail(*arguments: Any) -> Any:
        raise AssertionError("nobody asked how sure a collective is")

    monkeypatch.setattr(collective_costs, "spread_beyond", fail)
    monkeypatch.setattr(collective_costs, "choose_sample", fail)
    assert pk.explore(GPT, "h100-sxm-8x8", 64).best.ranks == 64


def test_strategies_without_products_on_tensor_cores_are_priced() -> None:
    """Sizes of many strategies are arrays also where none is a size of such a product."""
    model = pk.Transformer.preset("gpt3-1.3b", batch=64, dtype="fp32")
    assert pk.explore(model, "h100-sxm-8", 8).best.ranks == 8


def test_the_front_holds_what_nothing_beats_in_time_memory_and_ranks(both: pk.Exploration) -> None:
    names = ["time_s", "needs_bytes", "ranks"]
    rows = both.table().select(names).rows()
    front = both.front().select(names).rows()

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    for of_front in front:
        assert not any(beats(row, of_front) for row in rows), of_front
    assert front[0] == rows[0]
    assert set(both.front()["ranks"]) == {8, 16}
    assert len(front) < len(rows)


def read_points(chart: Any) -> list[dict[str, Any]]:
    """Points of a chart of strategies: all rows with a description of the strategy."""
    points: dict[str, dict[str, Any]] = {}
    for rows in chart["datasets"].values():
        for row in rows:
            if "strategy" in row:
                points[str(row)] = row
    return [*points.values()]


def read_labels(chart: Any) -> list[str]:
    """Texts of the labels of a chart."""
    rows = [row for rows in chart["datasets"].values() for row in rows]
    return [row["label"] for row in rows if "strategy" not in row and "label" in row]


def test_the_chart_shows_the_front(both: pk.Exploration) -> None:
    chart = both.chart().to_dict()
    front = both.front()
    fastest = dict(front.group_by("ranks").agg(pl.min("time_s")).rows())
    expected = [
        row
        for row in front.select("needs_bytes", "time_s", "ranks").rows()
        if row[1] <= 4 * fastest[row[2]]
    ]
    shown = [(row["needs_bytes"], row["time_s"], row["ranks"]) for row in read_points(chart)]
    assert sorted(shown) == sorted(expected)
    assert all("Strategy(tp=" in row["strategy"] for row in read_points(chart))
    subtitle = chart["title"]["subtitle"]
    assert "gpt3-6.7b" in subtitle[0]
    slow = len(front) - len(expected)
    assert slow > 0
    assert subtitle[1].startswith(f"{slow} more that need less memory take over 4 times as long")


def test_the_chart_names_ten_strategies_in_short(both: pk.Exploration) -> None:
    labels = read_labels(both.chart().to_dict())
    assert len(labels) == len(set(labels)) == 10
    assert both.best.label in labels
    assert all(" ckpt" in label or "(" not in label for label in labels)


def test_yours_stands_beside_the_fastest() -> None:
    yours = pk.Strategy(dp=8, zero=3, checkpoint="full")
    found = pk.explore(GPT, "h100-sxm-8", 8, yours=yours)
    assert found.yours is not None
    assert found.yours.way == yours
    with keep_quiet():
        predicted = pk.predict(GPT, "h100-sxm-8", strategy=yours)
    assert found.yours.row["time_s"] == pytest.approx(predicted.time, rel=0.05)
    assert found.yours.shortage is None
    assert "yours: fsdp · full ckpt" in read_labels(found.chart().to_dict())
    line = next(line for line in found.explain().splitlines() if line.startswith("  yours"))
    longer = found.yours.row["time_s"] / found.table()["time_s"][0] - 1
    assert f"{longer:+.1%} beside the fastest" in line
    faster = (found.table()["time_s"] < found.yours.row["time_s"]).sum()
    assert f"{faster} of {len(found.table())} that fit are faster" in line
    headings = [heading for heading, _ in found.sections()]
    assert "Yours beside the fastest" in headings


def test_the_settings_of_a_model_are_yours() -> None:
    plain = pk.explore(GPT, "h100-sxm-8", 8)
    assert plain.yours is None
    assert "yours" not in plain.explain()
    own = replace(GPT, parallel="fsdp", checkpoint=True)
    marked = pk.explore(own, "h100-sxm-8", (4, 8))
    assert marked.yours is not None
    expected = pk.Strategy(dp=8, zero=3, micro_batch=GPT.batch // 8, checkpoint="full")
    assert marked.yours.way == expected
    # what divides no batch is named, and the search goes on
    odd = pk.explore(replace(own, accumulate=3), "h100-sxm-8", 8)
    assert odd.yours is None
    assert "the settings of the model" in odd.left_out[0]


def test_yours_that_does_not_fit_says_so_and_one_that_does_not_divide_is_refused() -> None:
    large = pk.Strategy(dp=8, micro_batch=8)
    found = pk.explore(GPT, "h100-sxm-8", 8, yours=large)
    assert found.yours is not None
    assert found.yours.shortage is not None
    assert "does not fit, it needs" in found.explain()
    with pytest.raises(ValueError, match=r"yours cannot be priced: .*tp=7"):
        pk.explore(GPT, "h100-sxm-8", 8, yours=pk.Strategy(tp=7))
    with pytest.raises(ValueError, match="ranks of yours is 16"):
        pk.explore(GPT, "h100-sxm-8", 8, yours=pk.Strategy(dp=16))


def test_a_faster_strategy_that_is_too_large_is_named(both: pk.Exploration) -> None:
    assert both.too_large is not None
    assert both.too_large.shortage is not None
    assert both.too_large.row["time_s"] == pytest.approx(both.doubled, rel=0.05)
    assert "faster but too large: Strategy(" in both.explain()
    roomy = pk.explore(GPT, "h100-sxm-8", 8, memory=10e12)
    assert roomy.too_large is None
    assert "too large" not in roomy.explain()


def test_yours_of_a_dlrm_is_a_plan() -> None:
    plan = pk.Plan.round_robin(len(DLRM.tables), ranks=2)
    found = pk.explore(DLRM, "h100-sxm-8", 2, yours=plan)
    assert found.yours is not None
    assert found.yours.label == "table_wise · copied"
    assert any(
        text.startswith("yours: table_wise") for text in read_labels(found.chart().to_dict())
    )
    with pytest.raises(ValueError, match="yours is"):
        pk.explore(DLRM, "h100-sxm-8", 2, yours=pk.Strategy(dp=2))


def test_the_report_shows_what_decides(both: pk.Exploration) -> None:
    parts = [part for _, part in both.sections()]
    platforms = [part.name for part in parts if isinstance(part, pk.Platform)]
    assert platforms == ["a100-sxm-8x2 by datasheet"]
    columns = next(part.columns for part in parts if hasattr(part, "columns"))
    assert columns[:4] == ["time_s", "low_s", "high_s", "needs_bytes"]
    assert "tp" in columns
    assert "work_s" not in columns


def test_the_chart_names_plans_and_ways_to_share_mlps() -> None:
    plans = pk.explore(DLRM, "h100-sxm-8", 2)
    known = set()
    for tables, mlps, ranks in plans.table().select("tables", "mlps", "ranks").rows():
        known.add(f"tables {tables}, mlps {mlps}, ranks {ranks}")
    points = read_points(plans.chart().to_dict())
    assert points
    for point in points:
        assert point["strategy"] in known


def test_days_and_money_of_a_training(both: pk.Exploration) -> None:
    costs = both.cost(2.0, tokens=1e11)
    best = both.table().row(0, named=True)
    fastest = costs.sort("time_s").row(0, named=True)
    assert fastest["days"] == pytest.approx(1e11 / (64 * 2048) * best["time_s"] / 86400)
    assert fastest["cost"] == pytest.approx(2.0 * fastest["days"] * 24 * fastest["ranks"])
    assert costs["cost"].is_sorted()
    used = both.table()["time_s"] * both.table()["ranks"]
    assert costs["time_s"][0] * costs["ranks"][0] == used.min()


def test_words_say_why_the_best_one_is_best(both: pk.Exploration) -> None:
    text = both.explain()
    best = both.table().row(0, named=True)
    assert "the fastest of " in text and " strategies that fit, of " in text
    assert "instead of" in text
    assert "mostly" in text
    parts_line = text.split("\n")[1]
    for part in PARTS:
        word = WORDS_OF_PARTS.get(part, part)
        takes_time = best[f"{part}_s"] > 0
        assert (f" {word} " in parts_line) == takes_time


def test_words_say_how_many_others_may_be_faster(both: pk.Exploration) -> None:
    best = both.table().row(0, named=True)
    near = both.table().filter(pl.col("time_s") <= best["high_s"]).height - 1
    assert near > 1
    line = both.explain().split("\n")[2]
    beginning = f"  others inside its interval, which may be faster: {near}; with twice "
    assert line.startswith(beginning)
    only_the_best = replace(both, frame=both.table()[:1])
    assert "which may be faster: 0; with" in only_the_best.explain()


def test_words_say_what_twice_the_memory_gives(both: pk.Exploration) -> None:
    more = pk.explore(GPT, "a100-sxm-8x2", [8, 16], memory=160e9).table()["time_s"][0]
    assert both.doubled == pytest.approx(more)
    gain = more / both.table()["time_s"][0] - 1
    assert f"memory: {gain:+.1%}" in both.explain().split("\n")[2]


def test_words_name_the_best_with_another_share_of_tensors(both: pk.Exploration) -> None:
    """And in brackets what else it changes."""
    best = both.table().row(0, named=True)
    other = both.table().filter(pl.col("tp") != best["tp"]).row(0, named=True)
    lines = both.explain().split("\n")
    line = next(line for line in lines if line.startswith("  tp "))
    named = {}
    for words in line[line.index("(") + 1 : line.index(")")].split(", "):
        name, value = words.split()[:2]
        named[name] = value
    changed = {}
    for name in [*vars(both.best), "stack"]:
        if name != "tp" and other[name] != best[name]:
            changed[name] = str(other[name])
    assert named == changed
    longer = other["time_s"] / best["time_s"] - 1
    assert line.endswith(f"): {longer:+.1%}, mostly TP communication")


@pytest.mark.parametrize(
    ("stages", "chunks"),
    [(1, {1}), (2, {1, 2, 4, 16}), (4, {1, 2, 4, 8}), (8, {1, 2, 4}), (16, {1, 2})],
)
def test_stages_are_tried_in_one_chunk_two_four_and_one_for_each_layer(
    both: pk.Exploration, stages: int, chunks: set[int]
) -> None:
    """Of 32 layers in all, where they can be split so."""
    tried = both.table().filter(pl.col("pp") == stages)
    assert set(tried["chunks"]) == chunks
    is_split = tried["chunks"] > 1
    assert (is_split == (tried["schedule"] == "interleaved")).all()


#: Tables that no single way suits: a large one, one with many lookups, a small one.
DLRM = pk.DLRM(
    rows=[4_000_000, 200_000, 1000], dim=64, pooling=[2, 40, 1], batch=16384, embedding="fused"
)
#: Tables wide enough to split their columns.
WIDE_DLRM = pk.DLRM(
    rows=[4_000_000, 200_000, 1000], dim=512, pooling=[2, 40, 1], batch=16384, embedding="fused"
)


def test_the_best_plan_is_that_of_all_placements() -> None:
    ways: list[int | pk.Placement] = [
        0,
        1,
        pk.Placement("data_parallel", (0, 1)),
        pk.Placement("row_wise", (0, 1)),
        pk.Placement("column_wise", (0, 1)),
    ]
    plans = [pk.Plan(2, owners) for owners in product(ways, repeat=3)]
    found, all_plans = (
        pk.explore(WIDE_DLRM, "h100-sxm-8", 2),
        pk.explore(WIDE_DLRM, "h100-sxm-8", strategies=plans),
    )
    assert all_plans.tried == len(all_plans.table()) == 125
    with keep_quiet():
        least = min(pk.predict(WIDE_DLRM, "h100-sxm-8", ranks=2, plan=plan).time for plan in plans)
        one = pk.predict(WIDE_DLRM, "h100-sxm-8", ranks=2, plan=found.plans[0])
    assert all_plans.table()["time_s"][0] == pytest.approx(least, rel=1e-9)
    assert least <= found.table()["time_s"][0] <= 1.01 * least
    row = found.table().row(0, named=True)
    assert found.best == found.plans[0]
    assert row["time_s"] == pytest.approx(one.time)
    assert (row["low_s"], row["high_s"]) == pytest.approx(one.interval())
    assert row["needs_bytes"] == one.memory().total
    assert row["samples_per_s"] == pytest.approx(16384 / one.time)


@pytest.fixture(scope="module")
def plans_of_nodes() -> Any:
    """Plans of wide tables on part of a node and on two nodes."""
    return pk.explore(WIDE_DLRM, "h100-sxm-8x2", [4, 16])


def test_columns_are_split_where_shards_are_wide_enough(plans_of_nodes: Any) -> None:
    """Of 512 columns 4 ranks have 128 each; 16 ranks would have 32."""
    frame = plans_of_nodes.table()
    placed = {(row["ranks"], row["tables"]) for row in frame.to_dicts()}
    assert (4, "column_wise") in placed
    assert (16, "column_wise") not in placed


def test_plans_that_do_not_fit_are_not_ranked(plans_of_nodes: Any) -> None:
    found = plans_of_nodes
    kinds = {"searched", "column_wise", "row_wise", "data_parallel", "table_wise", "round_robin"}
    frame, text = found.table(), found.explain()
    assert kinds <= {*frame["tables"]}
    assert {*frame["ranks"]} == {4, 16}
    assert frame["time_s"].round(12).is_sorted()
    assert "table_row_wise" in {*frame.filter(pl.col("ranks") == 16)["tables"]}
    assert "tables searched instead of row_wise" in text
    assert "ranks 4 instead of 16" in text
    parts = frame.select(
        "GEMM_s",
        "embedding_s",
        "communication_s",
        "memory_s",
        "host_s",
        "imbalance_s",
        "attention_s",
        "convolution_s",
        "transfer_s",
    )
    assert parts.sum_horizontal().to_list() == pytest.approx(frame["time_s"].to_list())
    less = pk.explore(WIDE_DLRM, "h100-sxm-8x2", [4, 16], memory=3e9)
    assert 0 < len(less.table()) < less.tried
    assert (less.table()["needs_bytes"] <= 3e9).all()
    assert "data_parallel" not in {*less.table()["tables"]}


def test_mlps_are_shared_with_the_best_plans_of_tables() -> None:
    """Large layers on slow links: shared in nodes; what is shared needs less memory, and fits where
    copies do not."""
    about: dict[str, Any] = {
        "dim": 64,
        "pooling": 2,
        "features": 64,
        "batch": 4096,
        "embedding": "fused",
    }
    large = pk.DLRM(
        rows=[1000, 1000, 1000, 1000], bottom=(4096, 4096), top=(4096, 4096, 4096), **about
    )
    found = pk.explore(large, "a100-sxm-8x2", 16)
    frame, ways = (
        found.table(),
        {"copied", "zero 1", "zero 3", "zero 3 shards 8", "tp 8", "tp 8 zero 3"},
    )
    assert {*frame["mlps"]} == ways
    assert frame["mlps"][0] in (
        "tp 8",
        "zero 3 shards 8",
    )
    assert "mlps copied instead of" in found.explain()
    assert len(frame) == found.tried
    with keep_quiet():
        one = pk.predict(large, "a100-sxm-8x2", ranks=16, plan=found.best)
    assert found.best.mlps
    assert one.time == pytest.approx(frame["time_s"][0])
    shown = next(part for heading, part in found.sections() if heading)
    assert len({*shown["tables"]}) > 1
    assert "ranks" not in shown.columns
    copied = frame.filter(pl.col("mlps") == "copied")["needs_bytes"].min()
    less = pk.explore(large, "a100-sxm-8x2", strategies=found.plans, memory=0.9 * copied).table()
    assert 0 < len(less) < len(frame)
    assert "copied" not in {*less["mlps"]}
    again = pk.explore(
        large, "a100-sxm-8x2", strategies=[found.best, replace(found.best, mlps=None)]
    )
    assert again.table()["tables"].to_list() == ["plan 0", "plan 1"]
    assert again.best == found.best


@pytest.mark.parametrize(
    ("model", "ranks", "changes", "message"),
    [
        (GPT, 64, {}, "ranks is 64"),
        (
            GPT,
            8,
            {"memory": 1e9},
            "no strategy on 8 ranks fits into 1 GB; the least takes .* GB; from Strategy",
        ),
        (GPT, 8, {"memory": 80}, "the least takes .* GB; memory is 80 bytes; give it in bytes"),
        (GPT, 8, {"strategies": []}, "strategies is empty; give one or more"),
        (GPT, None, {"strategies": []}, "strategies is empty; give one or more"),
        (
            GPT,
            8,
            {"strategies": [pk.Strategy(dp=3), pk.Strategy(dp=4)]},
            r"none of the strategies can be priced on 8 ranks: Strategy\(.*dp=3\) takes 3 ranks, and "
            "1 more; leave ranks out",
        ),
        (
            GPT,
            8,
            {"strategies": [pk.Strategy(dp=8, micro_batch=3)]},
            r"cannot share batch of the model, \d+; dp x micro_batch, 8 x 3, must divide it",
        ),
        (GPT, [8, 0], {}, "ranks is 0"),
        (GPT, 2.5, {}, "ranks is 2.5"),
        (GPT, None, {}, "ranks is None; give"),
        (GPT, [], {}, r"ranks is \[\]; give"),
        (DLRM, [4, 8], {"memory": 1e7}, "no strategy on 4 or 8 ranks fits into 10 MB; the least"),
        (
            DLRM,
            4,
            {"strategies": [pk.Plan.round_robin(3, ranks=2)]},
            "none of the strategies can be priced on 4 ranks: plan 0 takes 2 ranks",
        ),
        (DLRM, None, {"strategies": [pk.Strategy(dp=2)]}, "strategies"),
    ],
)
def test_what_cannot_be_explored(
    model: Any, ranks: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pk.explore(model, "a100-sxm-8", ranks, **changes)


@pytest.mark.parametrize(("dtype", "told"), [("fp32", 1), ("bf16", 0), ("tf32", 0)])
def test_idle_tensor_cores_are_told(dtype: str, told: int) -> None:
    gpt = pk.Transformer.gpt2(batch=64, sequence=512, dtype=dtype)
    found = pk.explore(gpt, "a100-sxm-8", 8)
    assert sum("without tensor cores" in text for text in found.warnings) == told
    assert ("without tensor cores" in found.explain()) == bool(told)


def test_warnings_are_those_of_the_best_strategy() -> None:
    gpt = pk.Transformer.preset("gpt3-1.3b", batch=32, sequence=1024, dtype="bf16", fused=True)
    slow = pk.load_platform("h100-sxm-8x2")
    strategies = [pk.Strategy(tp=2, pp=4, dp=2, micro_batch=4), pk.Strategy(tp=8, pp=2)]
    found = pk.explore(gpt, slow, strategies=strategies)
    with keep_quiet():
        best = pk.predict(gpt, slow, strategy=found.best)
    assert found.warnings == best.warnings
    assert any("send_recv" in text for text in found.warnings)
    assert f"warning: {found.warnings[0]}" in " ".join(found.explain().split())
    # of many micro-batches two are asked about, which have the same kernels and messages
    many = pk.explore(replace(gpt, batch=2048), slow, strategies=strategies[:1])
    assert many.warnings
    for text in many.warnings:
        assert text.removesuffix(" (of 2 micro-batches)") in best.warnings
        assert text.endswith(" (of 2 micro-batches)")


def test_graphs_leave_out_the_host() -> None:
    gpt = pk.Transformer.preset("gpt3-1.3b", batch=64, sequence=512, dtype="bf16", fused=True)
    strategies = [
        pk.Strategy(dp=8, zero=zero, micro_batch=4, checkpoint="full") for zero in (0, 1, 3)
    ]
    strategies += [
        pk.Strategy(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True),
        pk.Strategy(pp=4, dp=2, schedule="interleaved", chunks=2),
        pk.Strategy(pp=2, cp=2, dp=2, schedule="zero_bubble", zero=1),
        pk.Strategy(cp=4, dp=2, checkpoint="selective"),
    ]
    for strategy in strategies:
        eager = pk.explore(gpt, "h100-sxm-8", strategies=[strategy]).table()
        graphs = pk.explore(gpt, "h100-sxm-8", strategies=[strategy], execution="graphs").table()
        with keep_quiet():
            events = pk.predict(gpt, "h100-sxm-8", strategy=strategy, execution="graphs")
        assert graphs["host_s"][0] == pytest.approx(0.0, abs=1e-12)
        assert eager["host_s"][0] > 1e-3
        assert graphs["time_s"][0] < eager["time_s"][0]
        assert graphs["time_s"][0] == pytest.approx(events.time, rel=0.01)


def test_warnings_are_those_of_the_best_plan() -> None:
    found = pk.explore(pk.DLRM(batch=4096), "a100-sxm-8", 8)
    with keep_quiet():
        best = pk.predict(pk.DLRM(batch=4096), "a100-sxm-8", ranks=8, plan=found.best)
    assert found.warnings == best.warnings
    assert found.warnings


@pytest.mark.parametrize(
    "short",
    [
        pk.Transformer.vit("vit-b16", batch=512, dtype="bf16", mixed=True),
        pk.Transformer.vit("vit-l16", batch=512, dtype="bf16", mixed=True),
        pk.Transformer.preset("bert-large", batch=512, sequence=128, dtype="bf16", mixed=True),
    ],
)
def test_short_sequences_are_tried_in_larger_micro_batches(short: pk.Transformer) -> None:
    """16 short sequences leave an H100 waiting for its host."""
    found = pk.explore(short, "h100-sxm-8", 8)
    by_hand = pk.Strategy(dp=8, zero=1, micro_batch=64)
    with keep_quiet():
        time_by_hand = pk.predict(short, "h100-sxm-8", strategy=by_hand).time
    assert found.table()["time_s"][0] <= 1.01 * time_by_hand
    assert found.best.micro_batch > 16


def test_long_sequences_are_tried_in_micro_batches_of_32768_tokens() -> None:
    long = pk.Transformer.preset("gpt2", batch=512, sequence=1024, dtype="bf16", mixed=True)
    assert pk.explore(long, "h100-sxm-8", 8).table()["micro_batch"].max() == 32


def test_a_search_that_finds_nothing_names_the_field_that_no_strategy_fits() -> None:
    model = pk.Transformer.preset("gpt2", batch=16, optimizer_in_backward=True)
    with pytest.raises(
        ValueError, match=r"fits optimizer_in_backward of the model, True: hooks.*one rank"
    ):
        pk.explore(model, "h100-sxm-8", 8)


def test_a_search_that_finds_nothing_names_the_commonest_reason() -> None:
    with pytest.raises(
        ValueError, match=r"fits batch of the model, 64: dp x micro_batch, 7 x 1, must divide it"
    ):
        pk.explore(GPT, "a100-sxm-8", 7)
    # three layers, heads and sequences: each way to share them on 8 ranks is refused by a field of its own
    odd = pk.Transformer.gpt2(
        batch=3, sequence=27, layers=3, heads=3, hidden=192, vocabulary=999, dtype="bf16"
    )
    with pytest.raises(
        ValueError,
        match=r"divides the model; \d+ of \d+ that are tried do not fit \w+ of it, \d+: ",
    ):
        pk.explore(odd, "a100-sxm-8", 8)


def test_where_nothing_fits_an_offload_of_the_smallest_strategy_is_named() -> None:
    """Groups of layers free a little, and cannot be joined with weights on the host."""
    llama = pk.Transformer.preset(
        "llama-3-8b", batch=4, sequence=8192, dtype="bf16", mixed=True, fused=True
    )
    offloaded = pk.Strategy(
        tp=8, checkpoint="full", sequence_parallel=True, zero=3, offload="parameters"
    )
    [needs] = pk.explore(llama, "h100-sxm-8", strategies=[offloaded]).table()["needs_bytes"]
    with pytest.raises(ValueError, match="is not enough, nor is offload=") as caught:
        pk.explore(llama, "h100-sxm-8", 8, memory=5e9)
    message = str(caught.value)
    least = replace(offloaded, zero=0, offload="none")
    freed = pk.explore(llama, "h100-sxm-8", strategies=[least]).table()["needs_bytes"][0] - needs
    assert f"from {least} checkpoint_group=" in message
    assert f"nor is offload='parameters' with zero=3 alone (frees {format_bytes(freed)})" in message
    # updates of SGD on a host were never published
    with pytest.raises(ValueError, match="is not enough") as refused:
        pk.explore(replace(llama, optimizer="sgd"), "h100-sxm-8", 8, memory=5e9)
    assert "offload" not in str(refused.value)


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adagrad", "adamw", "adamw_8bit", "muon", "adafactor"]
)
def test_where_nothing_fits_each_optimizer_has_advice(optimizer: str) -> None:
    """``fused=True`` is tried of those alone that have such a kernel; others refuse it."""
    model = pk.Transformer.gpt2(batch=8, layers=2, dtype="bf16", optimizer=optimizer)
    with pytest.raises(
        ValueError, match=r"no strategy on 1 ranks fits into 500 MB.* take "
    ) as caught:
        pk.explore(model, "h100-sxm-8", 1, memory=0.5e9)
    assert "fused=False" not in str(caught.value)


def test_memory_with_its_reserve_is_set_beside_what_it_must_fit() -> None:
    """GiB of a device of so many GB, or what was stated: no row says that more fits into less."""
    gpt = pk.Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True, fused=True)
    for memory, most in ((None, "85.9 GB, the GiB of a device of 80 GB"), (40e9, "40 GB")):
        found = pk.explore(gpt, "a100-sxm-8", 8, memory=memory)
        [line] = [text for text in found.explain().split("\n") if "with its reserve" in text]
        assert line.endswith(f" of {most}")
        assert (
            found.frame["needs_bytes"][0] + found.frame["reserve_bytes"][0] <= found.room.reserved
        )
