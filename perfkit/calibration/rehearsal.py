"""Answers to the probes of a cluster's calibration as a platform predicts them, for a rehearsal of
the whole path without a GPU."""

from collections.abc import Sequence

import numpy as np

from perfkit.ground.hardware import DTYPES
from perfkit.measure.gpu_records import Answer, DeviceAnswers, DeviceFacts, Failure, TimedCalls
from perfkit.measure.probes import CollectiveProbe, KernelProbe, Probe
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import Platform

#: Spread of the answers around the predictions [-]; formulas, table 6.2.
_NOISE = 0.02
#: Why an iteration has no answer.
NOT_REHEARSED = "not rehearsed"


def rehearse_answers(plan: Sequence[Probe], platform: Platform) -> DeviceAnswers:
    """Answer a plan as a device would that behaves as a platform predicts.

    Parameters
    ----------
    plan : sequence of Probe
        What would be timed.
    platform : Platform
        With the nodes and ranks that take part.

    Returns
    -------
    answers : DeviceAnswers
        In the order of the plan, each with an error of 2 % that depends on its place alone. Probes
        that the platform has no time for, and iterations, have none.
    """
    if platform.network.nodes > 1:  # with a link between the nodes, if the platform has none
        platform = platform.with_nodes(platform.network.nodes)
    rng = np.random.default_rng(0)
    answers: list[Answer] = []
    with keep_quiet():
        for probe in plan:
            noise = float(np.exp(_NOISE * rng.standard_normal()))
            answers.append(_answer(probe, platform, noise))
    last_cache, main_memory = platform.device.memory[-2:]
    return DeviceAnswers(
        answers=answers,
        facts=DeviceFacts(
            name=platform.device.name,
            memory=main_memory.capacity.value if main_memory.capacity else 0.0,
            cache=last_cache.capacity.value if last_cache.capacity else 0.0,
        ),
    )


def _answer(probe: Probe, platform: Platform, noise: float) -> Answer:
    """The predicted time of a probe times an error."""
    try:
        if isinstance(probe, KernelProbe):
            return _answer_kernel(probe, platform, noise)
        if isinstance(probe, CollectiveProbe):
            one_of_each_node = probe.nodes > 1 and probe.ranks == probe.nodes
            seconds = platform.collective_time(
                probe.operation,
                probe.nbytes,
                ranks=probe.ranks,
                algorithm="rail" if one_of_each_node else None,
            )
            return TimedCalls(samples=[noise * float(seconds)], sizes={"nbytes": probe.nbytes})
    except ValueError as error:
        return Failure(failed=str(error).splitlines()[0][:200])
    return Failure(failed=NOT_REHEARSED)


def _answer_kernel(probe: KernelProbe, platform: Platform, noise: float) -> Answer:
    """The predicted time of a kernel; its bytes are those of its operands, as a GPU would report."""
    if probe.kind not in platform.kernels:
        return Failure(failed=NOT_REHEARSED)
    sizes = probe.sizes
    numbers = 3.0 * sizes.get("elements", 0.0)
    for one, other in (("m", "k"), ("n", "k"), ("m", "n")):
        numbers += sizes.get(one, 0.0) * sizes.get(other, 0.0)
    nbytes = sizes.get("nbytes", DTYPES[probe.dtype] * numbers)
    work = {"flops": sizes["flops"], "nbytes": nbytes}
    seconds = float(platform.kernel_time(probe.kind, work, dtype=probe.dtype))
    return TimedCalls(samples=[noise * seconds], sizes={**sizes, "nbytes": nbytes})
