"""Which strategies can share a Transformer, and what those that cannot would need."""

from dataclasses import replace
from typing import Any

import numpy as np

from perfkit.models.optimizers import find_optimizer
from perfkit.models.partitions import find_schedules
from perfkit.workloads.strategy import LayerSpread, Strategy, find_stated_ends, spread_chunks

#: Checkpoints that compute a whole layer again, or nothing of it.
_WHOLE_LAYERS = ("none", "full")


def list_fits(model: Any, s: Strategy) -> dict[str, Any]:
    """Find out which strategies can share a Transformer.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    fits : dict of str to bool or array
        For each field of the model, whether ranks, stages and micro-batches divide it; of
        ``layers``, whether each chunk gets one; the first chunk of all and the last one may do
        without, if they are stated and not the only ones of their stage, see `spread_chunks`. With
        ``interleaved`` the stages must divide the micro-batches, and with ``dualpipe_v`` there must
        be twice as many micro-batches as stages. The first chunk of several stages
        holds all `dense_layers`, and one more. Low-rank adapters, ``lora_rank``, need replicas of
        the whole model without buffers, `frozen_format` such that share no weights,
        `optimizer_in_backward` one rank and one micro-batch, and an optimizer whose updates depend on
        the shape of a weight replicas that share no states. Ranks do not share the tokens of images,
        which have a `patch`. A `reduce_dtype` needs replicas that share something or have buffers.
    """
    spread = spread_chunks(model.all_layers, s)
    keeps_states = np.equal(s.offload, "none")
    is_replica = s.alone & keeps_states & np.equal(s.zero, 0)
    shares_no_tokens = np.equal(s.cp * s.rows, 1)
    return {
        "heads": _find_heads_fit(model, s),
        "sequence": model.sequence % (s.cp * s.rows) == 0,
        "experts": _find_experts_fit(model, s),
        "batch": _find_batch_fits(model, s),
        "layers": _find_layers_fit(model, s, spread),
        "dense_layers": _find_dense_layers_fit(model, s, spread),
        # adapters were checked on replicas of a whole model alone
        "lora_rank": s.alone & keeps_states | np.equal(model.lora_rank, 0),
        "frozen_format": is_replica | (model.frozen_format == ""),
        "optimizer": _find_optimizer_fits(model, s, is_replica),
        "optimizer_in_backward": _find_hooks_fit(model, s),
        "patch": shares_no_tokens | (model.patch == 0),
        # DistributedDataParallel adds gradients up as they are
        "reduce_dtype": ~(s.replicated & np.greater(s.dp, 1)) | (model.reduce_dtype == ""),
    }


def can_share(model: Any, s: Strategy) -> Any:
    """Find which strategies can share a Transformer, whatever field is asked for.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many.

    Returns
    -------
    can : array of bool
        Whether each fits all fields, see `list_fits`.

    Examples
    --------
    >>> from perfkit.workloads.transformer import Transformer
    >>> can_share(Transformer.gpt2(batch=8), Strategy.stack([Strategy(tp=5), Strategy(tp=4)]))
    array([False,  True])
    """
    can = np.ones(np.shape(s.ranks), dtype=bool)
    for fits in list_fits(model, s).values():
        can = can & fits
    return can


def _find_heads_fit(model: Any, s: Strategy) -> Any:
    """Find which strategies can share the heads of attention."""
    kv_heads = model.kv_heads or model.heads
    sharing = s.ranks_sharing_heads
    heads_fit = model.heads % sharing == 0
    kv_heads_fit = (kv_heads % s.tp == 0) | (s.tp % kv_heads == 0)
    # heads of keys that are fewer than ranks are repeated before they change places
    repeated_heads_fit = (kv_heads % sharing == 0) | (sharing % kv_heads == 0)
    return heads_fit & kv_heads_fit & repeated_heads_fit


def _find_experts_fit(model: Any, s: Strategy) -> Any:
    """Find which strategies can share experts, or say nothing of those that a model does not have."""
    if not model.experts:
        return np.logical_not(_find_experts_stated(s))
    return (s.ep == 1) | (model.experts % s.ep == 0)


def _count_micro_batches(model: Any, s: Strategy) -> Any:
    """Count the micro-batches of a replica; a fraction where they do not divide its batch [-]."""
    return model.batch / (s.dp * s.micro_batch)


def _find_batch_fits(model: Any, s: Strategy) -> Any:
    """Find which strategies divide the batch into as many micro-batches as their schedules need."""
    micro_batches = _count_micro_batches(model, s)
    is_whole = np.equal(micro_batches % 1, 0)
    schedules = find_schedules(s.schedule)
    stages_divide = micro_batches % s.pp == 0
    are_enough = micro_batches >= schedules.least_batches * s.pp
    return is_whole & (np.logical_not(schedules.interleaves) | stages_divide) & are_enough


