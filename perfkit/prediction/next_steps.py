"""What would make a strategy fit that does not: settings with the memory that each frees and the time
that an iteration then takes, the fastest first."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import format_bytes, format_time
from perfkit.models.checkpoints import EVERY_LAYER
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.host_memory import knows_host, share_hosts
from perfkit.platform.platform import Platform
from perfkit.prediction.memory import Room
from perfkit.prediction.offload import ON_HOST
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.attention_blocks import UNFUSED
from perfkit.workloads.layer_kinds import has_unlike_layers
from perfkit.workloads.stack import Stack, can_run, find_stack, state_strategy
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.strategy_fits import can_share
from perfkit.workloads.transformer import Transformer

#: What is left where no step helps, and what may be taken instead of one.
OTHERWISE = "a platform with more ranks or memory"
#: Where no setting is enough alone, one that frees less than this share of what is needed is not
#: named [-].
_LEAST_SHARE = 0.01
#: Most settings or plans that are named, beside more ranks [-].
MOST_NAMED = 3
#: Layers of a group that are tried, see `Strategy.checkpoint_group` [-].
_GROUPS = (2, 4, 8)


@dataclass(frozen=True)
class _Change:
    """A setting, as it is written, and the fields of a model and a strategy that it changes."""

    words: str
    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)


class _Outcome(NamedTuple):
    """What the fullest rank allocates [B], whether its device and its host hold it, and the time of an
    iteration [s]."""

    needs: float
    fits: bool
    time: float


class NextStep(NamedTuple):
    """A setting that makes the fullest rank need less.

    Parameters
    ----------
    words : str
        The setting, as it is written.
    freed : float
        What the rank then needs less; of steps that are taken together, less than with those before
        it [B].
    fits : bool
        Whether it then fits, with the steps before it if they are taken together.
    time : float
        Time of an iteration with it, and with the steps before it [s].
    """

    words: str
    freed: float
    fits: bool
    time: float

    def describe(self) -> str:
        """Say what it frees, and what it takes where it fits."""
        if not self.fits:
            return f"{self.words} (frees {format_bytes(self.freed)})"
        return f"{self.words} (frees {format_bytes(self.freed)}: fits, {format_time(self.time)})"


class NextSteps(NamedTuple):
    """What makes a strategy fit.

    Parameters
    ----------
    alone : tuple of NextStep
        Settings each of which is enough, the fastest first, and then more ranks.
    together : tuple of NextStep
        If none is enough but for more ranks, the fastest two of several kinds that are; if no two
        are, settings one after another, until they are enough or there are no more.
    nearest : NextStep or None
        If those are not enough, a setting that frees more than all of them, and does not go with them.
    """

    alone: tuple[NextStep, ...]
    together: tuple[NextStep, ...]
    nearest: NextStep | None = None

    def advise(self) -> str:
        """Say them in words.

        Examples
        --------
        >>> NextSteps((NextStep("zero=1", 61e9, True, 0.5),), ()).advise()
        'take zero=1 (frees 61 GB: fits, 500 ms), or a platform with more ranks or memory'
        >>> NextSteps((), ()).advise()
        'take a platform with more ranks or memory'
        """
        choices = [step.describe() for step in self.alone]
        joined = " and then ".join(step.describe() for step in self.together)
        if self.together and self.together[-1].fits:
            choices.append(joined)
        if choices:
            return f"take {' or '.join(choices)}, or {OTHERWISE}"
        if not self.together:
            return f"take {OTHERWISE}"
        verb = "is" if len(self.together) == 1 else "are"
        refused = f"{joined} {verb} not enough"
        if self.nearest is not None:
            freed = format_bytes(self.nearest.freed)
            refused += f", nor is {self.nearest.words} alone (frees {freed})"
        return f"{refused}; take {OTHERWISE}"


def advise_transformer(
    model: Transformer,
    platform: Platform,
    strategy: Strategy | None,
    ranks: int,
    execution: str | None,
    stack: str | Stack | None,
) -> str:
    """Say what makes a prediction of a Transformer fit that does not.

    Parameters
    ----------
    model : Transformer
        The model.
    platform : Platform
        GPUs.
    strategy : Strategy or None
        How ranks share it; None for its own settings.
    ranks : int
        Ranks that take part [-].
    execution, stack : optional
        As `perfkit.predict` takes them.

    Returns
    -------
    words : str
        See `NextSteps.advise`. Those of a model without a strategy begin with one that says the same;
        where none can, a smaller batch is named alone.
    """
    shared = strategy
    words = ""
    if shared is None:
        try:
            shared = state_strategy(model, ranks)
        except ValueError:  # a micro-batch larger than those of strategies
            return f"take a smaller batch or {OTHERWISE}"
        words = f"with strategy={shared!r} "
    room = Room.of_device(platform.memory_of_rank)
    steps = list_next_steps(model, platform, shared, room, execution=execution, stack=stack)
    return f"{words}{steps.advise()}"


def list_next_steps(
    model: Transformer,
    platform: Platform,
    strategy: Strategy,
    room: Room,
    *,
    execution: str | None = None,
    stack: str | Stack | None = None,
) -> NextSteps:
    """List what makes a rank of a strategy that does not fit need less.

    Parameters
    ----------
    model : Transformer
        The model.
    platform : Platform
        GPUs.
    strategy : Strategy
        A single one.
    room : Room
        What a rank may use.
    execution, stack : optional
        As `perfkit.predict` takes them.

    Returns
    -------
    steps : NextSteps
        Of each kind the fastest that is enough alone: an optimizer without workspace, smaller
        micro-batches, sequences of which a micro-batch has one and that ranks share, shards of what
        replicas hold, checkpoints, and offload, where the memory of the host is known and large
        enough. The `MOST_NAMED` fastest of these, and then more ranks, while the platform has them.

    Notes
    -----
    Memory and times are those of `perfkit.prediction.strategies.price_strategies`.
    """
    kinds = _list_changes(model, strategy, stack)
    more_ranks = _list_more_ranks(platform, strategy)

    def price(changes: Sequence[Sequence[_Change]]) -> list[_Outcome | None]:
        return _price(model, platform, strategy, changes, room, execution, stack)

    [before] = price([()])
    if before is None:
        return NextSteps((), ())
    *priced, more = _price_kinds((*kinds, more_ranks), before, price)

    # 1. Settings that are enough alone.
    fastest = []
    for kind in priced:
        enough = [one for one in kind if one.step.fits]
        if enough:
            fastest.append(min(enough, key=lambda one: one.step.time).step)
    alone = sorted(fastest, key=lambda step: step.time)[:MOST_NAMED]
    alone += [one.step for one in more if one.step.fits][:1]
    if fastest:
        return NextSteps(tuple(alone), ())

    # 2. Two of them, or as many as are needed.
    pair = _find_fastest_pair(before, priced, room, price)
    if pair or alone:
        return NextSteps(tuple(alone), pair)
    strongest = []
    for kind in (*priced, more):
        if kind:
            strongest.append(max(kind, key=lambda one: one.step.freed))
    together = _add_up(before, [one.change for one in strongest], price)
    return NextSteps((), together, _find_nearest([one.step for one in strongest], together))


#: Prices changes that are taken together, several times: None where something refuses them.
_Price = Callable[[Sequence[Sequence[_Change]]], list[_Outcome | None]]


class _PricedChange(NamedTuple):
    """A setting that frees memory, and what it does alone."""

    change: _Change
    step: NextStep


def _price_kinds(
    kinds: Sequence[Sequence[_Change]], before: _Outcome, price: _Price
) -> list[list[_PricedChange]]:
    """Those settings of each kind that free memory."""
    changes = [change for kind in kinds for change in kind]
    outcomes = price([(change,) for change in changes])
    outcome_of = dict(zip([change.words for change in changes], outcomes, strict=True))
    priced = []
    for kind in kinds:
        freeing = []
        for change in kind:
            outcome = outcome_of[change.words]
            if outcome is not None and outcome.needs < before.needs:
                freeing.append(_PricedChange(change, _make_step(change, before.needs, outcome)))
        priced.append(freeing)
    return priced


def _find_fastest_pair(
    before: _Outcome, kinds: Sequence[Sequence[_PricedChange]], room: Room, price: _Price
) -> tuple[NextStep, ...]:
    """The fastest two settings of several kinds that are enough together; empty if no two are.

    Those that free too little even if each frees as much as alone are left out.
    """
    pairs = []
    for two in combinations(kinds, 2):
        for first, second in product(*two):
            if before.needs - first.step.freed - second.step.freed <= room.allocated:
                pairs.append((first, second))
    outcomes = price([(first.change, second.change) for first, second in pairs])
    fastest: tuple[NextStep, ...] = ()
    least = np.inf
    for (first, second), outcome in zip(pairs, outcomes, strict=True):
        if outcome is None or not outcome.fits or outcome.time >= least:
            continue
        least = outcome.time
        held = before.needs - first.step.freed
        fastest = (first.step, _make_step(second.change, held, outcome))
    return fastest


def _make_step(change: _Change, needed: float, outcome: _Outcome) -> NextStep:
    """A setting with what it does to a rank that needed so much [B]."""
    return NextStep(change.words, needed - outcome.needs, outcome.fits, outcome.time)


def _add_up(
    before: _Outcome,
    strongest: Sequence[_Change],
    price: _Price,
) -> tuple[NextStep, ...]:
    """Settings one after another, until they are enough; those that free nothing are left out."""
    steps = []
    taken: list[_Change] = []
    held = before.needs
    for change in strongest:
        [outcome] = price([(*taken, change)])
        if outcome is None or held - outcome.needs < _LEAST_SHARE * before.needs:
            continue
        taken.append(change)
        steps.append(_make_step(change, held, outcome))
        held = outcome.needs
        if outcome.fits:
            break
    return tuple(steps)


def _find_nearest(strongest: Sequence[NextStep], together: Sequence[NextStep]) -> NextStep | None:
    """The setting that frees more alone than some that are not enough together; None if none does."""
    if not together or together[-1].fits:
        return None
    nearest = max(strongest, key=lambda step: step.freed)
    if nearest.freed <= sum(step.freed for step in together):
        return None
    return nearest


def _price(
    model: Transformer,
    platform: Platform,
    strategy: Strategy,
    changes: Sequence[Sequence[_Change]],
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> list[_Outcome | None]:
    """Memory and time with some changes together; None where the model, the software or the host
    refuses them."""
    found: list[_Outcome | None] = [None] * len(changes)
    by_model: dict[Transformer, list[tuple[int, Strategy]]] = {}
    for number, together in enumerate(changes):
        changed_model, changed = model, strategy
        with suppress(ValueError):  # settings that do not go together
            for change in together:
                changed_model = replace(changed_model, **change.model)
                changed = replace(changed, **change.strategy)
            if can_share(changed_model, changed):
                by_model.setdefault(changed_model, []).append((number, changed))
    for changed_model, numbered in by_model.items():
        strategies = [one for _, one in numbered]
        try:
            priced = _price_together(changed_model, platform, strategies, room, execution, stack)
        except ValueError:  # the software refuses one of them
            priced = []
            for one in strategies:
                alone: list[_Outcome | None] = [None]
                with suppress(ValueError):
                    alone = _price_together(changed_model, platform, [one], room, execution, stack)
                priced += alone
        for (number, _), outcome in zip(numbered, priced, strict=True):
            found[number] = outcome
    return found


def _price_together(
    model: Transformer,
    platform: Platform,
    strategies: Sequence[Strategy],
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> list[_Outcome | None]:
    """Memory and time of strategies of one model; None where the host has too little for what is
    offloaded."""
    stacked = Strategy.stack(strategies)
    columns = price_strategies(
        model, platform, stacked, execution, room=room, near=0.0, stack=stack
    )
    holds = room.holds(columns["needs"], columns["reserve"])
    host_holds = columns["on_host"] <= share_hosts(platform, stacked.ranks, columns["on_host"])
    priced: list[_Outcome | None] = []
    for number in range(len(strategies)):
        if not host_holds[number]:
            priced.append(None)
            continue
        needs = float(columns["needs"][number])
        time = float(columns["time"][number])
        priced.append(_Outcome(needs, bool(holds[number]), time))
    return priced


def _list_changes(
    model: Transformer, s: Strategy, stack: str | Stack | None
) -> list[list[_Change]]:
    """Settings of a strategy that need less on the same ranks, by kind."""
    zero = int(s.zero)
    most_zero = _find_most_zero(stack)
    if stack is not None and zero == 0:
        zero = find_stack(stack).zero
    if s.pp > 1:
        most_zero = min(most_zero, 1)

    workspace = []
    if has_workspace(model):
        workspace.append(_Change("fused=True", model={"fused": True}))

    # parts of a micro-batch divide the batch as it does
    smaller = []
    for micro_batch in range(int(s.micro_batch) - 1, 0, -1):
        if s.micro_batch % micro_batch == 0:
            changed = {"micro_batch": micro_batch}
            smaller.append(_Change(f"micro_batch={micro_batch}", strategy=changed))

    sequences = _list_shared_sequences(s)

    shards = []
    for more_zero in (1, 2, 3):
        if zero < more_zero <= most_zero and s.dp * s.cp > 1:
            shards.append(_Change(f"zero={more_zero}", strategy={"zero": more_zero}))

    checkpoints = _list_checkpoints(model, s)
    offloads = _list_offloads(model, s, zero, most_zero)
    return [workspace, smaller, sequences, shards, checkpoints, offloads]


def _list_shared_sequences(s: Strategy) -> list[_Change]:
    """Replicas that share each sequence in place of having their own, where a micro-batch has only one."""
    changes = []
    factor = 2
    while s.micro_batch == 1 and s.dp % factor == 0:
        dp, cp = int(s.dp) // factor, int(s.cp) * factor
        changes.append(_Change(f"cp={cp} with dp={dp}", strategy={"cp": cp, "dp": dp}))
        factor *= 2
    return changes


def _find_most_zero(stack: str | Stack | None) -> int:
    """The most that replicas share in some software, see `Strategy.zero`."""
    if stack is None:
        return 3
    return find_stack(stack).most_zero


def has_workspace(model: Transformer) -> bool:
    """Find out whether an optimizer writes temporary tensors that a fused one does not.

    Parameters
    ----------
    model : Transformer
        The model.

    Returns
    -------
    has : bool
        True for one that updates many weights at once, one step after the other, and has a kernel for
        all steps, too.
    """
    optimizer = find_optimizer(model.optimizer)
    # of weights that an optimizer leaves to another one, that one has it
    has_kernel = "fused" in optimizer.forms or optimizer.others != ""
    return has_kernel and not (model.fused or model.optimizer_in_backward)


def _list_more_ranks(platform: Platform, s: Strategy) -> list[_Change]:
    """More replicas, twice as many each time, while the platform has ranks for them."""
    more = []
    factor = 2
    while s.ranks * factor <= platform.network.ranks:
        words = f"{int(s.ranks) * factor} ranks (dp={int(s.dp) * factor})"
        more.append(_Change(words, strategy={"dp": int(s.dp) * factor}))
        factor *= 2
    return more


def _list_checkpoints(model: Transformer, s: Strategy) -> list[_Change]:
    """What may be computed again: layers, or groups of them where all layers are already."""
    changes = []
    if s.checkpoint != "full" or s.is_partial:
        names = ["full"]
        if model.attention in UNFUSED and s.checkpoint == "none":
            names = ["selective", "full"]
        for name in names:
            changed = {"checkpoint": name, "checkpoint_layers": EVERY_LAYER}
            changes.append(_Change(f"checkpoint={name!r}", strategy=changed))
    elif not s.groups_layers:
        for group in _GROUPS:
            words = f"checkpoint_group={group}"
            changes.append(_Change(words, strategy={"checkpoint_group": group}))
    return changes


class _Offload(NamedTuple):
    """What may lie on the host beside what replicas share."""

    name: str
    zero: int


#: Offloads that are tried, those that share least first.
_OFFLOADS = (
    _Offload("optimizer", 1),
    _Offload("optimizer", 2),
    _Offload("optimizer", 3),
    _Offload("parameters", 3),
)


def can_update_on_host(model: Transformer) -> bool:
    """Find out whether a host can update the weights of a model.

    Parameters
    ----------
    model : Transformer
        The model.

    Returns
    -------
    can : bool
        True for optimizers whose update on a host was published, behind the backward pass.
    """
    return model.optimizer in ON_HOST and not model.optimizer_in_backward


def _list_offloads(model: Transformer, s: Strategy, zero: int, most_zero: int) -> list[_Change]:
    """What may go to the host: states of the optimizer, and weights; of replicas that share what `zero`
    says, and at most what `most_zero` does."""
    if s.offload != "none" or not can_update_on_host(model):
        return []
    changes = []
    for offload in _OFFLOADS:
        if not zero <= offload.zero <= max(most_zero, zero):
            continue
        words = f"offload={offload.name!r}"
        if s.zero < offload.zero:
            words += f" with zero={offload.zero}"
        changed = {"offload": offload.name, "zero": offload.zero}
        changes.append(_Change(words, strategy=changed))
    return changes


class FittingPlan(NamedTuple):
    """A plan that fits with a setting that was not tried.

    Parameters
    ----------
    strategy : Strategy
        How ranks share the model, with the setting.
    time : float
        Time of an iteration [s].
    needs : float
        Memory of the fullest rank [B].
    is_fused : bool
        Whether it fits with ``fused=True`` alone, which the model does not say.
    """

    strategy: Strategy
    time: float
    needs: float
    is_fused: bool = False

    def describe(self) -> str:
        """Say how to take it, and what it takes."""
        words = f"{self.strategy}"
        if self.is_fused:
            words = f"fused=True with {words}"
        return f"{words} (fits with {format_bytes(self.needs)}, {format_time(self.time)})"


def advise_plans(plans: Sequence[FittingPlan]) -> str:
    """Say which plans fit.

    Parameters
    ----------
    plans : sequence of FittingPlan
        One or more.

    Returns
    -------
    words : str
        Each plan as it is written.
    """
    return f"take {' or '.join(plan.describe() for plan in plans)}, or {OTHERWISE}"


def list_fitting_plans(
    model: Transformer,
    platform: Platform,
    tried: Strategy,
    room: Room,
    *,
    execution: str | None = None,
    stack: str | Stack | None = None,
) -> list[FittingPlan]:
    """List plans that fit with one more setting, where none of many does without.

    Parameters
    ----------
    model : Transformer
        The model.
    platform : Platform
        GPUs.
    tried : Strategy
        Strategies that divide the model and do not fit; each field an array.
    room : Room
        What a rank may use.
    execution, stack : optional
        As `perfkit.predict` takes them.

    Returns
    -------
    plans : list of FittingPlan
        Of each setting the fastest plan, and of these the `MOST_NAMED` fastest: an optimizer without
        workspace; offload, where the memory of the host is known and large enough; and groups of
        layers that are computed again together. Then the fastest one with twice the replicas, where
        the platform has ranks for them.
    """
    price = partial(
        _find_fastest_plan, platform=platform, room=room, execution=execution, stack=stack
    )
    found = []
    if has_workspace(model):
        found.append(price(replace(model, fused=True), tried, is_fused=True))
    for changed in (_offload_all(model, platform, tried, stack), _group_all(model, tried)):
        if changed:
            found.append(price(model, Strategy.join(changed)))
    plans = sorted([plan for plan in found if plan is not None], key=lambda plan: plan.time)
    named = plans[:MOST_NAMED]

    has_more = 2 * tried.ranks <= platform.network.ranks
    if np.any(has_more):
        reach = tried.select(np.broadcast_to(has_more, len(tried.ranks)))
        with_more = price(model, replace(reach, dp=2 * reach.dp))
        if with_more is not None:
            named.append(with_more)
    return named


def _offload_all(
    model: Transformer, platform: Platform, tried: Strategy, stack: str | Stack | None
) -> list[Strategy]:
    """Strategies with an offload, those of each one together."""
    if not can_update_on_host(model) or not knows_host(platform):
        return []
    software_zero = find_stack(stack).zero if stack is not None else 0
    zero = np.maximum(tried.zero, software_zero)
    # replicas that share more than states are those of one stage, which keep no groups of layers
    most_zero = np.where(np.equal(tried.pp, 1) & ~tried.groups_layers, _find_most_zero(stack), 1)
    stays = np.equal(tried.offload, "none")
    offloaded = []
    for offload in _OFFLOADS:
        can = stays & np.less_equal(zero, offload.zero)
        can = can & np.less_equal(offload.zero, np.maximum(most_zero, zero))
        if offload.name == "parameters":
            can = can & np.equal(tried.pp, 1) & np.logical_not(tried.buffers)
        if np.any(can):
            chosen = tried.select(np.broadcast_to(can, len(tried.ranks)))
            moved = replace(chosen, offload=offload.name, zero=offload.zero)
            offloaded.append(moved.drop_equal())
    return offloaded


def _group_all(model: Transformer, tried: Strategy) -> list[Strategy]:
    """Strategies that compute all layers again, with groups of these, those of each size together."""
    can = np.equal(tried.checkpoint, "full") & ~tried.is_partial & ~tried.groups_layers
    can = can & np.less_equal(tried.zero, 1) & ~tried.offloads_activations & ~tried.puts_off_weights
    if has_unlike_layers(model) or model.mtp_layers or not np.any(can):
        return []
    whole = tried.select(np.broadcast_to(can, len(tried.ranks)))
    sizes = [size for size in _GROUPS if size <= model.all_layers]
    return [replace(whole, checkpoint_group=size) for size in sizes]


def _find_fastest_plan(
    model: Transformer,
    strategies: Strategy,
    *,
    platform: Platform,
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
    is_fused: bool = False,
) -> FittingPlan | None:
    """The fastest of many strategies that divides a model and fits; None if none does."""
    can = can_share(model, strategies)
    if stack is not None:
        can = can & can_run(model, strategies, find_stack(stack))
    if not can.any():
        return None
    dividing = strategies.select(can)
    columns = price_strategies(
        model, platform, dividing, execution, room=room, near=0.0, stack=stack
    )
    fits = room.holds(columns["needs"], columns["reserve"])
    fits = fits & (columns["on_host"] <= share_hosts(platform, dividing.ranks, columns["on_host"]))
    if not fits.any():
        return None
    best = int(np.argmin(np.where(fits, columns["time"], np.inf)))
    needs = float(columns["needs"][best])
    return FittingPlan(dividing.select(best), float(columns["time"][best]), needs, is_fused)
