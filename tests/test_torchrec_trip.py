"""The round trip with TorchRec, by the answers that ``make torchrec`` kept: without torchrec."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable
from tests.torchrec_cases import BAGS, RANKS, REFUSALS, TABLES, Refusal, list_plans, refuse_first

KEPT: dict[str, Any] = json.loads(
    (Path(__file__).parent / "torchrec_trip.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", KEPT["plans"])
def test_plans_are_those_that_torchrec_trained_a_step_with(name: str) -> None:
    kept = KEPT["plans"][name]
    plan = Plan.from_json(json.dumps(kept["plan"]))
    assert plan.to_torchrec(TABLES, ranks_per_node=RANKS, device="cpu") == kept["torchrec"]
    assert Plan.from_torchrec(kept["torchrec"], TABLES, ranks=RANKS) == plan


def test_plans_by_hand_are_the_kept_ones_and_have_every_kind() -> None:
    plans = list_plans()
    assert plans.keys() == KEPT["plans"].keys()
    for name, plan in plans.items():
        assert json.loads(plan.to_json()) == KEPT["plans"][name]["plan"]
    kinds = {placement.kind for placement in plans["each kind"].placements}
    assert len(kinds) == 6
    assert {table.kernel for table in BAGS} == {"fused", "uvm", "uvm_caching"}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_what_torchrec_refused_is_refused_first(refusal: Refusal) -> None:
    assert refusal.message in refuse_first(refusal)
    said = KEPT["refusals"][refusal.name]
    if refusal.name == "rows on ranks in another order":
        assert said == "takes it, and rank [0] has what the plan puts on rank:1/cpu"
    else:
        assert said == "refused"


@pytest.mark.filterwarnings("ignore:shards of columns of")
@pytest.mark.parametrize("name", KEPT["planner"])
def test_plans_of_the_planner_of_torchrec_are_read_and_written(name: str) -> None:
    kept = KEPT["planner"][name]
    tables = [
        EmbeddingTable(rows, dim, name=table, module="ebc", kernel=kernel)
        for table, rows, dim, kernel in kept["tables"]
    ]
    plan = Plan.from_torchrec(kept["torchrec"], tables, ranks=kept["plan"]["ranks"])
    assert json.loads(plan.to_json()) == kept["plan"]
    written = plan.to_torchrec(tables, ranks_per_node=8)["ebc"]
    for table, entry in written.items():
        entry.pop("cache_params", None)
        assert entry == kept["torchrec"]["plan"]["ebc"][table]
