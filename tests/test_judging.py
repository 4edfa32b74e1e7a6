"""A plan beside the best that is found and beside what no plan can beat."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.tables import EmbeddingTable

TABLES = pk.TableSet(
    tuple(EmbeddingTable(10**6, 128, 20.0, name=f"t{number}", module="m") for number in range(4)),
    batch=65_536,
    embedding="fused",
)
HEAPED = Plan(4, (0, 0, 0, 1))


def judge(plan: object = HEAPED, **keywords: object) -> pk.PlanJudgement:
    """Judge a plan of `TABLES`."""
    return pk.judge_plan(TABLES, "h100-sxm-8", plan, steps=50, **keywords)  # type: ignore[arg-type]


def test_three_times_are_those_of_price_search_and_bound() -> None:
    judged = judge()
    price = pk.price_plan(TABLES, "h100-sxm-8", HEAPED)
    found = pk.shard(TABLES, "h100-sxm-8", ranks=4, steps=50)
    assert judged.yours.time == price.time
    assert judged.found.plan == found.plan
    assert judged.bound == found.bound
    assert judged.best is judged.found.prediction
    assert judged.gain == pytest.approx(1 - found.prediction.time / price.time)
    assert 0.3 < judged.gain < 0.7, "three tables on a rank instead of one"
    times = r"yours [\d.]+ .s \(.* to .*\), best found [\d.]+ .s \(.* to .*\), nothing better than .* exists"
    assert re.fullmatch(times, judged.headline())
    assert "best move of one shard of yours: t0 from rank 0 to rank" in judged.explain()
    assert judged.table()["yours"].to_list() == ["table_wise"] * 4


def test_the_best_plan_is_named_so() -> None:
    spread = judge(Plan.round_robin(4, ranks=4))
    assert spread.gain == 0.0
    assert ", the best that was found, nothing better than" in spread.headline()


def test_a_plan_that_does_not_fit_is_not_the_best() -> None:
    judged = judge(memory=1.2e9)
    assert not judged.yours.fits
    assert judged.best is judged.found.prediction
    assert ", which does not fit, best found" in judged.headline()


def test_bounds_hold_for_plans_with_narrow_shards() -> None:
    quarters = Placement("column_wise", (0, 1, 2, 3), (32,) * 4)
    judged = judge(Plan(4, (quarters,) * 4))
    assert judged.bound <= judged.yours.time
    [warning] = judged.warnings
    assert "a shard of 't0' with 32 columns, fewer than 128, and so of 3 other tables" in warning
    assert warning in " ".join(judged.explain().split())
    assert not judge().warnings


def test_plans_of_torchrec_are_judged_as_objects_json_and_text(tmp_path: Path) -> None:
    modules = HEAPED.to_torchrec(TABLES.tables)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(modules))
    saved = HEAPED.save(tmp_path / "saved.json")
    head = "#   FQN    Sharding   Compute Kernel   Emb Dim (CW Dim)   Hash Size   Ranks   #"
    rows = [
        f"#   m.t{n}   TW   fused   128   1000000   {rank}   #"
        for n, rank in enumerate((0, 0, 0, 1))
    ]
    for plan in (modules, {"plan": modules}, file, str(file), saved, [head, *rows]):
        price = pk.price_plan(TABLES, "h100-sxm-8", plan, ranks=4)
        assert price.plan == HEAPED
    for plan in (modules, file):  # nothing says how many ranks there are
        assert pk.price_plan(TABLES, "h100-sxm-8", plan).plan.ranks == 8
    beyond = Plan(16, (0, 0, 0, 9)).to_torchrec(TABLES.tables)
    with pytest.raises(ValueError, match=r"no table is on every rank; pass ranks=.* of ranks$"):
        pk.price_plan(TABLES, "h100-sxm-8", beyond)
    with pytest.raises(ValueError, match="the plan has 4 ranks, and ranks is 8; leave ranks out"):
        judge(ranks=8)
    with pytest.raises(ValueError, match="it must be a mapping"):
        judge(5)


#: Tables that need twice the memory of their ranks.
BIG = pk.TableSet(
    tuple(EmbeddingTable(10**6, 128, 2.0, name=f"t{number}", module="m") for number in range(4)),
    batch=8192,
    embedding="fused",
)


def test_a_plan_is_judged_with_its_own_kernels(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"memory": 0.8e9, "steps": 20}
    kernels = ("fused", "uvm_caching")
    with keep_quiet():
        found = pk.shard(BIG, "h100-sxm-8", ranks=2, kernels=kernels, **limits)
    assert "uvm_caching" in found.kernels.values()
    with pytest.raises(pk.InfeasibleError, match="memory"):
        pk.judge_plan(BIG, "h100-sxm-8", found.plan, **limits)
    modules = found.to_torchrec(plain=True)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(modules))
    for plan in (found, found.prediction, modules, file):
        judged = pk.judge_plan(BIG, "h100-sxm-8", plan, ranks=2, **limits)
        assert judged.yours.time == found.time
        assert judged.yours.fits
        assert judged.yours.kernels == judged.found.kernels == found.kernels
    price = pk.price_plan(BIG, "h100-sxm-8", modules, ranks=2, memory=0.8e9)
    assert price.time == found.time
    judged = pk.judge_plan(BIG, "h100-sxm-8", found.plan, kernels=kernels, **limits)
    assert judged.yours.time == found.time
    assert judged.warnings == (
        "your plan does not say where tables lie; they lie as in the plan that was found",
    )
    modules["m"]["t0"]["compute_kernel"] = "key_value"
    with pytest.raises(ValueError, match="kernel of 't0' is 'key_value'; no published time"):
        pk.judge_plan(BIG, "h100-sxm-8", modules, ranks=2, **limits)


def test_printed_kernels_are_those_of_the_tables() -> None:
    head = "#   FQN    Sharding   Compute Kernel   Emb Dim (CW Dim)   Hash Size   Ranks   #"
    row = "#   m.t{}   TW   {}   128   1000000   {}   #"
    words = ("fused", "fused_uvm", "fused_uvm_caching", "fused")
    log = [head, *(row.format(number, word, number) for number, word in enumerate(words))]
    price = pk.price_plan(BIG, "h100-sxm-8", log, ranks=4)
    assert [*price.kernels.values()] == ["fused", "uvm", "uvm_caching", "fused"]


def test_warnings_name_the_line_that_judges() -> None:
    modules = HEAPED.to_torchrec(TABLES.tables)
    modules["m"]["t0"]["unknown_field"] = 1
    platform = load_platform("h100-sxm-8")
    others = {}
    for name, fit in platform.collectives.items():
        if not name.startswith("reduce_scatter"):
            others[name] = fit
    bare = replace(platform, collectives=others)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pk.judge_plan(TABLES, bare, modules, ranks=4, steps=20)
    texts = [str(warning.message) for warning in caught]
    assert any("'unknown_field' of 't0'" in text for text in texts)
    assert any("row_wise was not tried" in text for text in texts)
    for warning in caught:
        assert warning.filename == __file__, warning.message
