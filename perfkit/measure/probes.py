"""The plan of a GPU's calibration as data: kernels, collectives and small iterations to time; devices answer it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perfkit.ground.hardware import DTYPES
from perfkit.measure.kernels import draw_convolutions, spread_sizes
from perfkit.measure.samples import draw_calibration, dump
from perfkit.models.embedding import forward_bytes
from perfkit.models.roofline import attention_bytes, gemm_bytes
from perfkit.workloads.graph import COLLECTIVES
from perfkit.workloads.vocabulary import size_product

#: Number formats of matrix products in the order of a plan; the first one that a device has is used for the rest.
FORMATS = ("bf16", "fp16", "tf32", "fp32", "fp8")
#: Products in the first number format, and in every other one [-]; docs/formulas.md, table 2.2, on how many it takes.
_MANY, _FEW = 96, 32
#: Number format of collectives: that of the public measurements.
_SENT = "fp16"
#: Names of the families whose small iterations also run compiled: sparse gradients are not compiled.
_COMPILED = ("transformer", "convolution")


@dataclass(frozen=True)
class Probe:
    """One thing to time on a device.

    Parameters
    ----------
    stage : str
        ``kernels``, ``collectives`` or ``iterations``.
    kind : str
        Class of a kernel, operation of a collective, or family of an iteration.
    variant : str
        Finer class of a kernel; ``eager`` or ``compiled``.
    dtype : str
        Number format.
    sizes : mapping of str to float
        As of a `perfkit.measure.kernels.Case`, with ``flops`` [FLOP] and ``nbytes`` [B]; of a collective ``nbytes`` in
        the nccl-tests convention [B].
    members : tuple of int
        Ranks that take part.
    nodes : int
        Nodes that these ranks belong to [-].
    cold : bool
        Whether operands rotate, so that the last cache does not hold them.
    workload : mapping
        Workload of an iteration, see `perfkit.measure.samples.load`.
    repeats : int
        Calls of one sample [-].
    seconds : float
        Time that all of it is expected to take [s].
    """

    stage: str
    kind: str
    variant: str
    dtype: str
    sizes: Mapping[str, float]
    members: tuple[int, ...] = (0,)
    nodes: int = 1
    cold: bool = True
    workload: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))

    @property
    def ranks(self) -> int:
        """Ranks that take part [-]."""
        return len(self.members)

    @property
    def group(self) -> str:
        """What is measured and kept together, in one process."""
        place = f"{self.ranks}-{self.nodes}" if self.stage == "collectives" else self.kind
        return f"{self.stage}.{place}"

    @property
    def label(self) -> str:
        """What is timed, sizes aside."""
        about = {"collectives": f"{self.kind} on {self.ranks} ranks", "iterations": f"{self.variant} iterations"}
        return f"{about.get(self.stage, self.kind)} in {self.dtype}"


def _multiply(rng: np.random.Generator, dtype: str, n: int) -> Iterator[Probe]:
    for draw in spread_sizes(rng, n, (16, 16384), (64, 16384), (64, 16384)):
        m, columns, k = (16 * round(size / 16) for size in draw)  # what fp8 takes
        nbytes = gemm_bytes(m, columns, k, itemsize=DTYPES[dtype])
        yield Probe("kernels", "gemm", "nt", dtype, size_product(m, columns, k) | {"nbytes": nbytes})


def _attend(rng: np.random.Generator, dtype: str, n: int, *, memory: float) -> Iterator[Probe]:
    """Fused attention over as many tokens as a training step has, forward and backward, full and causal."""
    for number, (length, tokens) in enumerate(spread_sizes(rng, n, (128, 8192), (4e3, min(1e5, memory / 2.6e5)))):
        s, d, causal = 64 * round(length / 64), (64, 128)[number % 2], number // 2 % 2
        heads = max(1, round(tokens / s)) * 16
        moved = attention_bytes(1, heads, s, d, kv_heads=heads, itemsize=DTYPES[dtype])
        for phase, passes, again in (("forward", 2.0, 1.0), ("backward", 5.0, 2.0)):
            sizes = size_product(s, s, d, batch=heads, passes=passes * (0.5 if causal else 1.0))
            yield Probe("kernels", "attention", phase + "_causal" * causal, dtype, sizes | {"nbytes": again * moved})


def _convolve(rng: np.random.Generator, dtype: str, n: int) -> Iterator[Probe]:
    for case in draw_convolutions(rng, n, larger=1e3):
        o = case.sizes
        window = o["height"] * o["width"]
        read = o["rows"] * o["k"] / window * o["batch"] * o["image"] ** 2
        moved = DTYPES[dtype] * (read + o["elements"] + o["n"] * o["k"] * o["batch"])
        yield Probe("kernels", "convolution", case.variant, dtype, o | {"nbytes": moved * o["flops"] / _once(o)})


def _once(sizes: Mapping[str, float]) -> float:
    return 2.0 * sizes["batch"] * sizes["m"] * sizes["n"] * sizes["k"]


def _stream(rng: np.random.Generator, dtype: str, n: int, *, memory: float, cache: float) -> Iterator[Probe]:
    """Sums of two tensors from main memory, and from the last cache."""
    for largest, cold in ((memory / 16, True), (cache / 2, False)):
        for (nbytes,) in spread_sizes(rng, n, (2**12 if cold else cache / 16, largest)):
            elements = 64 * round(nbytes / 3 / DTYPES[dtype] / 64)
            sizes = {"elements": elements, "flops": 0.0, "nbytes": 3.0 * DTYPES[dtype] * elements}
            yield Probe("kernels", "elementwise", "add", dtype, sizes, cold=cold)


def _look_up(rng: np.random.Generator, n: int, *, memory: float) -> Iterator[Probe]:
    """Lookups of uniform rows in tables of up to a quarter of the memory, which no cache holds."""
    for share, width, bags, pooling in spread_sizes(rng, n, (0.02, 0.25), (32, 256), (1024, 16384), (1, 64)):
        dim, lookups = 16 * round(width / 16), round(bags) * round(pooling)
        sizes = {"lookups": lookups, "bags": round(bags), "dim": dim, "table_rows": int(share * memory / 4 / dim)}
        sizes |= {"exponent": 0.0, "elements": lookups * dim, "flops": float(lookups * dim)}
        sizes["nbytes"] = float(forward_bytes(round(bags), lookups, dim, granularity=32))
        yield Probe("kernels", "embedding_forward", "_embedding_bag", "fp32", sizes)


def _exchange(local: int, nodes: int, largest: float) -> Iterator[Probe]:
    """Collectives of 1 KiB to 1 GiB inside a node, over whole nodes, and on one rank of each node."""
    doubled = [2**power for power in range(1, 20)]
    spans = [(ranks, 1) for ranks in doubled if ranks < local] + [(local, 1)] * (local > 1)
    many = [count for count in doubled if count < nodes] + [nodes] * (nodes > 1)
    spans += [(count * each, count) for count in many for each in dict.fromkeys((1, local))]
    for ranks, count in spans:
        members = tuple(node * local + i for node in range(count) for i in range(ranks // count))
        for operation in COLLECTIVES:
            # a switch adds up half precision, which shows beside integers
            for dtype in (_SENT, "int8") if operation == "all_reduce" and ranks == local else (_SENT,):
                for nbytes in (16.0 * np.geomspace(64, largest / 16, 15).round()).tolist():
                    yield Probe("collectives", operation, "", dtype, {"nbytes": nbytes}, members, count)


def _iterate() -> Iterator[Probe]:
    """Two small iterations of each family, eager and, where that is usual, compiled."""
    found: dict[str, int] = {}
    for sample in draw_calibration(models="all", hybrid=False):
        found[sample.family] = found.get(sample.family, 0) + 1
        for how in ("eager", "compiled") if sample.family in _COMPILED else ("eager",):
            if found[sample.family] <= 2:
                yield Probe("iterations", sample.name, how, sample.workload.dtype, {}, workload=dump(sample.workload))


def list_probes(
    formats: Sequence[str], *, memory: float, cache: float, local: int = 1, nodes: int = 1, seed: int = 0
) -> list[Probe]:
    """List what to time on a cluster of GPUs.

    Parameters
    ----------
    formats : sequence of str
        Number formats that the device has; those of `FORMATS` count.
    memory : float
        Main memory of one device [B].
    cache : float
        Its last cache [B].
    local : int, optional
        Ranks on each node [-].
    nodes : int, optional
        Nodes [-].
    seed : int, optional
        Seed of the sizes; others give other sizes of the same ranges [-].

    Returns
    -------
    probes : list of Probe
        Those of one group follow one another; the same on all ranks.

    Examples
    --------
    >>> plan = list_probes(["bf16", "fp8"], memory=80e9, cache=50e6, local=8)
    >>> sorted({probe.dtype for probe in plan if probe.kind == "gemm"})
    ['bf16', 'fp8']
    >>> max(probe.sizes["nbytes"] for probe in plan if probe.stage == "collectives") / 2**30
    1.0
    """
    rng, known = np.random.default_rng([7, seed]), [dtype for dtype in FORMATS if dtype in formats] or ["fp32"]
    plan = [probe for dtype in known for probe in _multiply(rng, dtype, _MANY if dtype == known[0] else _FEW)]
    plan += [*_attend(rng, known[0], 12, memory=memory), *_convolve(rng, known[0], 2)]
    plan += [*_stream(rng, known[0], 16, memory=memory, cache=cache), *_look_up(rng, 12, memory=memory)]
    return [*plan, *_exchange(local, nodes, min(2.0**30, memory / 4)), *_iterate()]
