"""What each part of the calibration of a CPU has found, in a line."""

from collections.abc import Mapping, Sequence

from perfkit.calibration.fit_caches import find_caches
from perfkit.calibration.fit_device import name_levels
from perfkit.ground.units import format_bytes, format_rate, format_time
from perfkit.measure.records import LadderStep, MeasuredCollective, MeasuredKernel
from perfkit.platform.machine import ANY, Context


def describe_memory(ladder: Sequence[LadderStep]) -> str:
    """Say how fast each level of the memory is.

    Parameters
    ----------
    ladder : sequence of LadderStep
        Passes over working sets.

    Returns
    -------
    text : str
        The slowest level first.
    """
    capacities, rates, largest = find_caches(ladder)
    if not rates:
        return f"working sets of up to {format_bytes(largest)} tell no levels apart"
    words = []
    for name, rate in zip(name_levels(capacities), rates, strict=True):
        words.append(f"{format_rate(rate, 'B/s')} from {name}")
    return ", ".join(reversed(words))


def describe_kernels(kernels: Sequence[MeasuredKernel]) -> str:
    """Say how fast products and lookups are.

    Parameters
    ----------
    kernels : sequence of MeasuredKernel
        Kernels alone.

    Returns
    -------
    text : str
        Their number, and the best rates.
    """
    words = [f"{len(kernels)} sizes"]
    products = [kernel.sizes["flops"] / kernel.q1 for kernel in kernels if kernel.kind == "gemm"]
    if products:
        words.append(f"products of matrices at up to {format_rate(max(products), 'FLOP/s')}")
    lookups = []
    for kernel in kernels:
        if kernel.kind == "embedding_forward":
            lookups.append(kernel.sizes["lookups"] / kernel.q1)
    if lookups:
        words.append(f"up to {max(lookups) / 1e6:.0f} million lookups of tables a second")
    return ", ".join(words)


def describe_collectives(collectives: Sequence[MeasuredCollective]) -> str:
    """Say how fast messages between ranks are.

    Parameters
    ----------
    collectives : sequence of MeasuredCollective
        At least one.

    Returns
    -------
    text : str
        Shortest time, and best rate.
    """
    shortest = min(collective.q1 for collective in collectives)
    best = max(collective.nbytes / collective.q1 for collective in collectives)
    return f"{format_time(shortest)} at least, up to {format_rate(best, 'B/s')}"


def describe_iterations(context: Context, measured: int) -> str:
    """Say how well iterations are predicted that a fit has not seen.

    Parameters
    ----------
    context : Context
        Fitted to the iterations.
    measured : int
        Their number [-].

    Returns
    -------
    text : str
        The scatter of left-out iterations, by family.
    """
    spreads = {}
    for family, fit in context.iterations.items():
        if family != ANY:
            spreads[family] = fit.spread
    if ANY in context.parallel:
        spreads["on several ranks"] = context.parallel[ANY].spread
    return f"{measured} configurations; {_list_shares(spreads)} from the fit to the others"


def describe_moves(moves: Mapping[str, float], measured: int) -> str:
    """Say that a calibration goes on, and why.

    Parameters
    ----------
    moves : mapping of str to float
        From `perfkit.calibration.stopping.list_moving_families` [-].
    measured : int
        Iterations so far [-].

    Returns
    -------
    text : str
        One line.
    """
    return (
        f"{measured} configurations so far; more may still move predictions: {_list_shares(moves)}"
    )


def _list_shares(shares: Mapping[str, float]) -> str:
    """Names with their shares."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
