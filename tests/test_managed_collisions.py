"""Managed collisions: what maps raw ids to rows moves, holds and waits for, by hand."""

import pytest

import perfkit as pk
from perfkit.models.distributions import Uniform, unique_rows
from perfkit.platform.estimates import keep_quiet
from perfkit.workloads.graph import Graph
from perfkit.workloads.managed_collisions import MANAGED_COLLISIONS

ROWS, DIM, POOLING, BATCH = 1000, 16, 5, 64
LOOKUPS = BATCH * POOLING


def make(name: str | list[str], **others: int) -> pk.DLRM:
    """A model with two tables."""
    settings = {"batch": BATCH, "rows": [ROWS] * 2, "dim": DIM, "pooling": POOLING}
    return pk.DLRM(**settings | others, embedding="exact", managed_collision=name)


def list_names(graph: Graph) -> list[str]:
    """Names of what is done ahead of the lookups."""
    names = [label.name for label in graph.labels if label.module == "embeddings"]
    return names[: names.index("fused_embeddings")]


def test_names_are_checked() -> None:
    assert pk.EmbeddingTable(ROWS, DIM).id_bytes == 0
    with pytest.raises(ValueError, match="managed_collision is 'hash'; it must be one of 'zch', "):
        pk.EmbeddingTable(ROWS, DIM, managed_collision="hash")
    with pytest.raises(ValueError, match="managed_collision is None"):
        pk.EmbeddingTable(ROWS, DIM, managed_collision=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MANAGED_COLLISIONS)
def test_remapping_moves_what_its_operations_do(name: str) -> None:
    unique = float(unique_rows(Uniform(ROWS), LOOKUPS))
    graph = make([name, ""]).graphs(accelerator=True)[0]
    [place] = [place for place, label in enumerate(graph.labels) if label.name == name]
    moved = {"zch": 150 * LOOKUPS + 3 * 32 * unique, "mpzch": 16 * LOOKUPS + 2 * 32 * unique}
    assert graph.traffic[place] == pytest.approx(moved[name], abs=1)
    waits = {"zch": ["nonzero"] * 3, "mpzch": []}
    assert list_names(graph) == [name, *waits[name]]


def test_tables_of_ids_are_held() -> None:
    with keep_quiet():
        held = {
            name: pk.predict(make(name, rows=[10**6] * 2), "a100-sxm-8").memory().parts["tables"]
            for name in ("", "zch", "mpzch")
        }
    # ids, rows, counts and iterations of 8 B each; ids of 8 B and times of 4 B
    assert held["zch"] - held[""] == 2 * 10**6 * 32
    assert held["mpzch"] - held[""] == 2 * 10**6 * 12


def test_a_kernel_costs_less_than_operations_that_their_host_waits_for() -> None:
    with keep_quiet():
        times = [
            pk.predict(make(name, batch=65_536), "a100-sxm-8").time for name in ("", "mpzch", "zch")
        ]
    assert times == sorted(times) and times[0] < times[2]


def test_parts_of_tables_map_their_own_ids() -> None:
    model = make("mpzch", rows=[10**6] * 2)
    everyone = pk.Placement("row_wise", (0, 1))
    graphs = model.graphs(2, pk.Plan(2, [everyone, everyone]))
    assert [table.id_bytes for table in graphs[0].tables] == [12 * 500_000] * 2


def test_batches_of_a_sweep_and_unlike_ranks_have_their_own_traffic() -> None:
    for batch in (64, 4096):  # recorded once with a symbolic batch
        graph = make("mpzch", batch=batch).graphs()[0]
        unique = float(unique_rows(Uniform(ROWS), batch * POOLING))
        moved = 16 * batch * POOLING + 64 * unique
        places = [place for place, label in enumerate(graph.labels) if label.name == "mpzch"]
        assert graph.traffic[places] == pytest.approx([moved, moved], abs=1)
    model = make(["zch", ""])
    first, second = model.graphs(2, pk.Plan.round_robin(2, ranks=2))
    assert "zch" in list_names(first) and "zch" not in list_names(second)


def test_searches_and_measurements_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="managed_collision of 'table 0' is 'zch'; searches do"):
        pk.shard(make("zch"), "a100-sxm-8", ranks=2)
