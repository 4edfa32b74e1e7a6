"""Accounts of single operations: their steps sum to the time in the timeline."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

import perfkit as pk
from perfkit.platform.kernel_times import UNALIGNED

BERT = pk.Transformer.bert("bert-base", batch=8, sequence=128, layers=2)
HALF = pk.Transformer.bert("bert-base", batch=8, sequence=128, layers=2, dtype="bf16")
TABLES = pk.DLRM(rows=[10**5] * 4, dim=64, pooling=10, batch=2048)


class Case(NamedTuple):
    """What is predicted, where, and how."""

    workload: Any
    platform: str
    options: dict[str, Any]


CASES: Mapping[str, Case] = {
    "bert, h100": Case(HALF, "h100-sxm-8", {"ranks": 8}),
    "bert, h100, compiled": Case(HALF, "h100-sxm-8", {"ranks": 2, "execution": "compiled"}),
    "bert, h100, shared": Case(HALF, "h100-sxm-8", {"strategy": pk.Strategy(tp=2, dp=2)}),
    "bert, zen5": Case(BERT, "zen5-2", {"ranks": 2}),
    "bert, zen5, a slow rank": Case(BERT, "zen5-2", {"ranks": 2, "slowdown": {1: 1.5}}),
    "bert, mi300x": Case(HALF, "mi300x-8", {"ranks": 8}),
    "dlrm, zen3": Case(TABLES, "zen3-2", {"ranks": 2}),
    "dlrm, h100": Case(TABLES, "h100-sxm-8", {"ranks": 8}),
    "dlrm, p100": Case(TABLES, "p100-1", {}),
}


def predict(name: str) -> pk.Prediction:
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pk.ExtrapolationWarning)
        return pk.predict(case.workload, case.platform, **case.options)


@pytest.mark.parametrize("name", CASES)
def test_the_steps_sum_to_the_time_in_the_timeline(name: str) -> None:
    prediction = predict(name)
    frame = prediction.timeline().drop_nulls("operation")
    rows = {(row["rank"], row["name"], row["kind"], row["phase"]): row for row in frame.to_dicts()}
    for row in rows.values():
        if row["kind"] in ("collective", "host"):
            continue
        account = prediction.explain_operation(row["operation"], rank=row["rank"])
        seconds = row["end_s"] - row["start_s"]
        assert account.time == pytest.approx(seconds, rel=1e-9, abs=1e-9 * prediction.time)
        assert sum(step.added for step in account.steps) == pytest.approx(account.time, rel=1e-12)
        assert account.table()["time_s"][-1] == pytest.approx(account.time, rel=1e-12)
        before = 0.0
        for step in account.steps:  # a factor multiplies a part of what came before
            if step.factor is not None and step.factor > 1.0:
                assert step.added <= (step.factor - 1.0) * before * (1 + 1e-9)
            before += step.added
        assert account.label.name == row["name"]
        assert account.label.module == row["module"]


def find(prediction: pk.Prediction, name: str) -> int:
    rows = prediction.timeline().filter(name=name, rank=0)
    return int(rows["operation"][0])


def test_an_account_says_whether_the_context_applies() -> None:
    causes = {}
    for name in ("bert, h100", "bert, zen5", "dlrm, p100", "bert, mi300x"):
        prediction = predict(name)
        account = prediction.explain_operation(find(prediction, "addmm"))
        [step] = [
            step
            for step in account.steps
            if "iterations," in step.cause or "no factor" in step.cause
        ]
        causes[name] = (step.cause, step.factor)
    h100 = pk.load_platform("h100-sxm-8").context.kernels["gemm"]["scale"]
    assert causes["bert, h100"] == ("kernels in iterations, context.kernels.gemm", h100)
    assert causes["bert, zen5"][0] == "kernels in iterations, context.kernels.gemm.nt"
    assert causes["dlrm, p100"] == (
        "no factor of iterations: none was fitted to dlrm on this platform",
        1.0,
    )
    assert "context.kernels.gemm" in causes["bert, mi300x"][0] or causes["bert, mi300x"][1] == 1.0


def test_an_account_names_fit_terms_and_factors() -> None:
    prediction = predict("bert, zen5, a slow rank")
    number = find(prediction, "addmm")
    slow = prediction.explain_operation(number, rank=1)
    quick = prediction.explain_operation(number, rank=0)
    assert slow.time == pytest.approx(1.5 * quick.time)
    assert [step.factor for step in slow.steps if "slowdown" in step.cause] == [1.5]
    assert quick.fit_name == "kernels.gemm.nt"
    assert quick.sizes["m"] == 4 * 128
    text = quick.explain()
    assert "tiled flops" in text
    assert "distant operands, beyond l3: " in text
    assert "together" in text
    h100 = predict("bert, h100")
    assert h100.explain_operation(find(h100, "mm")).sizes["peak"] == pytest.approx(989.4e12)


def test_an_account_shows_how_much_longer_unaligned_rows_take() -> None:
    prediction = predict("bert, h100")  # whose 30522 words are no multiple of 8
    head = prediction.timeline().filter(rank=0, module="head", kind="gemm")
    unaligned = []
    for number in head["operation"]:
        steps = prediction.explain_operation(number).steps
        unaligned += [step for step in steps if "not aligned" in step.cause]
    assert unaligned[0].factor == pytest.approx(UNALIGNED[9].of_16_bytes)


def test_an_account_shows_what_collectives_beside_it_take() -> None:
    prediction = predict("bert, h100, compiled")
    frame = prediction.timeline().drop_nulls("operation").filter(stream="compute")
    accounts = [prediction.explain_operation(number) for number in frame["operation"]]
    slowed = [account for account in accounts if "in flight" in account.steps[-1].cause]
    assert 0 < len(slowed) < len(accounts)
    assert all(account.steps[-1].added > 0 for account in slowed)


def test_what_is_no_kernel_is_refused() -> None:
    prediction = predict("bert, h100")
    frame = prediction.timeline().filter(kind="collective")
    with pytest.raises(
        ValueError,
        match=r"operation is \d+, the collective 'all_reduce'; take a kernel; platform.collective\('all_reduce', .*, ranks=8\)",
    ):
        prediction.explain_operation(frame["operation"][0])
    with pytest.raises(
        ValueError, match=r"operation is 10000000; rank 0 has the operations 0 to \d+;"
    ):
        prediction.explain_operation(10**7)
    with pytest.raises(ValueError, match="rank is 9; the ranks are 0 to 7"):
        prediction.explain_operation(0, rank=9)
    with pytest.raises(ValueError, match="operation is -1"):
        prediction.explain_operation(-1)
