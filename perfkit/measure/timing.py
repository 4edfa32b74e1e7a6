"""Timing of repeated calls, collectives and working sets, and of three short references that show
the speed."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import check_positive, is_listed, show
from perfkit.measure.records import CollectiveSamples, LadderStep, ReferenceTimes, Timing

#: Shortest sample [s]: faster calls are timed in groups.
_SAMPLE = 2e-4
#: Fewest and most samples of one thing [-].
LEAST = 6
MOST = 400

#: Largest working set that is timed [B], but at most a quarter of the free memory.
LARGEST = 2.0**31

#: Smallest working set [B].
_SMALLEST = 2.0**14
#: Sweeps over all sizes of collectives and of working sets [-].
_SWEEPS = 4
#: Size of a row of a working set [B].
_ROW = 64


def summarize_samples(seconds: Sequence[float], cpu_share: float = 1.0) -> Timing:
    """Summarize repeated times of one thing.

    Parameters
    ----------
    seconds : sequence of float
        Samples in time order [s].
    cpu_share : float
        CPU time over wall time; below `perfkit.measure.records.LEAST_CORE_SHARE` the process was
        pre-empted [-].

    Returns
    -------
    timing : Timing
        Median, quartiles, halves and number of samples, with this share.
    """
    values = np.asarray(seconds, dtype=float)
    q1, median, q3 = np.percentile(values, [25, 50, 75]).tolist()
    even, odd = values[::2], values[1::2]
    if len(odd) == 0:
        odd = even
    halves = [float(np.median(even)), float(np.median(odd))]
    return Timing(median=median, q1=q1, q3=q3, halves=halves, n=len(values), cpu_share=cpu_share)


def find_disagreement(timing: Timing) -> float:
    """Find how far the two halves of a measurement differ.

    Parameters
    ----------
    timing : Timing
        Such as from `summarize_samples`; with halves.

    Returns
    -------
    share : float
        Difference over the smaller half [-].

    Raises
    ------
    ValueError
        For a timing without halves.
    """
    halves = timing.halves
    if halves is None:
        raise ValueError(f"halves of {timing} is None; it must be the medians of two halves")
    return float(max(halves) / min(halves) - 1.0)


def round_times(times: Iterable[float]) -> list[float]:
    """Round times to four digits, which is finer than their noise."""
    return [float(f"{t:.4g}") for t in times]


def clock(calls: Iterable[Callable[[], Any]], device: str = "cpu") -> float:
    """Time calls that run one after another.

    Parameters
    ----------
    calls : iterable of callables
        What to run.
    device : str, optional
        ``cpu``, or ``cuda``, where the time includes all queued work.

    Returns
    -------
    seconds : float
        Time of all calls together [s].
    """
    start = time.perf_counter()
    for call in calls:
        call()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - start


def time_calls(calls: Sequence[Callable[[], Any]], *, seconds: float) -> Timing:
    """Time callables in rotation on a CPU, in samples that are long enough for the clock.

    Parameters
    ----------
    calls : sequence of callables
        Run one after another, repeatedly.
    seconds : float
        Time to spend, without the warm-up [s].

    Returns
    -------
    timing : Timing
        Time of one call, see `summarize_samples`.
    """
    warm_up = [*calls[:2], *calls[:2]]
    clock(warm_up)
    once = max(clock(calls[:1]), 1e-7)
    calls_of_sample = max(1, min(5000, int(_SAMPLE / once)))
    samples: list[float] = []
    turns = itertools.cycle(calls)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    while len(samples) < MOST:
        if len(samples) >= LEAST and time.perf_counter() - begin >= seconds:
            break
        samples.append(clock(itertools.islice(turns, calls_of_sample)) / calls_of_sample)
    cpu_seconds = time.process_time() - cpu_begin
    wall_seconds = max(time.perf_counter() - begin, 1e-9)
    return summarize_samples(samples, cpu_seconds / wall_seconds)


def time_loader(loader: Iterable[Any], *, batches: int = 64) -> float:
    """Time a batch of a data loader that works as fast as it can; `predict` takes the result as
    ``loading``.

    Parameters
    ----------
    loader : iterable
        A `torch.utils.data.DataLoader`, or anything that yields the batches of one rank; batches
        are dropped.
    batches : int, optional
        Batches to time after the warm-up; fewer if the loader ends before [-].

    Returns
    -------
    seconds : float
        Median time of a batch [s].

    Raises
    ------
    ValueError
        For a loader with fewer than two batches per worker.

    Notes
    -----
    Workers finish at about the same time, so batches come in bursts of one per worker. A sample is
    therefore the time of such a burst over the number of workers. The first batch of each worker is
    not timed.

    Examples
    --------
    >>> 0 < time_loader([0.0] * 10) < 1
    True
    """
    if not is_listed(loader):
        raise ValueError(f"loader is {show(loader)}; it must give batches, as a DataLoader does")
    workers = max(int(getattr(loader, "num_workers", 0)), 1)
    count = workers + check_positive("batches", batches, integer=True, maximum=10**9)
    batches_to_take = max(count, 2 * workers)
    moments = np.array([time.perf_counter() for _ in itertools.islice(loader, batches_to_take)])
    if len(moments) < 2 * workers:
        raise ValueError(
            f"loader is {show(loader)} and ends after {len(moments)} batches; it needs "
            f"{2 * workers}"
        )
    timed = moments[workers - 1 :]
    bursts = timed[workers:] - timed[:-workers]
    return float(np.median(bursts) / workers)


class Reference:
    """Three short tasks that show the speed of the machine: a product, a stream and a gather.

    Parameters
    ----------
    device : str, optional
        Torch device.

    Notes
    -----
    A product of 256 rows and columns (34 MFLOP), a pass over 8 MiB, read and written, and a gather
    of 32,768 rows of 64 B from there take about 2 ms together. Their times must not depend on
    earlier work. So the product runs twice untimed and twice timed, the pass rotates through 256
    MiB that no cache holds, and the gather reads the data of that pass. Checks: docs/formulas.md,
    table 7.1.
    """

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self._device = device
        self._wall_seconds = 0.0
        self._core_seconds = 0.0
        rng = torch.Generator().manual_seed(0)
        a = torch.rand(256, 256, generator=rng).to(device)
        b = torch.rand(256, 256, generator=rng).to(device)
        c = torch.rand(256, 256, generator=rng).to(device)
        self._multiply = partial(torch.mm, a, b, out=c)
        # ones, not empty: new pages fault at their first use
        parts = torch.ones(32, 2**17, 16, device=device)
        rows = torch.randint(0, 2**17, (32768,), generator=rng).to(device)
        gathered = torch.empty(32768, 16, device=device)
        streams = []
        for part in parts:
            add = partial(part.add_, 1.0)
            gather = partial(torch.index_select, part, 0, rows, out=gathered)
            streams.append((add, gather))
        self._streams = itertools.cycle([*streams[1:], streams[0]])

    def __call__(self) -> np.ndarray:
        """Run all three and return their times [s]."""
        add, gather = next(self._streams)
        two_products = [self._multiply, self._multiply]
        clock(two_products, self._device)
        core_begin, wall_begin = time.thread_time(), time.perf_counter()
        product_seconds = clock(two_products, self._device) / 2
        stream_seconds = clock([add], self._device)
        gather_seconds = clock([gather], self._device)
        self._core_seconds += time.thread_time() - core_begin
        self._wall_seconds += time.perf_counter() - wall_begin
        return np.array([product_seconds, stream_seconds, gather_seconds])

    @property
    def core_share(self) -> float:
        """Share of a core that this thread got during its references [-]."""
        return min(1.0, self._core_seconds / max(self._wall_seconds, 1e-9))


def time_references(*, seconds: float) -> ReferenceTimes:
    """Time the references alone, repeatedly.

    Parameters
    ----------
    seconds : float
        Time to spend [s].

    Returns
    -------
    result : ReferenceTimes
        Times of every call.
    """
    times: list[list[float]] = []
    reference = Reference()
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times.append(reference().tolist())
    return ReferenceTimes(references=times, core_share=reference.core_share)


def make_collective(
    operation: str, nbytes: int, device: str, *, dtype: str = "float32", group: Any = None
) -> tuple[Callable[[], Any], int]:
    """Prepare a collective of a message size in the nccl-tests convention [B]; returns the call and
    the exact size."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    element = getattr(torch, dtype)
    # equally many numbers for each rank
    count = max(nbytes // element.itemsize // ranks, 1) * ranks
    message = torch.rand(count, device=device).to(element)
    part = torch.rand(count // ranks, device=device).to(element)
    received = torch.rand(count, device=device).to(element)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": partial(dist.all_reduce, message),
        "broadcast": partial(dist.broadcast, message, 0),
        "all_gather": partial(gather, message, part),
        "reduce_scatter": partial(scatter, part, message),
        "all_to_all": partial(dist.all_to_all_single, received, message),
    }
    return partial(calls[operation], group=group), element.itemsize * count


class _TimedCollective(NamedTuple):
    """A collective of one message size: its operation, its exact size [B], the call, and the times
    of its calls [s]."""

    operation: str
    nbytes: int
    call: Callable[[], Any]
    samples: list[float]


def time_collectives(
    *, operations: Sequence[str], sizes: Sequence[int], seconds: float, device: str = "cpu"
) -> list[CollectiveSamples]:
    """Time collectives of message sizes in the nccl-tests convention [B], in several sweeps over
    all sizes.

    A sample lasts from a barrier to the end of the call on this rank. Returns what this rank saw of
    each operation and size.
    """
    import torch
    import torch.distributed as dist

    reference = Reference(device)
    collectives = []
    for operation in operations:
        for size in sizes:
            call, nbytes = make_collective(operation, size, device)
            collectives.append(_TimedCollective(operation, nbytes, call, []))
    for _ in range(_SWEEPS):
        for collective in collectives:
            collective.call()
            begin = time.perf_counter()
            # rank 0 decides when to stop, so that all ranks make equally many calls
            goes_on = torch.ones(1, device=device)
            while goes_on.item():
                for _ in range(8):
                    dist.barrier()
                    collective.samples.append(clock([collective.call], device))
                goes_on.fill_(time.perf_counter() - begin < seconds / _SWEEPS)
                dist.broadcast(goes_on, 0)
            reference()
    return [
        CollectiveSamples(
            operation=collective.operation,
            nbytes=collective.nbytes,
            samples=collective.samples,
            core_share=reference.core_share,
        )
        for collective in collectives
    ]


def time_ladder(*, largest: float) -> list[LadderStep]:
    """Time passes over working sets up to the largest [B], in several sweeps over all sizes.

    Returns the steps of the ladder, the smallest first.
    """
    import torch

    # two sizes in each octave
    sizes = 2.0 ** np.arange(np.log2(_SMALLEST), np.log2(max(largest, 4 * _SMALLEST)) + 0.01, 0.5)
    row_counts = [int(size) // _ROW for size in sizes]
    rows = torch.zeros(row_counts[-1], _ROW // 4)
    ladder = [LadderStep(nbytes=count * _ROW, stream=[]) for count in row_counts]
    for sweep in range(_SWEEPS):
        upwards = sweep % 2 == 0
        for step in ladder if upwards else reversed(ladder):
            working_set = rows[: step.nbytes // _ROW]
            passes = max(1, int(4e6 / step.nbytes))
            calls = [partial(working_set.add_, 1.0)] * passes
            clock(calls)  # fills the caches
            fastest = min(clock(calls), clock(calls))
            step.stream.append(fastest / passes)
    return ladder
