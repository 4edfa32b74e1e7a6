"""Messages of a DLRM whose tables are on several ranks, counted by hand.

Pooled rows are exchanged as M. Naumov et al. do (arXiv:1906.00091, section 4: all_to_all of pooled
rows, all_reduce of the gradients of MLPs). Rows of tables that are split by rows are summed up by
reduce_scatter and their gradients returned by all_gather (D. Mudigere et al., arXiv:2104.05158,
section 4.2).
"""

from collections import Counter
from typing import Any

import pytest

import perfkit as pk

BATCH = 64
DIM = 16
FEATURES = 4
BOTTOM = 8
TOP = 8
TABLES = 4
#: Numbers of the pooled rows of all tables and samples.
POOLED = BATCH * TABLES * DIM
#: Vectors of a sample, and the products of their pairs beside the dense vector.
VECTORS = TABLES + 1
JOINED = DIM + VECTORS * (VECTORS - 1) // 2
#: Weights and biases of the MLPs.
WEIGHTS = (FEATURES + 1) * BOTTOM + (BOTTOM + 1) * DIM + (JOINED + 1) * TOP + (TOP + 1)


def build(**settings: Any) -> pk.DLRM:
    return pk.DLRM(
        rows=[1000] * TABLES,
        dim=DIM,
        pooling=3,
        bottom=[BOTTOM],
        top=[TOP],
        features=FEATURES,
        batch=BATCH,
        embedding="fused",
        **settings,
    )


def count_messages(
    model: pk.DLRM, plan: pk.Plan, ranks: int = 2
) -> Counter[tuple[str, str, float]]:
    """Phase, operation and bytes of each message of the first rank."""
    graph = model.graphs(ranks, plan, accelerator=True)[0]
    nbytes = graph.column("nbytes")
    return Counter(
        (graph.labels[place].phase, graph.labels[place].name, float(nbytes[place]))
        for place in graph.collectives
    )


#: Bytes of a pooled number and of a weight's gradient by how a model is trained.
PRECISIONS = {
    "fp32": ({"dtype": "fp32"}, 4, 4),
    "bf16": ({"dtype": "bf16"}, 2, 2),
    "autocast": ({"dtype": "bf16", "mixed": True}, 4, 4),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_whole_tables_are_exchanged_forward_and_backward(precision: str) -> None:
    settings, pooled, weight = PRECISIONS[precision]
    found = count_messages(build(**settings), pk.Plan.round_robin(TABLES, ranks=2))
    sums = sum(
        int(nbytes) * count for (_, name, nbytes), count in found.items() if name == "all_reduce"
    )
    rows = {key: count for key, count in found.items() if key[1] != "all_reduce"}
    message = float(POOLED // 2 * pooled)  # those of the tables of this rank
    assert rows == {("forward", "all_to_all", message): 1, ("backward", "all_to_all", message): 1}
    assert sums == WEIGHTS * weight


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_split_tables_are_summed_up_and_their_gradients_gathered(precision: str) -> None:
    settings, pooled, weight = PRECISIONS[precision]
    plan = pk.Plan(2, (pk.Placement("row_wise", (0, 1)),) * TABLES)
    found = count_messages(build(**settings), plan)
    rows = {key: count for key, count in found.items() if key[1] != "all_reduce"}
    message = float(POOLED * pooled)
    assert rows == {
        ("forward", "reduce_scatter", message): 1,
        ("backward", "all_gather", message): 1,
    }
    sums = sum(key[2] * count for key, count in found.items() if key[1] == "all_reduce")
    assert sums == WEIGHTS * weight


def test_copies_of_tables_are_summed_up_with_all_their_rows() -> None:
    plan = pk.Plan(2, (pk.Placement("data_parallel", (0, 1)),) * TABLES)
    found = count_messages(build(dtype="fp32"), plan)
    assert {name for _, name, _ in found} == {"all_reduce"}
    sums = sum(key[2] * count for key, count in found.items())
    assert sums == 4 * (WEIGHTS + TABLES * 1000 * DIM)
