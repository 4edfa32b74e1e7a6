"""Time the probes of a plan on all ranks: which ranks take part in each, what rank 0 keeps, and what
happens if a rank cannot.

The device is what times a probe: `perfkit.measure.cuda.CudaDevice`, or one of
`perfkit.measure.replayed`, which gives recorded answers.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from perfkit.measure.folders import Campaign
from perfkit.measure.gpu_records import Answer, DeviceAnswers, DeviceFacts, Failure, read_answer
from perfkit.measure.iterations import find_ranks
from perfkit.measure.probes import CollectiveProbe, IterationProbe, KernelProbe, Probe, read_probe
from perfkit.measure.processes import MeasurementError
from perfkit.measure.records import write_record

#: Time that ranks wait for rank 0, which times kernels alone before collectives [s].
_LONGEST = 7200.0
#: Time in which all ranks have failed at a collective if one has [s].
_TOGETHER = 60.0


class Device(Protocol):
    """What times probes on one rank."""

    @property
    def backend(self) -> str | None:
        """Backend of PyTorch that its collectives need beside gloo."""

    def clean(self) -> None:
        """Free what the last probe left."""

    def time_alone(self, number: int, probe: KernelProbe | IterationProbe) -> Answer:
        """Time a probe of one rank.

        Parameters
        ----------
        number : int
            Its place in the plan [-].
        probe : KernelProbe or IterationProbe
            What to time.

        Returns
        -------
        answer : Answer
            Its times.
        """

    def prepare(self, number: int, probe: CollectiveProbe, group: Any) -> Callable[[], Answer]:
        """Allocate what a collective needs.

        Parameters
        ----------
        number : int
            Its place in the plan [-].
        probe : CollectiveProbe
            What to time.
        group : torch.distributed.ProcessGroup or None
            Its ranks; None for all.

        Returns
        -------
        call : callable
            Times it; all its ranks call this.
        """

    def state_facts(self) -> DeviceFacts:
        """What the driver says."""


def run_probes(
    device: Device, probes: Sequence[Mapping[str, Any]], *, kept: str, ranks_per_node: int
) -> DeviceAnswers:
    """Time all probes of a plan as one rank of a cluster; every rank calls this with the same plan.

    Parameters
    ----------
    device : Device
        What times a probe on this rank.
    probes : sequence of mapping
        What `perfkit.measure.probes.write_probe` makes of each probe.
    kept : str
        File of the `perfkit.measure.folders.Campaign` that keeps finished probes; empty for none.
    ranks_per_node : int
        Ranks on each node [-].

    Returns
    -------
    answers : DeviceAnswers
        In the order of the probes. Only rank 0 takes part in all probes and has all answers.
    """
    rank, ranks = find_ranks()
    campaign = Campaign(Path(kept) if kept and not rank else None, progress=not rank)
    groups: dict[tuple[int, ...], _Group] = {}
    if ranks > 1:  # no rank repeats what rank 0 has kept
        agreed: list[Any] = [campaign.done]
        dist.broadcast_object_list(agreed, 0, device=torch.device("cpu"))
        campaign.done.update(agreed[0])

    def answer(number: int, probe: Probe) -> dict[str, Any] | None:
        """The answer of this rank as plain JSON; None if it takes no part."""
        members = list_members(probe, ranks_per_node)
        if len(members) > 1 and members not in groups:
            groups[members] = _Group(members, ranks, device.backend)
        device.clean()
        if rank not in members:
            return None
        if isinstance(probe, CollectiveProbe):
            return write_record(_time_together(device, number, probe, groups[members]))
        try:
            return write_record(device.time_alone(number, probe))
        except (RuntimeError, ValueError) as error:
            # such as too little memory, or no kernel for this format
            device.clean()
            return write_record(Failure(failed=_describe(error)))

    jobs = {f"{i}": partial(answer, i, read_probe(row)) for i, row in enumerate(probes)}
    rows = campaign.run("probes", jobs).values()
    return DeviceAnswers(
        answers=[None if row is None else read_answer(row) for row in rows],
        facts=device.state_facts(),
    )


class _Group:
    """The ranks of a collective: a group for it, and one for what they say to each other.

    A group of gloo connects each rank with each other one, so that no two are made for the same.
    """

    def __init__(self, members: tuple[int, ...], ranks: int, backend: str | None) -> None:
        self.members = members
        self.words = dist.new_group(
            list(members), backend="gloo", timeout=timedelta(seconds=_LONGEST)
        )
        self.collective: Any = self.words
        if backend is not None:  # None is the group of all ranks
            self.collective = None
            if len(members) < ranks:
                self.collective = dist.new_group(list(members), backend=backend)

    def agree(self, failure: str | None) -> str | None:
        """The first failure of all ranks, or None if there is none; every rank calls this.

        It also waits for the slowest rank, so that nothing is waited for in the collective itself.
        """
        failures = torch.tensor([int(failure is not None)], dtype=torch.int32)
        work = dist.all_reduce(failures, group=self.words, async_op=True)
        if failure is None:
            work.wait()
        else:
            try:
                work.wait(timedelta(seconds=_TOGETHER))
            except RuntimeError as error:
                raise MeasurementError(
                    f"{failure}; other ranks wait in the same collective, so this cannot go on"
                ) from error
        if not failures.item():
            return None
        said: list[Any] = [None] * len(self.members)
        dist.all_gather_object(said, failure, group=self.words)
        return next(
            f"rank {rank}: {text}" for rank, text in zip(self.members, said, strict=True) if text
        )


def _time_together(device: Device, number: int, probe: CollectiveProbe, group: _Group) -> Answer:
    """Time a collective of this rank with the others of its group, if all of them can."""
    timed: Answer | None = None
    failure: str | None = None
    call: Callable[[], Answer] | None = None
    try:
        call = device.prepare(number, probe, group.collective)
    except (RuntimeError, ValueError) as error:
        failure = _describe(error)
    failure = group.agree(failure)
    if failure is None and call is not None:
        try:
            timed = call()
        except (RuntimeError, ValueError) as error:
            failure = _describe(error)
        failure = group.agree(failure)
    if timed is None or failure is not None:
        device.clean()
        return Failure(failed=failure or "not timed")
    return timed


def _describe(error: Exception) -> str:
    """An error in one short line."""
    return f"{type(error).__name__} {error}".splitlines()[0][:200]


def list_members(probe: Probe, ranks_per_node: int) -> tuple[int, ...]:
    """Ranks that take part in a probe: the first ones of each of its nodes.

    Parameters
    ----------
    probe : Probe
        What is timed.
    ranks_per_node : int
        Ranks on each node [-].

    Returns
    -------
    members : tuple of int
        Ranks; rank 0 alone for kernels and iterations [-].

    Examples
    --------
    >>> two_of_each = CollectiveProbe(
    ...     operation="all_reduce", dtype="fp16", nbytes=64.0, ranks=4, nodes=2
    ... )
    >>> list_members(two_of_each, 8)
    (0, 1, 8, 9)
    """
    if not isinstance(probe, CollectiveProbe):
        return (0,)
    ranks_of_node = probe.ranks // probe.nodes
    members: list[int] = []
    for node in range(probe.nodes):
        first = node * ranks_per_node
        members.extend(range(first, first + ranks_of_node))
    return tuple(members)
