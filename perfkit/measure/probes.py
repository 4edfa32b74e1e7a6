"""What a GPU's calibration times, as a list: kernels, collectives and small iterations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from perfkit.measure.kernels import draw_cases, size_product
from perfkit.measure.samples import draw_calibration, dump
from perfkit.models.embedding import forward_bytes
from perfkit.recording.nets import Net
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import COLLECTIVES
from perfkit.workloads.transformer import Transformer

#: Number formats of matrix products in the order of a plan; the first one that a device has is used
#: for other kernels.
FORMATS = ("bf16", "fp16", "tf32", "fp32", "fp8")
#: Classes of kernels that are timed in addition to products and sums.
_TIMED = ("attention", "convolution", "embedding_forward")
#: Small iterations, limited by the host; those that also run compiled; and larger ones, limited by
#: the device.
_SMALL, _COMPILED = (
    ("dlrm-0", "gpt2-0", "bert-1", "resnet-0", "mobilenet-1", "xlnet-4"),
    ("gpt2-0", "resnet-0"),
)
_MIXED: dict[str, Any] = {"dtype": "bf16", "mixed": True}
LARGE: dict[str, DLRM | Transformer | Net] = {
    "gpt2-large": Transformer.gpt2(
        "gpt2-medium", layers=2, batch=4, sequence=1024, vocabulary=50304
    ),
    "gpt2-mixed": Transformer.gpt2(
        "gpt2-medium", layers=4, batch=8, sequence=1024, vocabulary=50304, **_MIXED
    ),
    "bert-mixed": Transformer.bert(
        "bert-large", layers=4, batch=32, sequence=256, vocabulary=30528, **_MIXED
    ),
    "dlrm-large": DLRM(rows=[1_000_000] * 8, dim=64, pooling=32, exponent=0.5, batch=8192),
    "resnet-large": Net("resnet", 64, size=224, width=64, depth=3, classes=1000),
    "resnet-half": Net("resnet", 64, size=224, width=64, depth=3, classes=1000, dtype="bf16"),
}


class Probe(NamedTuple):
    """One thing to time on a device.

    Stage: ``kernels``, ``collectives`` or ``iterations``. Kind and variant: class of a kernel;
    operation; name, and ``eager`` or ``compiled``. Sizes: those of a `perfkit.measure.kernels.Case`
    with ``flops`` [FLOP]; ``nbytes`` in the nccl-tests convention [B]; the workload, see
    `perfkit.measure.samples.load`. Cold operands rotate, so that the last cache does not hold them.
    Each sample has several calls [-].
    """

    stage: str
    kind: str
    variant: str
    dtype: str
    sizes: Mapping[str, Any]
    ranks: int = 1
    nodes: int = 1
    cold: bool = True
    calls: int = 1


def _draw_kernels(formats: Sequence[str], memory: float, cache: float) -> Iterator[Probe]:
    """The kernels of a CPU in larger sizes: products in all formats, other classes in one; sums
    also in the cache."""
    for dtype, case in product(formats, draw_cases(cache=cache, larger=8.0)):
        sizes = {"flops": 0.0, **case.sizes}
        if case.kind == "gemm":
            # sizes that fp8 allows
            sizes = size_product(*(16 * -(-sizes[side] // 16) for side in "mnk"))
        elif dtype != formats[0] or not (case.kind in _TIMED or case.variant == "add"):
            continue
        elif case.kind == "embedding_forward":  # uniform rows of tables that no cache holds
            share = max(0.02, sizes["table_rows"] / 1e6)
            sizes |= {"exponent": 0.0, "table_rows": share * memory / 16 // sizes["dim"]}
            sizes["nbytes"] = forward_bytes(
                *(sizes[name] for name in ("bags", "lookups", "dim")), granularity=32
            )
        own = "fp32" if case.kind == "embedding_forward" else dtype
        for cold in (
            (True, False) if case.variant == "add" and 12.0 * sizes["elements"] < cache else (True,)
        ):
            yield Probe("kernels", case.kind, case.variant, own, sizes, cold=cold)


def _draw_collectives(local: int, nodes: int, largest: float) -> Iterator[Probe]:
    """Messages from 1 KiB to the largest: inside a node, over whole nodes, and between one rank of
    each node."""
    inside, across = (
        [2**power for power in range(1, 20) if 2**power < most] + [most] for most in (local, nodes)
    )
    spans = {(ranks, 1) for ranks in inside} | {
        (count * each, count) for count in across for each in (1, local)
    }
    for (ranks, count), operation in (
        (span, name) for span in sorted(spans - {(1, 1)}) for name in COLLECTIVES
    ):
        # switches of the network add fp16 but not int8; both are timed to see the difference
        for dtype in (
            ("fp16", "int8") if operation == "all_reduce" and ranks == local else ("fp16",)
        ):
            for nbytes in (16.0 * np.geomspace(64, largest / 16, 13).round()).tolist():
                yield Probe("collectives", operation, "", dtype, {"nbytes": nbytes}, ranks, count)


def list_probes(
    formats: Sequence[str], *, memory: float, cache: float, local: int = 1, nodes: int = 1
) -> Iterator[Probe]:
    """List what to time on a cluster of GPUs.

    Parameters
    ----------
    formats : sequence of str
        Number formats of the device; formats outside `FORMATS` are ignored.
    memory : float
        Main memory of one device [B].
    cache : float
        Size of its last cache [B].
    local : int, optional
        Ranks on each node [-].
    nodes : int, optional
        Nodes [-].

    Yields
    ------
    probe : Probe
        In a fixed order, the same in every call.

    Examples
    --------
    >>> plan = [*list_probes(["bf16", "fp8"], memory=80e9, cache=50e6, local=8)]
    >>> sorted({probe.dtype for probe in plan if probe.kind == "gemm"})
    ['bf16', 'fp8']
    """
    yield from _draw_kernels(
        [dtype for dtype in FORMATS if dtype in formats] or ["fp32"], memory, cache
    )
    yield from _draw_collectives(local, nodes, min(2.0**30, memory / 4))
    drawn: dict[str, Any] = {
        sample.name: sample.workload for sample in draw_calibration(models="all", hybrid=False)
    }
    half = [dtype for dtype in FORMATS[:2] if dtype in formats]
    for name, workload in ({name: drawn[name] for name in _SMALL} | LARGE).items():
        if workload.dtype != "fp32":
            if not half:
                continue
            workload = replace(workload, dtype=half[0])
        for how in ("eager", "compiled") if name in _COMPILED else ("eager",):
            yield Probe("iterations", name, how, workload.dtype, dump(workload))
