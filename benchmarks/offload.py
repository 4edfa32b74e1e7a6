"""Offload to the memory of the host: published steps beside predictions.

    python -m benchmarks.offload

Steps of fairseq, Megatron-Bridge, DeepSpeed and ZeRO-Offload
(reference_data/published/offload_steps.csv, each with its source). Nothing was fitted to them:
links, bandwidths of hosts and the speed of an update on the host come from measurements of their
own (docs/formulas.md, tables 11.1 and 11.2). Steps of NeMo RL, to which the speed of one thread was
fitted, are shown and not judged. Where the same source has the step without offload,
the time that offload adds is judged, so that the errors of that step do not count; else the step.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.helpers.command import command
from benchmarks.helpers.errors import lay_out_errors, widen
from benchmarks.helpers.files import read_csv
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import find_reference
from perfkit.platform.estimates import find_interval, keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer


class Case(NamedTuple):
    """What a published row ran.

    Parameters
    ----------
    platform : Platform
        Where.
    model : Transformer
        The model.
    strategy : Strategy
        How, without offload.
    stack : str or None
        The software.
    threads : int
        Threads with which a rank updates on the host; 0 for those that the software has [-].
    overlaps : bool
        Whether copies go beside the update of the host.
    """

    platform: Platform
    model: Transformer
    strategy: Strategy
    stack: str | None
    threads: int = 0
    overlaps: bool = False


#: Sequences that a rank of the LLaMA rows computes at a time, by stage of ZeRO [-].
_SEQUENCES_OF_STAGE = {2: 1, 3: 2}
#: Threads of each rank of fairseq's steps, and cores of the two processors of a DGX-2 [-].
_FAIRSEQ_THREADS, _CORES_OF_DGX2 = 20, 48


def make_case(row: str) -> Case:
    """What a row ran."""
    if row in ("fairseq-1", "fairseq-8"):
        ranks = int(row.rpartition("-")[2])
        model = Transformer.preset(
            "gpt3-13b",
            batch=8 * ranks,
            sequence=2048,
            dtype="fp16",
            mixed=True,
            attention="eager",
        )
        strategy = Strategy(dp=ranks, micro_batch=8, zero=3, checkpoint="full")
        return Case(load_platform("v100-sxm-8"), model, strategy, None, threads=_FAIRSEQ_THREADS)
    if row.startswith("bridge-"):
        model = Transformer.preset(
            "qwen3-30b-a3b", batch=8, sequence=4096, dtype="bf16", mixed=True, fused=True
        )
        strategy = Strategy(tp=2, pp=2, dp=4, ep=4, zero=1, sequence_parallel=True)
        platform = load_platform("h100-sxm-8").with_nodes(2)
        overlaps = row == "bridge-overlap"
        return Case(platform, model, strategy, "megatron-te", overlaps=overlaps)
    if row.startswith("rl-"):
        # what it trains on is not stated; what an offload adds does not depend on it
        model = Transformer.preset(
            "qwen3-0.6b", batch=8, sequence=4096, dtype="bf16", mixed=True, fused=True
        )
        platform = load_platform("h100-sxm-8")
        overlaps = row.endswith("-overlap")
        # a worker of Ray has one thread, unless told
        return Case(platform, model, Strategy(zero=1), "megatron-te", threads=1, overlaps=overlaps)
    if row == "zero-offload-10b":
        model = Transformer.preset(
            "gpt3-13b",
            layers=50,
            hidden=4096,
            heads=32,
            batch=512,
            sequence=1024,
            dtype="fp16",
            mixed=True,
            attention="eager",
        )
        # two Xeon Platinum 8168 with 6 channels of DDR4-2666 each, one of 16 GPUs
        platform = load_platform("v100-sxm-8").with_host_memory(
            capacity=1.5e12, bandwidth=256e9, link=12.36e9
        )
        strategy = Strategy(micro_batch=8, zero=2, checkpoint="full")
        return Case(platform, model, strategy, None, threads=_CORES_OF_DGX2)
    if row in ("zero2-7b", "zero3-7b"):
        zero = int(row.removeprefix("zero").removesuffix("-7b"))
        model = Transformer.preset(
            "llama-7b",
            batch=64,
            sequence=4096,
            positions=4096,
            dtype="bf16",
            mixed=True,
            fused=True,
        )
        strategy = Strategy(
            dp=8, micro_batch=_SEQUENCES_OF_STAGE[zero], zero=zero, checkpoint="full"
        )
        # A800, whose links to other GPUs are slower; two Xeon 8358 with 8 channels of DDR4-3200 each
        platform = load_platform("a100-sxm-8").with_host_memory(capacity=1e12)
        return Case(platform, model, strategy, "deepspeed")
    raise ValueError(f"row is {row!r} of offload_steps.csv; say in make_case what it ran")


def _price(case: Case, strategy: Strategy) -> dict[str, float]:
    """A step of a case with a strategy."""
    with keep_quiet():
        columns = price_strategies(
            case.model,
            case.platform,
            Strategy.stack([strategy]),
            stack=case.stack,
        )
    return {name: float(values[0]) for name, values in columns.items()}


def compare_row(row: dict[str, str]) -> dict[str, Any]:
    """A row beside its prediction."""
    case = make_case(row["row"])
    fraction = float(row["fraction"])
    with_offload = replace(
        case.strategy,
        offload=row["offload"],
        offload_fraction=fraction,
        host_threads=case.threads,
        overlap_host=case.overlaps,
    )
    there = _price(case, with_offload)
    measured = float(row["seconds"])
    predicted = there["time"]
    saved = None
    judged_as = "step"
    if row["base_seconds"]:
        here = _price(case, case.strategy)
        judged_as = "added"
        measured -= float(row["base_seconds"])
        predicted -= here["time"]
        saved = here["needs"] - there["needs"]
    is_fitted = row["fitted"] == "yes"
    if is_fitted:
        judged_as = "fitted"
    low, high = find_interval(there["time"], there["spread"], 0.8)
    width = {"low": low - there["time"] + predicted, "high": high - there["time"] + predicted}
    compared = {
        "row": row["row"],
        "offload": row["offload"],
        "update": there["update"],
        "on_host": there["on_host"],
        "fitted": is_fitted,
        "judged_as": judged_as,
        "saved": saved if row["saved"] else None,
        "measured_saved": float(row["saved"]) if row["saved"] else None,
    }
    return {**compared, **widen(predicted, there["spread"], measured), **width}


def compare_rows() -> list[dict[str, Any]]:
    """All rows beside predictions."""
    return [compare_row(row) for row in read_csv(find_reference("published/offload_steps.csv"))]


_ROWS = {
    "row": "{row}",
    "offload": "{offload}",
    "judged": "{judged_as}",
    "published [s]": "{measured:.3g}",
    "predicted [s]": "{predicted:.3g}",
    "error": "{error:+.0%}",
    "update [s]": "{update:.3g}",
}
_MEMORY = {
    "row": "{row}",
    "published saving [GB]": "{measured_gb:.1f}",
    "predicted [GB]": "{gb:.1f}",
}


@command({})
def main(given: Any) -> None:
    """Offload, published and predicted."""
    rows = compare_rows()
    print(lay_out(rows, _ROWS))
    with_memory = []
    for row in rows:
        if row["saved"] is not None:
            gigabytes = {"gb": row["saved"] / 1e9, "measured_gb": row["measured_saved"] / 1e9}
            with_memory.append({**row, **gigabytes})
    print(f"\nMemory of the device\n{lay_out(with_memory, _MEMORY)}")
    judged = [row for row in rows if not row["fitted"]]
    groups = {"all": judged}
    for offload in ("optimizer", "parameters"):
        groups[offload] = [row for row in judged if row["offload"] == offload]
    print(f"\n{lay_out_errors(groups)}")
