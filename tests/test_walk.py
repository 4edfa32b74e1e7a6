"""A prediction takes the same road whatever was asked before."""

from typing import Any

import pytest

from benchmarks.walk import CASES, walk
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.prediction import predictor
from perfkit.workloads.dlrm import DLRM

pytestmark = pytest.mark.repository


@pytest.mark.parametrize("name", CASES)
def test_other_batches_run_the_same_functions(name: str) -> None:
    _, second, *later = walk(name, 6)
    for functions in later:
        assert functions == second


@pytest.mark.parametrize("nodes", [32, 64])
@pytest.mark.parametrize(("rows", "unlike"), [([1000, 1000], 2), ([1000, 2000], 3)])
def test_like_ranks_are_priced_once_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, nodes: int, rows: list[int], unlike: int
) -> None:
    """Two ranks hold a table each, the others none; tables of the same sizes are one graph."""
    priced: list[int] = []
    price = predictor.price

    def count(graphs: Any, *given: Any, **named: Any) -> Any:
        priced.append(len(graphs))
        return price(graphs, *given, **named)

    monkeypatch.setattr(predictor, "price", count)
    ranks = 8 * nodes
    model = DLRM(rows=rows, dim=16, pooling=1, bottom=[16], top=[16], batch=ranks)
    with keep_quiet():
        predictor.predict(model, load_platform("h100-sxm-8x8").with_nodes(nodes), ranks=ranks)
    assert priced == [unlike]
