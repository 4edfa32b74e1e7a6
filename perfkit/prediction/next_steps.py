"""What would make a strategy fit that does not: settings with the memory that each frees, in the order
of what they cost."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import format_bytes
from perfkit.models.checkpoints import EVERY_LAYER
from perfkit.platform.host_memory import find_host_share
from perfkit.platform.platform import Platform
from perfkit.prediction.memory import WORKSPACE, Room, estimate_reserve
from perfkit.prediction.offload import ON_HOST
from perfkit.prediction.strategy_case import make_case
from perfkit.prediction.strategy_memory import count_groups, keep_by_layer, measure_strategies
from perfkit.prediction.strategy_offload import measure_host
from perfkit.workloads.attention_blocks import UNFUSED
from perfkit.workloads.stack import Stack, apply_stack, find_stack, state_strategy
from perfkit.workloads.strategy import Strategy, list_fits
from perfkit.workloads.transformer import Transformer

#: What is left where no step helps, and what may be taken instead of one.
OTHERWISE = "a platform with more ranks or memory"
#: Where no setting is enough alone, one that frees less than this share of what is needed is not
#: named [-].
_LEAST_SHARE = 0.01
#: Layers of a group that are tried, see `Strategy.checkpoint_group` [-].
_GROUPS = (2, 4, 8)


@dataclass(frozen=True)
class _Change:
    """A setting, as it is written, and the fields of a model and a strategy that it changes."""

    words: str
    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)


class _Needs(NamedTuple):
    """What the fullest rank allocates [B], and whether its device and its host hold it."""

    needs: float
    fits: bool


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
    """

    words: str
    freed: float
    fits: bool


