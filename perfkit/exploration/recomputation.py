"""What to compute again under a budget of memory: forms of checkpoints that fit, of as few layers as
possible."""

from dataclasses import replace

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.checkpoints import EVERY_LAYER, recomputes
from perfkit.platform.platform import Platform
from perfkit.prediction.memory import WORKSPACE, Room, estimate_reserve
from perfkit.prediction.strategy_case import find_megatron, make_case
from perfkit.prediction.strategy_memory import count_groups, measure_strategies
from perfkit.workloads.layer_kinds import has_unlike_layers
from perfkit.workloads.stack import Stack, apply_stack
from perfkit.workloads.strategy import Strategy, spread_chunks
from perfkit.workloads.strategy_fits import can_share
from perfkit.workloads.transformer import Transformer, can_compute_again

#: Forms that are tried besides ``none``, of all layers or of some.
_FORMS = ("per_op", "norms", "norms+activation", "mlp", "experts", "selective", "full")


def list_cheapest_checkpoints(
    model: Transformer,
    platform: Platform,
    tried: Strategy,
    time: Array,
    fits: np.ndarray,
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> Strategy | None:
    """List checkpoints with which strategies fit that do not without: of each form, that of the
    fewest layers; and where all layers are not enough, groups of layers that keep one input together.

    Parameters
    ----------
    model : Transformer
        The model.
    platform : Platform
        GPUs.
    tried : Strategy
        Strategies that were priced; each field an array.
    time : array
        Time of each [s].
    fits : array of bool
        Whether a rank holds each [-].
    room : Room
        What a rank may use.
    execution, stack : optional
        As `perfkit.explore` takes them.

    Returns
    -------
    further : Strategy or None
        Strategies that fit, with as few layers computed again as possible; None if there are none.

    Notes
    -----
    A strategy that computes something again takes longer than one that computes nothing again.
    Those that would then be slower than the fastest that fits are left out. The memory of k layers
    falls with k, so that the least k that fits is found by halving. Of groups of 2, 4, 8 layers and so
    on the smallest that fits is taken, which holds fewest layers at once.
    """
    fastest = time[fits].min() if fits.any() else np.inf
    is_plain = np.equal(tried.checkpoint, "none") & np.equal(tried.checkpoint_layers, EVERY_LAYER)
    plain = np.flatnonzero(is_plain & ~fits & (time < fastest))
    forms = [form for form in _FORMS if can_compute_again(model, form)]
    if not len(plain) or not forms:
        return None
    candidates = _list_whole(model, tried.select(plain), forms, execution, stack)
    if candidates is None:
        return None
    can_fit = _find_fitting(model, platform, candidates, room, execution, stack)
    further = None
    if not can_fit.all():
        too_large = candidates.select(~can_fit)
        further = _find_smallest_groups(model, platform, too_large, room, execution, stack)
    if not can_fit.any():
        return further
    candidates = candidates.select(can_fit)
    fewest = _find_fewest_layers(model, platform, candidates, room, execution, stack)
    if further is None:
        return fewest
    return Strategy.join([fewest, further])


def _list_whole(
    model: Transformer,
    plain: Strategy,
    forms: list[str],
    execution: str | None,
    stack: str | Stack | None,
) -> Strategy | None:
    """Strategies whose layers all compute something again, in each form that their software has and
    that goes with the settings of the model."""
    as_megatron = find_megatron(apply_stack(model, plain, execution, stack).stacks, plain)
    count = len(plain.ranks)
    chosen = []
    names = []
    for form in forms:
        can = np.ones(count, dtype=bool)
        if form == "per_op":
            can = can & ~as_megatron
        if recomputes(form, "experts"):
            can = can & ~np.broadcast_to(plain.overlap_experts, count)
        chosen.append(np.flatnonzero(can))
        names.append(np.full(int(can.sum()), form))
    rows = np.concatenate(chosen)
    if not len(rows):
        return None
    whole = replace(plain.select(rows), checkpoint=np.concatenate(names))
    goes = can_share(model, whole)
    if not goes.any():
        return None
    return whole.select(goes)


def _find_fewest_layers(
    model: Transformer,
    platform: Platform,
    candidates: Strategy,
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> Strategy:
    """The fewest layers of a chunk that must be computed again for strategies to fit that do so with
    all layers, and do not with none."""
    if has_unlike_layers(model):
        return candidates
    count = len(candidates.ranks)
    longest = spread_chunks(model.all_layers, candidates).longest
    enough = np.broadcast_to(longest, count).astype(np.int64)
    too_few = np.zeros(count, dtype=np.int64)
    while np.any(enough - too_few > 1):
        middle = (enough + too_few) // 2
        halved = replace(candidates, checkpoint_layers=middle)
        fits = _find_fitting(model, platform, halved, room, execution, stack)
        is_open = enough - too_few > 1
        enough = np.where(is_open & fits, middle, enough)
        too_few = np.where(is_open & ~fits, middle, too_few)
    return replace(candidates, checkpoint_layers=enough).settle_checkpoints(model.all_layers)


def _find_smallest_groups(
    model: Transformer,
    platform: Platform,
    too_large: Strategy,
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> Strategy | None:
    """Groups of layers with which strategies fit that do not where each layer keeps its input; None if
    there are none."""
    can = np.equal(too_large.checkpoint, "full") & np.less_equal(too_large.zero, 1)
    can = can & ~too_large.offloads_activations & ~too_large.puts_off_weights
    if has_unlike_layers(model) or model.mtp_layers or not can.any():
        return None
    whole = too_large.select(np.broadcast_to(can, len(too_large.ranks)))
    count = len(whole.ranks)
    longest = int(np.max(spread_chunks(model.all_layers, whole).longest))
    groups = np.ones(count, dtype=np.int64)
    size = 2
    while size <= longest and (groups == 1).any():
        grouped = replace(whole, checkpoint_group=np.full(count, size))
        fits = _find_fitting(model, platform, grouped, room, execution, stack)
        groups = np.where((groups == 1) & fits, size, groups)
        size *= 2
    fits = groups > 1
    if not fits.any():
        return None
    return replace(whole, checkpoint_group=groups).select(fits)


def _find_fitting(
    model: Transformer,
    platform: Platform,
    strategies: Strategy,
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> np.ndarray:
    """Whether a rank holds each strategy."""
    case = make_case(platform, apply_stack(model, strategies, execution, stack))
    needs = measure_strategies(case).total + WORKSPACE
    return np.asarray(room.holds(needs, estimate_reserve(needs, count_groups(case))))
