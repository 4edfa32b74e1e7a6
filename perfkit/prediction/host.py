"""Time of the host: what each call of the framework costs, and how host and device share an
iteration."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.units import Array
from perfkit.models.roofline import smooth_maximum
from perfkit.platform.platform import Platform
from perfkit.workloads.graph import Graph, OperationClass


class CallOverheads(NamedTuple):
    """What calls of one class of operations cost the host.

    Parameters
    ----------
    before_launch, after_launch, between_launches : float
        Time of a call up to its first launch (T2), after its last (T3), and between two (T5) [s].
    """

    before_launch: float
    after_launch: float
    between_launches: float


def price_host(graph: Graph, platform: Platform) -> tuple[Array, Array]:
    """Host time of every operation up to its first launch, and from there to its last [s].

    The platform's ``host`` overheads are ``gap`` (T1), ``before_launch`` (T2), ``after_launch``
    (T3), ``launch`` (T4), ``between_launches`` (T5) and ``bare`` (a call without a launch). They
    are the same for all operations or, as ``before_launch.gemm.backward``, those of a class and of
    its phase or variant.

    Notes
    -----
    A call of the framework costs T1 + T2 + T4 up to its first kernel, T5 + T4 for every further one
    and T3 after the last; T3 is counted with the next call. A call without a kernel costs T1 and
    its own time.

    References
    ----------
    .. [1] Z. Lin et al., "Building a performance model for deep learning recommendation model
       training on GPUs", 2022, arXiv:2201.07821, section 3.4 (the five overheads)
    """
    known = {name: quantity.value for name, quantity in platform.host.items()}
    gap = known.get("gap", 0.0)
    call_without_kernel = known.get("bare", 0.0)
    launch = known.get("launch", 0.0)
    overheads = []
    for operation_class in graph.classes.distinct:
        overheads.append(find_overheads(known, operation_class))
    of_classes = np.array(overheads).reshape(-1, len(CallOverheads._fields))
    before_launch, after_launch, between_launches = of_classes[graph.classes.of_operation].T
    calls = graph.column("calls")
    launches = graph.column("launches")
    calls_without_kernel = graph.column("bare")

    first_launch = launch * np.minimum(launches, 1.0)
    host = calls * (gap + before_launch) + first_launch
    host += calls_without_kernel * (gap + call_without_kernel)
    # a further kernel of the last call
    until_next_kernel = between_launches
    if graph.execution == "compiled":
        # compiled code goes from launch to launch as the framework does from call to call
        until_next_kernel = np.minimum(between_launches, gap)
    host += np.where((calls == 0) & (launches > 0), until_next_kernel, 0.0)
    # what a call does after its last launch delays the next call; the last one delays the first
    opens_call = np.flatnonzero(calls)
    after_calls = after_launch[opens_call]
    if graph.repeats is None:
        after_calls = np.roll(after_calls, 1)
    host[opens_call] += after_calls
    launch_interval = np.maximum(launches - 1, 0.0) * (between_launches + launch)
    return host, launch_interval


def find_overheads(known: Mapping[str, float], operation_class: OperationClass) -> CallOverheads:
    """Find what a call costs: of its variant, else of its phase, of its class, or of all calls.

    Parameters
    ----------
    known : mapping of str to float
        Overheads of the host by name, see `price_host` [s].
    operation_class : OperationClass
        Class of the call.

    Returns
    -------
    overheads : CallOverheads
        Zero where nothing is known.
    """
    kind, variant, phase = operation_class
    scopes = (f".{kind}.{variant}", f".{kind}.{phase}", f".{kind}", "")
    overheads = []
    for name in CallOverheads._fields:
        overhead = 0.0
        for scope in scopes:
            if name + scope in known:
                overhead = known[name + scope]
                break
        overheads.append(overhead)
    return CallOverheads(*overheads)


def join_host(device: Any, host: Any, whole: Iteration | None) -> Any:
    """Time of an iteration [s]: that of the slower of device and host, or a smooth maximum where
    steps were fitted."""
    sharpness = np.inf
    if whole is not None:
        sharpness = whole.get("sharpness", np.inf)
    return smooth_maximum(device, host, sharpness=sharpness)