def _find_layers_fit(model: Any, s: Strategy, spread: LayerSpread) -> Any:
    """Find which strategies have layers for all chunks: each chunk of stages whose layers are not
    stated needs one of the rest."""
    stated = find_stated_ends(s)
    stages = stated.other_stages
    rest = model.all_layers - s.first_layers - s.last_layers
    enough = np.where(stages > 0, rest >= stages * s.chunks, (stages == 0) & (rest == 0))
    first_fits = np.logical_not(stated.first) | (spread.first >= 0)
    last_fits = np.logical_not(stated.last) | (spread.last >= 0)
    return enough & first_fits & last_fits


def _find_dense_layers_fit(model: Any, s: Strategy, spread: LayerSpread) -> Any:
    """Find which strategies have all first dense layers, which go with the embeddings, on the first
    stage."""
    of_first_chunk = spread.count_layers(s, 0, 0)
    is_whole = (model.dense_layers == 0) | np.equal(s.pp, 1)
    return is_whole | (of_first_chunk > model.dense_layers)


def _find_optimizer_fits(model: Any, s: Strategy, is_replica: Any) -> Any:
    """Find which strategies leave an optimizer the weights that it needs at once.

    Ranks that share a weight would have to gather it, or its sums; hosts that wait for numbers are
    known to the graph of the model alone.
    """
    optimizer = find_optimizer(model.optimizer)
    is_own_graph = s.overlap & np.not_equal(s.checkpoint, "selective")
    knows_waits = is_own_graph | (not optimizer.host_waits)
    return is_replica & knows_waits | (not optimizer.by_shape)


def _find_hooks_fit(model: Any, s: Strategy) -> Any:
    """Find which strategies can update a weight as soon as its gradient is complete, if a model does."""
    is_whole_layer = np.isin(s.checkpoint, _WHOLE_LAYERS)
    is_single = np.equal(s.ranks, 1) & np.equal(_count_micro_batches(model, s), 1)
    return is_single & is_whole_layer & s.alone | (not model.optimizer_in_backward)


def _find_experts_stated(s: Strategy) -> Any:
    """Find which strategies say something of experts."""
    sends = np.not_equal(s.dispatch, "all_to_all") | s.two_level | s.overlap_experts
    return np.greater(s.ep, 1) | np.greater(s.etp, 1) | sends


def explain_fit(name: str, model: Any, s: Strategy) -> str:
    """Say which sizes of a strategy must divide a field of a Transformer.

    Parameters
    ----------
    name : str
        A field, as in `list_fits`.
    model : Transformer
        The model.
    s : Strategy
        One.

    Returns
    -------
    text : str
        What is wanted of these sizes.

    Examples
    --------
    >>> from perfkit.workloads.transformer import Transformer
    >>> explain_fit("batch", Transformer.gpt2(batch=64), Strategy(dp=3, micro_batch=2))
    'dp x micro_batch, 3 x 2, must divide it'
    """
    if name == "batch":
        wanted = f"dp x micro_batch, {s.dp} x {s.micro_batch}, must divide it"
        schedule = find_schedules(s.schedule)
        if schedule.interleaves:
            wanted += f", and pp, {s.pp}, the micro-batches"
        if schedule.least_batches:
            wanted += f", and leave {schedule.least_batches} x pp, {s.pp}, micro-batches or more"
        if model.batch < s.dp:
            wanted += (
                "; more ranks than sequences share each sequence with cp, or layers with tp and pp"
            )
        return wanted
    if name == "heads":
        ranks = f"tp, {s.tp},"
        if s.cp_kind == "ulysses" and s.cp > 1:
            ranks = f"tp x cp, {s.tp} x {s.cp},"
        kv_heads = model.kv_heads or model.heads
        return f"{ranks} must divide it, and divide kv_heads, {kv_heads}, or be a multiple"
    if name == "sequence" and model.patch:
        return explain_fit("patch", model, s)
    if name == "sequence":
        return f"cp, {s.cp}, and tp with sequence_parallel, {s.tp}, must divide it"
    if name == "experts":
        if model.experts:
            return f"ep, {s.ep}, must divide it"
        return "a dense model has none: leave ep, etp, dispatch, two_level and overlap_experts out"
    if name == "optimizer_in_backward":
        return (
            "hooks that update weights are modelled on one rank with one micro-batch: take dp 1, a "
            "micro_batch of the whole batch, checkpoints none or full, and no buffers of gradients"
        )
    if name == "patch":
        return (
            "nobody checked images whose tokens ranks share, which are no multiple of ranks: take cp 1 and "
            "no sequence_parallel"
        )
    if name == "reduce_dtype":
        return (
            "DistributedDataParallel adds gradients up as they are: leave it out, or take zero 1 or more, or "
            "a stack with buffers of gradients, such as 'megatron'"
        )
    if name == "optimizer":
        return (
            "updates that depend on the shape of a weight are modelled on replicas of the whole model "
            "alone: take tp, pp, cp and ep 1, zero 0, no offload, and a stack without buffers of "
            "gradients, such as 'ddp'; and with 'adafactor' overlap and no selective checkpoints"
        )
    if name == "frozen_format":
        return (
            "frozen weights in fewer bits are modelled on replicas of the whole model alone: take tp, pp, "
            "cp and ep 1, zero 0, no offload, and a stack without buffers of gradients, such as 'ddp'"
        )
    if name == "lora_rank":
        return (
            "adapters are modelled on replicas of the whole model alone: take tp, pp, cp and ep 1, no "
            "offload, and a stack without buffers of gradients, such as 'ddp' or 'fsdp'"
        )
    if name == "dense_layers":
        layers = int(spread_chunks(model.all_layers, s).count_layers(s, 0, 0))
        return (
            f"the first chunk of the first stage, which has {layers} layers, must have more than these: "
            "take a smaller pp or chunks, or more first_layers"
        )
    if name == "layers":
        return (
            f"each of {s.pp} x {s.chunks} chunks (pp x chunks) needs one, beside first_layers, "
            f"{s.first_layers}, and last_layers, {s.last_layers}"
        )
    raise ValueError(f"name is {name!r}; take a key of list_fits")


