"""Defaults that decide are said in the result, and only where they decide; a platform says where
its numbers come from."""

from dataclasses import replace
from typing import Any

import pytest

import perfkit as pk

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
CORES, WHOLE = "fp32 without tensor cores", "are updated whole"


def said(workload: Any, platform: str | pk.Platform, text: str, **more: Any) -> list[str]:
    return [note for note in pk.predict(workload, platform, **more).warnings if text in note]


def bert(**more: Any) -> pk.Transformer:
    return pk.Transformer.bert(batch=64, layers=4, sequence=512, **more)


def test_idle_tensor_cores_are_said_with_the_way_out() -> None:
    [note] = said(bert(), "h100-sxm-8", CORES)
    assert "15 times" in note
    assert "dtype='bf16'" in note
    assert "dtype='tf32'" in note
    assert said(bert(), "a100-sxm-8", CORES)
    assert said(bert(), "h100-sxm-8", CORES, ranks=8)
    assert CORES in pk.predict(bert(), "h100-sxm-8").explain()


@pytest.mark.parametrize(
    ("more", "platform"),
    [
        ({"dtype": "bf16"}, "h100-sxm-8"),
        ({"dtype": "bf16", "mixed": True}, "h100-sxm-8"),
        ({"dtype": "tf32"}, "h100-sxm-8"),
        ({}, "v100-sxm-8"),
        ({}, "zen5-2"),
    ],
)
def test_nothing_is_said_where_tensor_cores_work_or_are_missing(
    more: dict[str, Any], platform: str
) -> None:
    assert not said(bert(**more), platform, CORES)


def test_nothing_is_said_where_products_take_little_of_the_time() -> None:
    small = pk.DLRM(rows=1000, dim=16, pooling=2, bottom=[32], top=[32], features=4, batch=256)
    assert not said(small, "h100-sxm-8", CORES)


def test_nothing_is_said_of_tensor_cores_where_the_host_or_the_loader_sets_the_pace() -> None:
    """Fused DLRM on eight ranks: tf32 changes nothing, as its products hide behind the host."""
    sizes: dict[str, Any] = {"rows": [10**6] * 8, "dim": 64, "pooling": 20, "embedding": "fused"}
    fp32 = pk.predict(pk.DLRM(batch=16_384, dtype="fp32", **sizes), "h100-sxm-8", ranks=8)
    tf32 = pk.predict(pk.DLRM(batch=16_384, dtype="tf32", **sizes), "h100-sxm-8", ranks=8)
    assert fp32.bottleneck == "host-bound"
    assert fp32.time == pytest.approx(tf32.time)
    assert not [note for note in fp32.warnings if CORES in note]
    assert not said(bert(), "h100-sxm-8", CORES, loading=2 * pk.predict(bert(), "h100-sxm-8").time)


@pytest.mark.parametrize("embedding", ["separate", "fused", "exact"])
def test_copies_of_large_tables_are_said_with_the_way_out(embedding: str) -> None:
    """No way to look rows up makes gradients of copies sparse; another plan does."""
    model = pk.DLRM(rows=[10**6] * 8, dim=64, pooling=2, embedding=embedding, batch=4096)
    copies = (pk.Placement("data_parallel", tuple(range(8))),) * 8
    [note] = said(model, "h100-sxm-8", WHOLE, ranks=8, plan=pk.Plan(8, copies))
    assert "512 million weights are copied to all ranks" in note
    assert "where a plan stores them once" in note
    assert "embedding=" not in note
    assert "sparse=" not in note
    assert not said(model, "h100-sxm-8", WHOLE, ranks=8)


def test_a_dense_update_of_large_tables_is_said() -> None:
    sizes: dict[str, Any] = {"dim": 64, "bottom": [64], "top": [64], "features": 4, "batch": 2048}
    large = {"rows": [4_000_000, 4_000_000], "pooling": 2, **sizes}
    [note] = said(pk.DLRM(sparse=False, optimizer="adamw", **large), "h100-sxm-8", WHOLE)
    assert "512 million weights" in note
    assert "by adamw; with embedding='exact' only" in note
    [plain] = said(pk.DLRM(sparse=False, **large), "h100-sxm-8", WHOLE)
    assert "with sparse=True or embedding='exact' only" in plain
    for healthy in (
        pk.DLRM(**large),
        pk.DLRM(embedding="exact", optimizer="adagrad", **large),
        pk.DLRM(embedding="fused", **large),
        pk.DLRM(sparse=False, optimizer="adamw", **{**large, "rows": [1000, 1000]}),
        bert(dtype="bf16"),
    ):
        assert not said(healthy, "h100-sxm-8", WHOLE)


@pytest.mark.parametrize("name", ["h100-sxm-8", "zen5-2", "rtx-4090-1"])
def test_a_platform_says_where_each_of_its_numbers_comes_from(name: str) -> None:
    platform = pk.load_platform(name)
    text = platform.explain()
    numbers = platform.numbers()
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(lines) == len(numbers)
    assert f"its {len(numbers)} numbers" in text.splitlines()[0]
    for row in numbers.rows(named=True):
        assert f"{row['kind']}, {row['date']}: {row['source']}" in text
        assert f"  {row['group']} {row['name']}: " in text
    spreads = [line for line in lines if " spread: " in line]
    assert len(spreads) == len(numbers.filter(numbers["name"].str.ends_with(" spread")))


@pytest.mark.parametrize("embedding", ["fused", "exact"])
def test_embeddings_without_a_model_are_said_with_those_that_have_one(embedding: str) -> None:
    """What the advice names is modelled, and a platform that models all of them says nothing."""
    sizes: dict[str, Any] = {"rows": [10**5] * 8, "dim": 64, "pooling": 20, "batch": 2048}
    sizes |= {"bottom": [64], "top": [64], "features": 4}
    model = pk.DLRM(embedding=embedding, **sizes)
    [note] = said(model, "zen3-2", "have no model")
    advised = "separate"
    assert note.endswith(f"; of embeddings, zen3-2 has models for embedding={advised!r}")
    assert not said(pk.DLRM(embedding=advised, **sizes), "zen3-2", "have no model")
    assert not said(model, "h100-sxm-8", "have no model")
    zen = pk.load_platform("zen3-2")
    kernels = {key: fit for key, fit in zen.kernels.items() if "embedding" not in key}
    without = replace(zen, kernels=kernels)
    [note] = said(model, without, "have no model")
    assert note.endswith("; zen3-2 has models for no kind of embedding; take another platform")
