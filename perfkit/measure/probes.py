"""What a GPU's calibration times: probes of kernels, collectives and small iterations, and the list
of all of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from perfkit.ground.units import check_choice, show
from perfkit.measure.kernels import Case, draw_cases, size_product
from perfkit.measure.records import WHICH_FILE
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
#: Small iterations, limited by the host.
_SMALL = ("dlrm-0", "gpt2-0", "bert-1", "resnet-0", "mobilenet-1", "xlnet-4")
#: Those that also run compiled.
_COMPILED = ("gpt2-0", "resnet-0")
#: Larger iterations, limited by the device.
LARGE: dict[str, DLRM | Transformer | Net] = {
    "gpt2-large": Transformer.gpt2(
        "gpt2-medium", layers=2, batch=4, sequence=1024, vocabulary=50304
    ),
    "gpt2-mixed": Transformer.gpt2(
        "gpt2-medium",
        layers=4,
        batch=8,
        sequence=1024,
        vocabulary=50304,
        dtype="bf16",
        mixed=True,
    ),
    "bert-mixed": Transformer.bert(
        "bert-large",
        layers=4,
        batch=32,
        sequence=256,
        vocabulary=30528,
        dtype="bf16",
        mixed=True,
    ),
    "dlrm-large": DLRM(rows=[1_000_000] * 8, dim=64, pooling=32, exponent=0.5, batch=8192),
    "resnet-large": Net("resnet", 64, size=224, width=64, depth=3, classes=1000),
    "resnet-half": Net("resnet", 64, size=224, width=64, depth=3, classes=1000, dtype="bf16"),
}


# -- probes
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelProbe:
    """A kernel to time alone on a device.

    Parameters
    ----------
    kind, variant : str
        Class of the kernel, see `perfkit.measure.kernels.Case`.
    dtype : str
        Number format.
    sizes : mapping of str to float
        Those of the case, with ``flops`` [FLOP].
    cold : bool
        Whether operands rotate, so that the last cache does not hold them.
    calls : int
        Calls of one sample [-].
    """

    kind: str
    variant: str
    dtype: str
    sizes: Mapping[str, float]
    cold: bool = True
    calls: int = 1

    def describe(self) -> str:
        """What is timed, in words."""
        return f"{self.kind} in {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class CollectiveProbe:
    """A collective to time between devices.

    Parameters
    ----------
    operation : str
        Name of the collective.
    dtype : str
        Number format.
    nbytes : float
        Message size in the nccl-tests convention [B].
    ranks, nodes : int
        Ranks that take part, and the nodes that they are on [-].
    calls : int
        Calls of one sample [-].
    """

    operation: str
    dtype: str
    nbytes: float
    ranks: int
    nodes: int = 1
    calls: int = 1

    def describe(self) -> str:
        """What is timed, in words."""
        return f"{self.operation} in {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class IterationProbe:
    """A small iteration to time on one device, without and with the profiler.

    Parameters
    ----------
    name : str
        Short name.
    dtype : str
        Number format.
    workload : mapping
        The iteration as plain JSON, see `perfkit.measure.samples.load`.
    compiled : bool
        Whether it runs compiled.
    """

    name: str
    dtype: str
    workload: Mapping[str, Any]
    compiled: bool = False

    @property
    def execution(self) -> str:
        """``compiled`` or ``eager``."""
        return "compiled" if self.compiled else "eager"

    def describe(self) -> str:
        """What is timed, in words."""
        return f"{self.name} in {self.dtype}"


#: One thing to time on a device.
Probe: TypeAlias = KernelProbe | CollectiveProbe | IterationProbe


# -- plain JSON
# ----------------------------------------------------------------------------------------------------


def write_probe(probe: Probe) -> dict[str, Any]:
    """Write a probe as plain JSON.

    Parameters
    ----------
    probe : Probe
        What to time.

    Returns
    -------
    row : dict
        The same names for every kind of probe: ``stage``, ``kind``, ``variant``, ``dtype``,
        ``sizes``, ``ranks``, ``nodes``, ``cold`` and ``calls``.

    Examples
    --------
    >>> sum_of_two = CollectiveProbe(operation="all_reduce", dtype="fp16", nbytes=64.0, ranks=2)
    >>> row = write_probe(sum_of_two)
    >>> row["stage"], row["kind"], row["sizes"], row["ranks"]
    ('collectives', 'all_reduce', {'nbytes': 64.0}, 2)
    """
    if isinstance(probe, KernelProbe):
        return {
            "stage": "kernels",
            "kind": probe.kind,
            "variant": probe.variant,
            "dtype": probe.dtype,
            "sizes": dict(probe.sizes),
            "ranks": 1,
            "nodes": 1,
            "cold": probe.cold,
            "calls": probe.calls,
        }
    if isinstance(probe, CollectiveProbe):
        return {
            "stage": "collectives",
            "kind": probe.operation,
            "variant": "",
            "dtype": probe.dtype,
            "sizes": {"nbytes": probe.nbytes},
            "ranks": probe.ranks,
            "nodes": probe.nodes,
            "cold": True,
            "calls": probe.calls,
        }
    return {
        "stage": "iterations",
        "kind": probe.name,
        "variant": probe.execution,
        "dtype": probe.dtype,
        "sizes": dict(probe.workload),
        "ranks": 1,
        "nodes": 1,
        "cold": True,
        "calls": 1,
    }


def read_probe(row: Mapping[str, Any]) -> Probe:
    """Read a probe from plain JSON.

    Parameters
    ----------
    row : mapping
        Written by `write_probe`.

    Returns
    -------
    probe : Probe
        What to time.

    Raises
    ------
    ValueError
        For an unknown stage.
    KeyError
        For a missing name.
    """
    stage = row["stage"]
    if stage == "kernels":
        return KernelProbe(
            kind=row["kind"],
            variant=row["variant"],
            dtype=row["dtype"],
            sizes=row["sizes"],
            cold=row["cold"],
            calls=row["calls"],
        )
    if stage == "collectives":
        return CollectiveProbe(
            operation=row["kind"],
            dtype=row["dtype"],
            nbytes=row["sizes"]["nbytes"],
            ranks=row["ranks"],
            nodes=row["nodes"],
            calls=row["calls"],
        )
    if stage == "iterations":
        return IterationProbe(
            name=row["kind"],
            dtype=row["dtype"],
            workload=row["sizes"],
            compiled=check_choice("variant", row["variant"], ("eager", "compiled")) == "compiled",
        )
    raise ValueError(
        f"stage is {show(stage)}; known are kernels, collectives, iterations; {WHICH_FILE}"
    )


# -- the list
# ----------------------------------------------------------------------------------------------------


def _draw_kernels(formats: Sequence[str], memory: float, cache: float) -> Iterator[KernelProbe]:
    """The kernels of a CPU in larger sizes: products in all formats, other classes in one; sums
    also in the cache."""
    cases = draw_cases(cache=cache, larger=8.0)
    for dtype in formats:
        for case in cases:
            if case.kind == "gemm":
                yield _size_product_for_fp8(case, dtype)
            elif dtype != formats[0]:
                continue
            elif case.kind == "embedding_forward":
                yield _spread_lookups(case, memory)
            elif case.kind in _TIMED or case.variant == "add":
                sizes = {"flops": 0.0, **case.sizes}
                kernel = KernelProbe(kind=case.kind, variant=case.variant, dtype=dtype, sizes=sizes)
                yield kernel
                if case.variant == "add" and 12.0 * sizes["elements"] < cache:
                    yield replace(kernel, cold=False)


def _size_product_for_fp8(case: Case, dtype: str) -> KernelProbe:
    """A product in sizes that fp8 allows: multiples of 16, rounded up."""
    m, n, k = (16 * math.ceil(case.sizes[side] / 16) for side in ("m", "n", "k"))
    return KernelProbe(
        kind=case.kind, variant=case.variant, dtype=dtype, sizes=size_product(m, n, k)
    )


def _spread_lookups(case: Case, memory: float) -> KernelProbe:
    """Lookups of uniform rows of a table that no cache holds."""
    dim = case.sizes["dim"]
    share_of_memory = max(0.02, case.sizes["table_rows"] / 1e6) / 16
    nbytes = forward_bytes(case.sizes["bags"], case.sizes["lookups"], dim, granularity=32)
    sizes = {
        "flops": 0.0,
        **case.sizes,
        "exponent": 0.0,
        "table_rows": share_of_memory * memory // dim,
        "nbytes": nbytes,
    }
    return KernelProbe(kind=case.kind, variant=case.variant, dtype="fp32", sizes=sizes)


def _draw_collectives(local: int, nodes: int, largest: float) -> Iterator[CollectiveProbe]:
    """Messages from 1 KiB to the largest: inside a node, over whole nodes, and between one rank of
    each node."""
    sizes = (16.0 * np.geomspace(64, largest / 16, 13).round()).tolist()
    for ranks, count in _list_spans(local, nodes):
        for operation in COLLECTIVES:
            dtypes = ["fp16"]
            # switches of the network add fp16 but not int8; both are timed to see the difference
            if operation == "all_reduce" and ranks == local:
                dtypes.append("int8")
            for dtype in dtypes:
                for nbytes in sizes:
                    yield CollectiveProbe(
                        operation=operation, dtype=dtype, nbytes=nbytes, ranks=ranks, nodes=count
                    )


def _list_spans(local: int, nodes: int) -> list[tuple[int, int]]:
    """Ranks and nodes of the collectives to time: powers of two, and all of them."""
    spans = set()
    for ranks in _double_up_to(local):
        spans.add((ranks, 1))
    for count in _double_up_to(nodes):
        spans.add((count, count))
        spans.add((count * local, count))
    return sorted(spans - {(1, 1)})


def _double_up_to(most: int) -> list[int]:
    """2, 4, 8 and so on below a number, and that number."""
    return [2**power for power in range(1, 20) if 2**power < most] + [most]


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
    >>> kernels = [probe for probe in plan if isinstance(probe, KernelProbe)]
    >>> sorted({probe.dtype for probe in kernels if probe.kind == "gemm"})
    ['bf16', 'fp8']
    """
    formats_in_order = [dtype for dtype in FORMATS if dtype in formats]
    yield from _draw_kernels(formats_in_order or ["fp32"], memory, cache)
    yield from _draw_collectives(local, nodes, min(2.0**30, memory / 4))
    yield from _list_iterations([dtype for dtype in ("bf16", "fp16") if dtype in formats])


def _list_iterations(half_formats: Sequence[str]) -> Iterator[IterationProbe]:
    """The iterations; those in half precision take the first of these formats."""
    samples = draw_calibration(models="all", hybrid=False)
    drawn: dict[str, Any] = {sample.name: sample.workload for sample in samples}
    small = {name: drawn[name] for name in _SMALL}
    for name, workload in (small | LARGE).items():
        if workload.dtype != "fp32":
            if not half_formats:
                continue
            workload = replace(workload, dtype=half_formats[0])
        eager = IterationProbe(name=name, dtype=workload.dtype, workload=dump(workload))
        yield eager
        if name in _COMPILED:
            yield replace(eager, compiled=True)