#: Settings of a model that some strategies do not go with; the other fields of `list_fits` are sizes that
#: ranks share.
_SETTINGS = (
    "lora_rank",
    "frozen_format",
    "optimizer",
    "optimizer_in_backward",
    "patch",
    "reduce_dtype",
)
#: Fields of a strategy that such settings want at these values.
_PLAIN = {
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "etp": 0,
    "zero": 0,
    "offload": "none",
    "overlap": True,
}


def explain_misfit(name: str, model: Any, s: Strategy) -> str:
    """Say that a strategy does not fit a field of a Transformer, and what is wanted.

    Parameters
    ----------
    name : str
        A field that does not fit, see `list_fits`.
    model : Transformer
        The model.
    s : Strategy
        One.

    Returns
    -------
    text : str
        What follows the name of the strategy.

    Examples
    --------
    >>> from perfkit.workloads.transformer import Transformer
    >>> explain_misfit("heads", Transformer.gpt2(batch=8), Strategy(tp=5))
    'cannot share heads of the model, 12; tp, 5, must divide it, and divide kv_heads, 12, or be a multiple'
    """
    value = f"{name} of the model, {getattr(model, name)}"
    wanted = explain_fit(name, model, s)
    if name not in _SETTINGS:
        return f"cannot share {value}; {wanted}"
    faults = _list_faults(name, model, s)
    if not faults:
        return f"does not go with {value}; {wanted}"
    return f"does not go with {value}, as {' and '.join(faults)}; {wanted}"


def _list_faults(name: str, model: Any, s: Strategy) -> list[str]:
    """The fields of a strategy that a setting of a model wants otherwise, with their values."""
    if name == "reduce_dtype":
        return ["replicas share nothing"]
    if name == "patch":
        return [f"{key} is {value}" for key, value in (("cp", s.cp), ("tp", s.tp)) if value > 1]
    plain = dict(_PLAIN)
    if name in ("lora_rank", "optimizer_in_backward"):
        del plain["zero"]
    if name != "optimizer" or not find_optimizer(model.optimizer).host_waits:
        del plain["overlap"]
    if name == "optimizer_in_backward":
        plain |= {"dp": 1}
    faults = []
    for key, usual in plain.items():
        value = getattr(s, key)
        if value != usual:
            faults.append(f"{key} is {value!r}")
    faults += _list_faults_of_passes(name, model, s)
    # software has buffers for what it shares, too
    if not faults and s.buffers:
        faults.append("gradients have buffers")
    return faults


def _list_faults_of_passes(name: str, model: Any, s: Strategy) -> list[str]:
    """What an optimizer does not go with of checkpoints and micro-batches."""
    faults = []
    wants_whole_layers = name == "optimizer_in_backward"
    if wants_whole_layers and s.checkpoint not in _WHOLE_LAYERS:
        faults.append(f"checkpoint is {s.checkpoint!r}")
    if wants_whole_layers and _count_micro_batches(model, s) > 1:
        faults.append(f"micro_batch is {s.micro_batch}")
    waits = name == "optimizer" and find_optimizer(model.optimizer).host_waits
    if waits and s.checkpoint == "selective":
        faults.append("checkpoint is 'selective'")
    return faults


def check_fits(model: Any, s: Strategy) -> None:
    """Check that strategies can share a Transformer.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        One or many, with the facts of their software.

    Raises
    ------
    ValueError
        For the first field that does not fit, and the first strategy that does not fit it.
    """
    for name, fits in list_fits(model, s).items():
        if np.all(fits):
            continue
        first = s
        if np.ndim(s.ranks):
            misfits = np.flatnonzero(np.broadcast_to(np.logical_not(fits), len(s.ranks)))
            first = s.select(int(misfits[0]))
        shown = replace(first, buffers=False)
        raise ValueError(f"{shown} {explain_misfit(name, model, first)}")