class NextSteps(NamedTuple):
    """What makes a strategy fit.

    Parameters
    ----------
    alone : tuple of NextStep
        Settings each of which is enough.
    together : tuple of NextStep
        If none is, settings one after another, until they are enough or there are no more.
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
        >>> NextSteps((NextStep("zero=1", 61e9, True),), ()).advise()
        'take zero=1 (frees 61 GB: fits), or a platform with more ranks or memory'
        >>> NextSteps((), ()).advise()
        'take a platform with more ranks or memory'
        """
        said = []
        for step in self.alone:
            said.append(f"{step.words} (frees {format_bytes(step.freed)}: fits)")
        if said:
            return f"take {' or '.join(said)}, or {OTHERWISE}"
        if not self.together:
            return f"take {OTHERWISE}"
        for step in self.together:
            said.append(f"{step.words} (frees {format_bytes(step.freed)})")
        together = " and then ".join(said)
        if self.together[-1].fits:
            return f"take {together}: fits; or take {OTHERWISE}"
        verb = "is" if len(said) == 1 else "are"
        refused = f"{together} {verb} not enough"
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
        In this order: an optimizer without workspace, which costs nothing; smaller micro-batches;
        shards of what replicas hold; checkpoints; offload, where the memory of the host is known and
        large enough; and more ranks, while the platform has them. Of each kind the mildest that is
        enough alone.

    Notes
    -----
    Memory is that of `perfkit.prediction.strategies.price_strategies`.
    """
    kinds = _list_changes(model, platform, strategy, stack)

    def measure(changes: Sequence[Sequence[_Change]]) -> list[_Needs | None]:
        return _measure(model, platform, strategy, changes, room, execution, stack)

    [before] = measure([()])
    if before is None:
        return NextSteps((), ())
    changes: list[_Change] = []
    for kind in kinds:
        changes += kind
    after = measure([(change,) for change in changes])
    needs_after = dict(zip([change.words for change in changes], after, strict=True))
    alone = []
    strongest = []
    for kind in kinds:
        steps = []
        for change in kind:
            needs = needs_after[change.words]
            if needs is not None:
                steps.append(NextStep(change.words, before.needs - needs.needs, needs.fits))
        enough = [step for step in steps if step.fits and step.freed > 0]
        alone += enough[:1]
        if steps:
            strongest.append(max(steps, key=lambda step: step.freed))
    if alone:
        return NextSteps(tuple(alone), ())
    by_words = {change.words: change for change in changes}
    together = _add_up(before, [by_words[step.words] for step in strongest], measure)
    return NextSteps((), together, _find_nearest(strongest, together))


def _add_up(
    before: _Needs,
    strongest: Sequence[_Change],
    measure: Callable[[Sequence[Sequence[_Change]]], list[_Needs | None]],
) -> tuple[NextStep, ...]:
    """Settings one after another, until they are enough; those that free nothing are left out."""
    steps = []
    taken: list[_Change] = []
    held = before.needs
    for change in strongest:
        [needs] = measure([(*taken, change)])
        if needs is None or held - needs.needs < _LEAST_SHARE * before.needs:
            continue
        taken.append(change)
        steps.append(NextStep(change.words, held - needs.needs, needs.fits))
        held = needs.needs
        if needs.fits:
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


def _measure(
    model: Transformer,
    platform: Platform,
    strategy: Strategy,
    changes: Sequence[Sequence[_Change]],
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> list[_Needs | None]:
    """Memory with some changes together; None where the model, the software or the host refuses
    them."""
    found: list[_Needs | None] = [None] * len(changes)
    by_model: dict[Transformer, list[tuple[int, Strategy]]] = {}
    for number, together in enumerate(changes):
        changed_model, changed = model, strategy
        with suppress(ValueError):  # settings that do not go together
            for change in together:
                changed_model = replace(changed_model, **change.model)
                changed = replace(changed, **change.strategy)
            divides = list_fits(changed_model, changed).values()
            if all(np.all(fits) for fits in divides):
                by_model.setdefault(changed_model, []).append((number, changed))
    for changed_model, numbered in by_model.items():
        strategies = [one for _, one in numbered]
        try:
            measured = _measure_together(
                changed_model, platform, strategies, room, execution, stack
            )
        except ValueError:  # the software refuses one of them
            measured = []
            for one in strategies:
                alone: list[_Needs | None] = [None]
                with suppress(ValueError):
                    alone = _measure_together(
                        changed_model, platform, [one], room, execution, stack
                    )
                measured += alone
        for (number, _), needs in zip(numbered, measured, strict=True):
            found[number] = needs
    return found


def _measure_together(
    model: Transformer,
    platform: Platform,
    strategies: Sequence[Strategy],
    room: Room,
    execution: str | None,
    stack: str | Stack | None,
) -> list[_Needs | None]:
    """Memory of strategies of one model; None where the host has too little for what is offloaded."""
    stacked = Strategy.stack(strategies)
    case = make_case(platform, apply_stack(model, stacked, execution, stack))
    needs = measure_strategies(case).total + WORKSPACE
    holds = room.holds(needs, estimate_reserve(needs, count_groups(case)))
    on_host = np.broadcast_to(measure_host(case, keep_by_layer(case)), len(strategies))
    measured: list[_Needs | None] = []
    for number, one in enumerate(strategies):
        if on_host[number] and on_host[number] > find_host_share(platform, int(one.ranks)):
            measured.append(None)
        else:
            measured.append(_Needs(float(needs[number]), bool(holds[number])))
    return measured


def _list_changes(
    model: Transformer, platform: Platform, s: Strategy, stack: str | Stack | None
) -> list[list[_Change]]:
    """Settings that need less, the cheapest kind first, and of each kind the mildest first."""
    zero = int(s.zero)
    most_zero = 3
    if stack is not None:
        software = find_stack(stack)
        most_zero = software.most_zero
        if zero == 0:
            zero = software.zero
    if s.pp > 1:
        most_zero = min(most_zero, 1)

    workspace = []
    if not (model.fused or model.optimizer_in_backward):
        workspace.append(_Change("fused=True", model={"fused": True}))

    # parts of a micro-batch divide the batch as it does
    smaller = []
    for micro_batch in range(int(s.micro_batch) - 1, 0, -1):
        if s.micro_batch % micro_batch == 0:
            changed = {"micro_batch": micro_batch}
            smaller.append(_Change(f"micro_batch={micro_batch}", strategy=changed))

    shards = []
    for more_zero in (1, 3):
        if zero < more_zero <= most_zero and s.dp * s.cp > 1:
            shards.append(_Change(f"zero={more_zero}", strategy={"zero": more_zero}))

    more = []
    factor = 2
    while s.ranks * factor <= platform.network.ranks:
        words = f"{int(s.ranks) * factor} ranks (dp={int(s.dp) * factor})"
        more.append(_Change(words, strategy={"dp": int(s.dp) * factor}))
        factor *= 2
    checkpoints = _list_checkpoints(model, s)
    offloads = _list_offloads(model, s, zero, most_zero)
    return [workspace, smaller, shards, checkpoints, offloads, more]


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


def _list_offloads(model: Transformer, s: Strategy, zero: int, most_zero: int) -> list[_Change]:
    """What may go to the host: states of the optimizer, and weights; of replicas that share what `zero`
    says, and at most what `most_zero` does."""
    if s.offload != "none" or model.optimizer not in ON_HOST or model.optimizer_in_backward:
        return []
    changes = []
    for offload, least_zero in (("optimizer", max(zero, 1)), ("parameters", 3)):
        if least_zero > max(most_zero, zero):
            continue
        words = f"offload={offload!r}"
        if s.zero < least_zero:
            words += f" with zero={least_zero}"
        changes.append(_Change(words, strategy={"offload": offload, "zero": least_zero}))
    return changes
