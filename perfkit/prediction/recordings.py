"""Recordings of training loops for a platform, whose GPU they are told of."""

from pathlib import Path

from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.recording.places import NEUTRAL, Gpu
from perfkit.recording.scripts import USUAL_ITERATIONS, Recording


def record(
    *,
    device: str = "cuda",
    ranks: int = 1,
    rank: int = 0,
    platform: Platform | str | Path | None = None,
    iterations: int = USUAL_ITERATIONS,
    name: str = "loop",
) -> Recording:
    """Record the training loop in a ``with`` block as it is written, without computing.

    An iteration is what lies between the ends of two updates of the first optimizer. The iterations
    after the first update are recorded and compared; then the loop is ended, and what stands below
    it in the block is not run. No GPU and no other process is needed.

    Parameters
    ----------
    device : str
        ``cuda`` or ``cpu``: what the loop runs on.
    ranks, rank : int
        Number of ranks, and the rank that is recorded [-]. The loop finds RANK, WORLD_SIZE and the
        like in its environment, and begins its process group itself if it wants to.
    platform : Platform, str or Path, optional
        Where it will run. The loop is told name, memory and compute capability of its device; else
        those of a GPU such as an A100. Of every GPU it is told the multiprocessors and the L2 cache
        of an A100.
    iterations : int
        Iterations that are compared, at most: of long ones fewer, until they have more than 30,000
        operations in all [-].
    name : str
        Name of the graph.

    Returns
    -------
    recording : Recording
        After the block `predict` takes it. ``recording.graph`` is the most frequent iteration, and
        ``recording.iterations`` are all kinds with their counts.

    Raises
    ------
    ValueError
        At the end of the block: for a loop without an update, for one that does not update in 1,024
        backward passes, and for one that needs a number that is not computed; the message names the
        line.

    Warns
    -----
    UserWarning
        If iterations differ, if a computed number decides, and for every other assumption, as in
        `capture`.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(1000, 1000)
    >>> updates = torch.optim.SGD(model.parameters())
    >>> with record(device="cpu") as recording:
    ...     for _ in range(100):
    ...         updates.zero_grad()
    ...         model(torch.randn(32, 1000)).sum().backward()
    ...         updates.step()
    >>> recording
    <loop: 4 iterations recorded, all alike>
    """
    gpu = NEUTRAL if platform is None else find_gpu(load_platform(platform))
    return Recording(
        device=device, ranks=ranks, rank=rank, iterations=iterations, name=name, gpu=gpu
    )


def find_gpu(platform: Platform) -> Gpu:
    """What a program is told of the GPU of a platform; what is not known is that of an A100."""
    device = platform.device
    if device.kind == "cpu":
        return NEUTRAL
    memory = device.memory[-1].capacity
    capability = NEUTRAL.capability
    if device.capability is not None:
        major = int(device.capability.value)
        capability = major, round(10 * (device.capability.value - major))
    return Gpu(
        name=device.name,
        memory=NEUTRAL.memory if memory is None else memory.value,
        capability=capability,
        per_node=platform.network.ranks_per_node,
    )
