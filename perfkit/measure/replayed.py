"""A device that gives recorded answers: all of a calibration but its timing runs, on any machine.

Ranks meet, sit, agree and exchange as on a cluster of GPUs; in place of each timed collective they
add one number over gloo.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from perfkit.measure.gpu_records import Answer, DeviceAnswers, DeviceFacts, read_answer
from perfkit.measure.probes import CollectiveProbe, IterationProbe, KernelProbe
from perfkit.measure.probing import run_probes
from perfkit.measure.records import read_record


class ReplayedDevice:
    """A device that gives the answers of a list.

    Parameters
    ----------
    answers : sequence of Answer
        In the order of the plan.
    facts : DeviceFacts
        What it says of itself.
    """

    backend: str | None = None

    def __init__(self, answers: Sequence[Answer], facts: DeviceFacts) -> None:
        self._answers, self._facts = answers, facts

    def clean(self) -> None:
        """Nothing is left."""

    def time_alone(self, number: int, probe: KernelProbe | IterationProbe) -> Answer:
        """The answer of the list."""
        return self._answers[number]

    def prepare(self, number: int, probe: CollectiveProbe, group: Any) -> Callable[[], Answer]:
        """A call that adds one number over all ranks, and gives the answer of the list."""
        return partial(self._exchange, number, probe, group)

    def _exchange(self, number: int, probe: CollectiveProbe, group: Any) -> Answer:
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        if int(ones.item()) != probe.ranks:
            raise RuntimeError(f"{ones.item():.0f} of {probe.ranks} ranks took part")
        return self._answers[number]

    def state_facts(self) -> DeviceFacts:
        """What the list says of the device."""
        return self._facts


def replay_probes(
    *,
    probes: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    kept: str,
    ranks_per_node: int,
    device: str = "cpu",
) -> DeviceAnswers:
    """Answer all probes of a plan as one rank of a cluster, without timing them.

    Parameters
    ----------
    probes : sequence of mapping
        What `perfkit.measure.probes.write_probe` makes of each probe.
    answers : sequence of mapping
        What `perfkit.measure.records.write_record` makes of the answer to each.
    facts : mapping
        The same of what the driver says.
    kept : str
        File that keeps finished probes; empty for none.
    ranks_per_node : int
        Ranks on each node [-].
    device : str, optional
        Torch device of the exchanges.

    Returns
    -------
    answers : DeviceAnswers
        In the order of the probes.
    """
    if device != "cpu":
        raise ValueError(f"device is {device!r}; recorded answers are given on a cpu")
    replayed = ReplayedDevice(
        [read_answer(row) for row in answers], read_record(DeviceFacts, facts, "facts")
    )
    return run_probes(replayed, probes, kept=kept, ranks_per_node=ranks_per_node)
