"""Stacks: the software that runs a training step, as records of facts, and what they change."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.files import group_rows, reading
from perfkit.ground.records import set_fields
from perfkit.ground.results import Table
from perfkit.ground.units import check_choice, check_positive, check_type, show
from perfkit.models.checkpoints import recomputes
from perfkit.workloads.blocks import PARALLEL
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.execution import EXECUTIONS
from perfkit.workloads.fp8 import RECIPES
from perfkit.workloads.graph import Graph
from perfkit.workloads.operations import ATTENTION
from perfkit.workloads.sizes import check_ranks
from perfkit.workloads.strategy import MOST_THREADS, Strategy, check_strategy_type
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.transformer import Transformer, name_checkpoint

#: What mixed precision may be: weights of fp32 that each operation casts, or low-precision weights
#: of which the optimizer keeps fp32 masters.
MIXED = ("autocast", "masters")
#: Recipes by which products run in fp8; empty for a stack that says nothing of fp8.
FP8_RECIPES = tuple(RECIPES)
#: Whose rules say what is held in memory: those of PyTorch's FSDP, tensor parallelism and pipelines,
#: or those of Megatron-LM.
MEMORY = ("torch", "megatron")
#: What a stack trains: models of any kind, or those of one family.
TRAINS = ("any", "transformer", "dlrm")
_SWITCHES = (
    "fused_accumulation",
    "buffers",
    "keeps_fp8",
    "fp8_gathers",
    "overlaps_tensor",
    "overlaps_experts",
    "pads_products",
    "graphs",
    "runs_fp8",
)
_COUNTS = ("zero", "most_zero", "vocabulary_multiple", "loss_chunks", "host_threads")
#: Facts that change predictions of Transformers alone; those of a DLRM follow the others.
_OF_TRANSFORMERS = (
    "mixed",
    "fused_accumulation",
    "buffers",
    "reduce_dtype",
    "attention",
    "fp8_recipe",
    "loss_chunks",
    "fp8_gathers",
    "keeps_fp8",
    "overlaps_tensor",
    "overlaps_experts",
    "zero",
    "vocabulary_multiple",
    "host_threads",
    "memory",
)
#: Facts that say what a stack is for: they change no prediction, but what is said of it.
OF_USE = ("trains", "runs_fp8", "most_zero")


@dataclass(frozen=True)
class Stack:
    """The software that runs a training step, as facts.

    Facts fill what a workload, a strategy and an execution leave at their defaults; what differs
    from its default wins over a fact. A default that was stated is not seen: with FSDP a strategy of
    ``zero=0`` runs with 3. To state it, override the fact: ``replace(find_stack("fsdp"), zero=0)``.
    The name stays, with which platforms keep levels.

    `fp8_gathers` of software with buffers and `graphs` of compiled code are stated and not priced:
    they change no prediction, and one whose stack was stated with another value of them says so in
    its warnings. Of a DLRM only `execution`, `graphs` and `pads_products` are priced.

    Parameters
    ----------
    name : str
        Name, such as ``megatron``.
    mixed : str
        What a `Transformer` with ``mixed=True`` does: ``autocast``, or ``masters``, where layers
        work in low precision and the optimizer keeps weights in fp32.
    fused_accumulation : bool
        Whether the product of a weight gradient adds it to that of earlier micro-batches.
    buffers : bool
        Whether gradients are added up in buffers that live through the iteration, see
        `Strategy.buffers`.
    reduce_dtype : str
        Format in which ranks sum up gradients; empty for that in which they are computed.
    attention : str
        Kernel of attention; empty for what the library chooses for the device.
    fp8_recipe : str
        How products run in fp8. ``delayed``: a scale for a matrix, from the largest numbers of
        earlier micro-batches, so that a cast is all (Transformer Engine). ``tensorwise``: a scale for
        a matrix, which a pass over it finds before its cast. ``rowwise``: a scale for a row, and a
        second cast for products that sum over rows. ``blockwise``: one for 128 numbers of a row, and
        for 128 × 128 of a weight. ``mxfp8``: one for 32 numbers of a row, on Blackwell. ``nvfp4`` can
        be stated, and is refused where it would run. Empty says nothing: scales are known, as with
        ``delayed``.
    keeps_fp8 : bool
        Whether weights are cast to fp8 once in an iteration, not for each micro-batch.
    fp8_gathers : bool
        Whether sharded weights of products in fp8 are gathered in this format, so that each rank casts
        its own shards alone; those of experts, embeddings and head are gathered as they are. Not
        priced where `buffers` hold gradients, as with Megatron-LM.
    overlaps_tensor : bool
        Whether messages among ranks that share products overlap with these, as with
        `Strategy.tiled`.
    overlaps_experts : bool
        Whether exchanges of tokens for experts overlap with other work.
    zero : int
        What replicas share where a strategy says nothing, see `Strategy.zero` [-].
    most_zero : int
        The most that replicas share: searches try nothing beyond it, and a strategy that was stated
        has a warning [-].
    pads_products : bool
        Whether what compiles its code pads sides of products on tensor cores that are no multiple of
        16 B; it matters where `execution` is ``compiled``, and eager code pads nothing.
    vocabulary_multiple : int
        The vocabulary is padded to a multiple of this, for each rank that shares products [-].
    loss_chunks : int
        Pieces of tokens in which the cross entropy is computed; 1 for all tokens at once. Each piece
        computes its gradients, too, so that the logits of one live at a time, and nothing is computed
        again (Liger's fused linear cross entropy); torchtune's chunks, which keep all logits in half
        precision, are another form [-].
    host_threads : int
        Threads of the CPU that each of several ranks has, which matter where the host updates weights,
        see `Strategy.host_threads`; 0 for all that its share of the host has [-].
    execution : str
        ``eager`` or ``compiled``.
    graphs : bool
        Whether CUDA graphs launch the kernels. Not priced where `execution` is ``compiled``.
    memory : str
        Whose rules say what is held in memory: ``torch`` or ``megatron``, see table 9.3 of
        docs/formulas.md.
    trains : str
        ``any``, or the one family of models that it is for: ``transformer`` or ``dlrm``. Another
        model has a warning.
    runs_fp8 : bool
        Whether it has products in fp8; a model in fp8 has a warning where it does not.
    level_of : str
        The stack whose level it takes where published steps show none of its own, see
        docs/formulas.md, section 10; empty for one that takes no other's. A stack that differs from
        another one in a few facts takes its level: ``replace(find_stack("fsdp"), name="ours",
        level_of="fsdp")``.
    source : str
        Where the facts stand.

    Raises
    ------
    ValueError
        For unknown names.

    Examples
    --------
    >>> find_stack("megatron").fused_accumulation
    True
    """

    name: str
    mixed: str = "masters"
    fused_accumulation: bool = False
    buffers: bool = False
    reduce_dtype: str = ""
    attention: str = ""
    fp8_recipe: str = ""
    keeps_fp8: bool = False
    fp8_gathers: bool = False
    overlaps_tensor: bool = False
    overlaps_experts: bool = False
    zero: int = 0
    most_zero: int = 3
    pads_products: bool = False
    vocabulary_multiple: int = 1
    loss_chunks: int = 1
    host_threads: int = 0
    execution: str = "eager"
    graphs: bool = False
    memory: str = "torch"
    trains: str = "any"
    runs_fp8: bool = True
    level_of: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        check_type("level_of", self.level_of, str)
        check_type("source", self.source, str)
        if not self.name or "." in self.name:
            raise ValueError(
                f"name is {self.name!r}; it must have letters and no dot, as 'megatron-te'"
            )
        check_choice("mixed", self.mixed, MIXED)
        check_choice("reduce_dtype", self.reduce_dtype, ("", *ITEMSIZE))
        check_choice("attention", self.attention, ("", "eager", "math", *ATTENTION))
        check_choice("fp8_recipe", self.fp8_recipe, FP8_RECIPES)
        check_choice("execution", self.execution, ("eager", "compiled"))
        check_choice("memory", self.memory, MEMORY)
        check_choice("trains", self.trains, TRAINS)
        for name in _SWITCHES:
            check_type(name, getattr(self, name), bool)
        if self.fused_accumulation and (self.mixed == "autocast" or not self.buffers):
            raise ValueError(
                "fused_accumulation needs buffers=True, to which products add, and mixed='masters': "
                "autocast computes gradients of copies; leave it out"
            )
        set_fields(
            self,
            zero=check_positive("zero", self.zero, integer=True, zero=True, maximum=3),
            most_zero=check_positive(
                "most_zero", self.most_zero, integer=True, zero=True, maximum=3
            ),
            vocabulary_multiple=check_positive(
                "vocabulary_multiple", self.vocabulary_multiple, integer=True, maximum=2**20
            ),
            loss_chunks=check_positive(
                "loss_chunks", self.loss_chunks, integer=True, maximum=2**10
            ),
            host_threads=check_positive(
                "host_threads", self.host_threads, integer=True, zero=True, maximum=MOST_THREADS
            ),
        )

    @property
    def runs_as(self) -> str:
        """``eager``, ``compiled`` or ``graphs``, as `predict` takes it; compiled code with graphs
        counts as compiled."""
        if self.graphs and self.execution == "eager":
            return "graphs"
        return self.execution

    @property
    def description(self) -> str:
        """Its facts in a few words."""
        words = [f"{self.mixed} if mixed"]
        if self.fused_accumulation:
            words.append("gradients added up inside products")
        elif self.buffers:
            words.append("gradients added up in buffers")
        words.append(f"gradients reduced {_name_format(self.reduce_dtype)}")
        if self.attention:
            words.append(f"{self.attention} attention")
        if self.fp8_recipe:
            words.append(f"fp8 {self.fp8_recipe}")
        if self.keeps_fp8:
            words.append("weights cast to fp8 once")
        if self.zero:
            words.append(f"ZeRO {self.zero}")
        if self.vocabulary_multiple > 1:
            words.append(f"vocabulary padded to {self.vocabulary_multiple}")
        if self.loss_chunks > 1:
            words.append(f"loss in {self.loss_chunks} chunks")
        words.append(self.runs_as)
        if self.level_of:
            words.append(f"level of {self.level_of}")
        return ", ".join(words)


def _name_format(dtype: str) -> str:
    """Say in which format gradients are reduced."""
    if dtype:
        return f"in {dtype}"
    return "as computed"


def _read_stacks() -> dict[str, Stack]:
    """Read all stacks that perfkit knows, by name."""
    known: dict[str, Stack] = {}
    for name, rows in group_rows("name", "published", "stacks.csv").items():
        with reading(f"stacks.csv, row {name!r}", "mend this row"):
            if len(rows) > 1:
                raise ValueError(f"{len(rows)} rows have this name")
            known[name] = read_stack(rows[0])
    for stack in known.values():
        _check_level(stack, known)
    return known


def read_stack(row: Mapping[str, str]) -> Stack:
    """Read a stack from a row of `reference_data/published/stacks.csv`.

    Parameters
    ----------
    row : mapping of str to str
        Each fact by its column; ``yes`` or ``no`` of those that are true or not.

    Returns
    -------
    stack : Stack
        The facts.

    Raises
    ------
    ValueError
        For a fact that is missing, no number, neither ``yes`` nor ``no``, or unknown.
    """
    facts: dict[str, Any] = {}
    for field in fields(Stack):
        text = row.get(field.name)
        if text is None:
            raise ValueError(f"there is no column {field.name!r}")
        if field.name in _SWITCHES:
            facts[field.name] = check_choice(field.name, text, ("yes", "no")) == "yes"
        elif field.name in _COUNTS:
            if not text.isdecimal():
                raise ValueError(f"{field.name} is {text!r}; it must be a whole number")
            facts[field.name] = int(text)
        else:
            facts[field.name] = text
    return Stack(**facts)


def _check_level(stack: Stack, known: Mapping[str, Stack]) -> None:
    """Raise a ValueError where a stack takes the level of one that is unknown, or has none itself."""
    if not stack.level_of:
        return
    parent = known[check_choice(f"stack {stack.name!r}: level_of", stack.level_of, known)]
    if parent.level_of:
        raise ValueError(
            f"stack {stack.name!r}: level_of is {stack.level_of!r}, which takes the level of "
            f"{parent.level_of!r}; write {parent.level_of!r}"
        )


#: Stacks that perfkit knows, by name.
STACKS = _read_stacks()
#: To what a vocabulary is usually padded, the default of `--make-vocab-size-divisible-by` of Megatron-LM
#: [-].
_USUAL_MULTIPLE = 128


def find_stack(name: str | Stack) -> Stack:
    """Find a stack by its name.

    Parameters
    ----------
    name : str or Stack
        One of `stacks`, or a stack, which is returned.

    Returns
    -------
    stack : Stack
        Its facts.

    Raises
    ------
    ValueError
        For an unknown name, and for a stack that takes the level of an unknown one.

    Examples
    --------
    >>> find_stack("fsdp").zero
    3
    """
    if isinstance(name, Stack):
        _check_level(name, STACKS)
        return name
    return STACKS[check_choice("stack", name, STACKS)]


def stacks() -> Table:
    """List the stacks that perfkit knows.

    Returns
    -------
    table : polars.DataFrame
        A row for each, with the fields of `Stack`, which says which of them are not priced.

    Examples
    --------
    >>> stacks()["name"].to_list()[0]
    'ddp'
    """
    import polars

    return polars.DataFrame([vars(stack) for stack in STACKS.values()])


class StackedWork(NamedTuple):
    """What runs, once a stack is chosen.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        What is executed.
    strategy : Strategy or None
        How ranks share it.
    execution : str or None
        How it is executed.
    stacks : tuple of Stack
        The software: one for all, or one for each strategy.
    """

    workload: Any
    strategy: Any
    execution: str | None
    stacks: tuple[Stack, ...]


def apply_stack(
    workload: Any,
    strategy: Strategy | None,
    execution: str | None,
    stack: str | Stack | None,
    ranks: int | None = None,
) -> StackedWork:
    """Find what runs: facts of a stack where the caller left a setting at its default.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        What is predicted.
    strategy : Strategy or None
        How ranks share it, if that is stated.
    execution : str or None
        How it is executed, if that is stated.
    stack : str, Stack or None
        The software; None for the usual one, of which only this counts: how gradients of
        micro-batches are added up, whether products are padded, and its level.
    ranks : int, optional
        Ranks that take part, if there is no strategy; one, unless given [-].

    Returns
    -------
    work : StackedWork
        Workload, strategy and execution with the facts.

    Raises
    ------
    ValueError
        For an unknown stack, and for one that cannot run the workload.

    Notes
    -----
    What differs from its default wins over the stack: `attention`, `reduce_dtype`, `fp8_recipe`,
    `loss_chunks` and `fused_accumulation` of the workload, its `parallel`, and `zero`, `tiled`,
    `overlap_experts` and `buffers` of the strategy. To state a default against a stack, override the
    fact. Graphs that were captured stay as they are.
    Software that keeps fp32 masters or buffers of gradients beside a whole model is priced as a
    strategy, also where none is given.
    """
    if strategy is not None:
        check_strategy_type(strategy)
    check_type("execution", execution, str | None)
    _check_ranks_of_strategy(strategy, ranks)
    if stack is None:
        return _choose_usual(workload, strategy, execution)
    chosen = find_stack(stack)
    stated = _state_execution(chosen, execution)
    if not hasattr(workload, "graphs"):
        return StackedWork(workload, strategy, execution, (stated,))
    runs_as = chosen.runs_as if execution is None else execution
    if not isinstance(workload, Transformer):
        return StackedWork(workload, strategy, runs_as, (stated,))
    model = apply_facts(workload, chosen)
    shared = strategy
    if strategy is None:
        count = 1 if ranks is None else int(check_positive("ranks", ranks, integer=True))
        if model.parallel == PARALLEL[0]:
            model = replace(model, parallel=PARALLEL[chosen.zero])
        by_settings = share_states(model, _state_sharing(model, count), chosen)
        _check_autocast(model, by_settings, chosen)
        if np.any(by_settings.buffers):
            shared = _divide_batch(model, by_settings, count)
    else:
        shared = share_states(model, strategy, chosen)
        _check_shards(shared)
        _check_autocast(model, shared, chosen)
    stated = _override_facts(stated, workload, strategy)
    return StackedWork(model, shared, runs_as, (stated,))


def _check_ranks_of_strategy(strategy: Strategy | None, ranks: Any) -> None:
    """Raise a ValueError where another number of ranks is stated than a strategy takes."""
    if strategy is None or ranks is None or np.ndim(strategy.ranks):
        return
    if ranks != int(strategy.ranks):
        raise ValueError(
            f"ranks is {show(ranks)}, and strategy takes {int(strategy.ranks)}; leave ranks out, or "
            f"take a strategy whose tp x pp x cp x dp is {show(ranks)}"
        )


def _check_shards(strategy: Strategy) -> None:
    """Raise a ValueError for groups of ranks that share nothing."""
    is_idle = np.greater(strategy.shards, 0) & np.equal(strategy.zero, 0)
    if np.any(is_idle):
        shards = np.broadcast_to(strategy.shards, np.shape(is_idle))[is_idle][0]
        raise ValueError(
            f"shards is {shards:g} and zero is 0, so that no group of ranks shares anything; take zero=3 for "
            "hybrid sharding, as Strategy.hsdp, or zero=1 or 2, or leave shards out"
        )


def _choose_usual(workload: Any, strategy: Strategy | None, execution: str | None) -> StackedWork:
    """What runs on the usual software: gradients are added up as it does, nothing else changes, and
    its facts are those of the settings."""
    usual = [STACKS[name] for name in name_usual_stacks(workload, strategy, execution)]
    if isinstance(workload, Transformer) and strategy is not None:
        _check_shards(strategy)
        # products add to buffers alone
        has_buffers = np.array([stack.buffers for stack in usual]).reshape(np.shape(strategy.ranks))
        buffers = strategy.buffers | has_buffers | workload.fused_accumulation
        strategy = replace(strategy, buffers=buffers if buffers.ndim else bool(buffers))
        fuses = any(stack.fused_accumulation for stack in usual)
        if fuses and not workload.lora_rank:  # adapters are refused with buffers
            keeps = workload.dtype == "fp8"  # which Transformer Engine runs
            workload = replace(workload, fused_accumulation=True, keeps_fp8=keeps)
    if not isinstance(workload, Transformer):
        stacks = tuple(_state_execution(stack, execution) for stack in usual)
        return StackedWork(workload, strategy, execution, stacks)
    zeros = np.broadcast_to(_find_zero(workload, strategy), len(usual)).tolist()
    stated: dict[tuple[str, int], Stack] = {}  # many strategies share a few stacks
    for stack, zero in zip(usual, zeros, strict=True):
        if (stack.name, zero) not in stated:
            stated[stack.name, zero] = _state_facts(stack, workload, zero, execution)
    stacks = tuple(stated[stack.name, zero] for stack, zero in zip(usual, zeros, strict=True))
    return StackedWork(workload, strategy, execution, stacks)


def _state_facts(stack: Stack, model: Transformer, zero: int, execution: str | None) -> Stack:
    """The usual software with the settings of a Transformer as its facts."""
    reduced = model.reduce_dtype
    if not reduced and model.mixed and stack.mixed == "masters":
        reduced = "fp32"
    return replace(
        _state_execution(stack, execution),
        reduce_dtype=reduced,
        attention=_name_attention(model),
        zero=zero,
        vocabulary_multiple=model.vocabulary_multiple,
        fp8_recipe=model.fp8_recipe or stack.fp8_recipe,
        loss_chunks=model.loss_chunks,
        fp8_gathers=model.fp8_gathers,
    )


def _override_facts(stack: Stack, model: Transformer, strategy: Strategy | None) -> Stack:
    """A stack that was stated, with the settings that win over its facts. Of many strategies each
    has its own `zero`, and that of the stack stays."""
    facts: dict[str, Any] = {}
    if model.reduce_dtype:
        facts["reduce_dtype"] = model.reduce_dtype
    elif not (model.mixed and stack.mixed == "masters"):
        facts["reduce_dtype"] = ""  # they are reduced as they are computed
    if _name_attention(model):
        facts["attention"] = model.attention
    if model.vocabulary_multiple != 1:
        facts["vocabulary_multiple"] = model.vocabulary_multiple
    if model.fp8_recipe:
        facts["fp8_recipe"] = model.fp8_recipe
    if model.fp8_gathers:
        facts["fp8_gathers"] = True
    if model.loss_chunks != 1:
        facts["loss_chunks"] = model.loss_chunks
    zero = _find_zero(model, strategy)
    if np.ndim(zero) == 0 and zero:
        facts["zero"] = int(zero)
    return replace(stack, **facts) if facts else stack


def _state_execution(stack: Stack, execution: str | None) -> Stack:
    """A stack with the execution that was stated, if one was; an unknown one is refused where it
    is priced."""
    if execution is None or execution not in EXECUTIONS:
        return stack
    if execution == "graphs":
        return replace(stack, execution="eager", graphs=True)
    return replace(stack, execution=execution, graphs=False)


def _find_zero(model: Transformer, strategy: Strategy | None) -> Any:
    """What replicas share, as `Strategy.zero`; an array of many strategies [-]."""
    if strategy is None:
        return PARALLEL.index(model.parallel)
    return strategy.without_idle_zero().zero


def _name_attention(model: Transformer) -> str:
    """The kernel of attention as a fact: empty for what the library chooses."""
    return "" if model.attention == "fused" else model.attention


def note_unpriced(workload: Any, stack: Stack) -> tuple[str, ...]:
    """A note where a stack was stated with facts that change nothing.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        What is predicted.
    stack : Stack
        The software. The facts that perfkit knows of it are part of its levels; those that differ
        count, and of a DLRM those that differ from TorchRec's.

    Returns
    -------
    notes : tuple of str
        A sentence, or nothing.

    Examples
    --------
    >>> stack = replace(find_stack("megatron-te"), fp8_gathers=True)
    >>> note_unpriced(Transformer.gpt2(batch=8), stack)
    ("stack 'megatron-te': fp8_gathers is stated and not priced, the time is that without it",)
    """
    known = STACKS.get(stack.name, Stack(stack.name))
    names = []
    if stack.fp8_gathers and stack.buffers and not isinstance(workload, DLRM):
        names.append("fp8_gathers")
    if stack.graphs and not known.graphs and stack.execution == "compiled":
        names.append("graphs")
    if isinstance(workload, DLRM):
        for name in _OF_TRANSFORMERS:
            matters = name != "mixed" or workload.mixed
            if matters and getattr(stack, name) != getattr(STACKS["torchrec"], name):
                names.append(name)
    if not names:
        return ()
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    listed = ", ".join(names)
    return (
        f"stack {stack.name!r}: {listed} {verb} stated and not priced, the time is that without {them}",
    )


def name_padding(workload: Any, stack: Stack, *, is_stated: bool) -> str:
    """Name what pads the vocabulary of a Transformer.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        What is predicted.
    stack : Stack
        The software, with the settings that win over its facts.
    is_stated : bool
        Whether this software was asked for. The usual one changes no sizes, so that it pads only
        where it is stated.

    Returns
    -------
    padding : str
        Settings of Python; empty where the vocabulary is padded, or needs no padding.

    Examples
    --------
    >>> model = Transformer.gpt2(batch=8)
    >>> name_padding(model, find_stack("fsdp"), is_stated=False)
    'take vocabulary_multiple=128'
    >>> name_padding(model, find_stack("megatron"), is_stated=False)
    "take vocabulary_multiple=128, or stack='megatron', which pads so where it is stated"
    """
    if not isinstance(workload, Transformer) or np.any(workload.vocabulary_multiple != 1):
        return ""
    if not np.any(workload.vocabulary % _USUAL_MULTIPLE):
        return ""
    by_hand = f"take vocabulary_multiple={_USUAL_MULTIPLE}"
    usual = STACKS.get(stack.name)
    if is_stated or usual is None or usual.vocabulary_multiple == 1:
        return by_hand
    return f"{by_hand}, or stack={stack.name!r}, which pads so where it is stated"


def note_misfits(workload: Any, stack: Stack, *, is_stated: bool = True) -> tuple[str, ...]:
    """Notes where a stack is none for what it shall run.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        What is predicted.
    stack : Stack
        The software, with the settings that win over its facts.
    is_stated : bool, optional
        Whether this software was asked for.

    Returns
    -------
    notes : tuple of str
        A sentence for each of these: it is for other models, it has no fp8, replicas share more
        than it can, or it was asked for and always keeps weights in fp32, which the model has not.

    Examples
    --------
    >>> note_misfits(Transformer.gpt2(batch=8), replace(find_stack("megatron"), zero=3))
    ("stack 'megatron' runs ZeRO 0 to 1, and zero is 3; take zero=1, or software that shares more, as 'fsdp'",)
    """
    first = workload[0] if isinstance(workload, list | tuple) and workload else workload
    family = getattr(first, "family", "")
    notes = []
    if family in TRAINS and stack.trains not in ("any", family):
        notes.append(
            f"stack {stack.name!r} trains models of the family {stack.trains!r}, and this one is of "
            f"{family!r}; take {_list_suited(family, fp8=False)}"
        )
    if getattr(first, "dtype", "") == "fp8" and not stack.runs_fp8:
        notes.append(
            f"stack {stack.name!r} has no products in fp8; take {_list_suited(family, fp8=True)}"
        )
    if stack.zero > stack.most_zero:
        can = f"ZeRO 0 to {stack.most_zero}" if stack.most_zero else "no ZeRO"
        notes.append(
            f"stack {stack.name!r} runs {can}, and zero is {stack.zero}; take "
            f"zero={stack.most_zero}, or software that shares more, as 'fsdp'"
        )
    always_has_masters = stack.memory == "megatron" and stack.mixed == "masters"
    if is_stated and always_has_masters and isinstance(first, Transformer):
        in_low_precision = ITEMSIZE.get(first.dtype, 2) == 2
        if in_low_precision and not first.mixed:
            notes.append(
                f"stack {stack.name!r} keeps weights in fp32 for the optimizer, and this model has "
                "none: mixed is False; take mixed=True"
            )
    return tuple(notes)


def note_replaced(model: Any, strategy: Strategy | None) -> tuple[str, ...]:
    """A note where settings of a model that a strategy replaces were stated, and it leaves them at their
    defaults.

    Parameters
    ----------
    model : Workload
        What is predicted; of a Transformer, with its own settings for sharing.
    strategy : Strategy or None
        One, with the facts of its software; None where the settings of the model count.

    Returns
    -------
    notes : tuple of str
        A sentence, or nothing: also where the strategy says the same, or something else that is no
        default.

    Examples
    --------
    >>> note_replaced(Transformer.gpt2(batch=8, checkpoint=True), Strategy(dp=8))
    ("the strategy replaces settings of the model, which do not count: checkpoint='full'; state in the strategy checkpoint='full', or leave them out",)
    """
    if strategy is None or not isinstance(model, Transformer):
        return ()
    stated = []
    wanted = []
    checkpoint = name_checkpoint(model.checkpoint)
    if checkpoint != "none" and strategy.checkpoint == "none":
        texts = [f"checkpoint={checkpoint!r}"]
        if model.checkpoint_layers < model.layers:
            texts.append(f"checkpoint_layers={model.checkpoint_layers}")
        if model.checkpoint_group > 1:
            texts.append(f"checkpoint_group={model.checkpoint_group}")
        stated += texts
        wanted += texts
    shared = PARALLEL.index(model.parallel)
    if shared and strategy.zero == 0 and strategy.dp * strategy.cp > 1:
        stated.append(f"parallel={model.parallel!r}")
        wanted.append(f"zero={shared}")
    micro_batches = model.batch / (strategy.dp * strategy.micro_batch)
    if model.accumulate > 1 and strategy.micro_batch == 1 and micro_batches != model.accumulate:
        stated.append(f"accumulate={model.accumulate}")
        micro_batch = model.batch / (strategy.dp * model.accumulate)
        wanted.append(f"micro_batch={micro_batch:g}" if micro_batch % 1 == 0 else "a micro_batch")
    if not model.overlap and strategy.overlap:
        stated.append("overlap=False")
        wanted.append("overlap=False")
    if not stated:
        return ()
    return (
        f"the strategy replaces settings of the model, which do not count: {', '.join(stated)}; state in "
        f"the strategy {', '.join(wanted)}, or leave them out",
    )


def list_savings(
    workload: Any, strategy: Strategy | None, stack: Stack, *, is_stated: bool
) -> tuple[str, ...]:
    """What makes ranks hold less of a model, and is not in use.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        What is predicted.
    strategy : Strategy or None
        How ranks share it, if that is stated.
    stack : Stack
        The software, with the settings that win over its facts.
    is_stated : bool
        Whether this software was asked for; the usual one gives way to FSDP.

    Returns
    -------
    savings : tuple of str
        More sharing by replicas, and checkpoints; of a DLRM nothing, whose tables are what is large.

    Examples
    --------
    >>> list_savings(Transformer.gpt2(batch=8), None, find_stack("ddp"), is_stated=False)
    ('fsdp', 'checkpoints')
    >>> megatron = find_stack("megatron")
    >>> list_savings(Transformer.gpt2(batch=8), Strategy(dp=8), megatron, is_stated=True)
    ('zero=1', 'checkpoints')
    """
    first = workload[0] if isinstance(workload, list | tuple) and workload else workload
    tables = getattr(first, "tables", None)
    if isinstance(first, DLRM) or tables:
        return ()
    if not isinstance(first, Transformer):
        return "fsdp", "checkpoints"
    most_zero = 3
    if is_stated:
        most_zero = stack.most_zero
        if first.mixed and stack.mixed == "autocast":
            most_zero = 0
    savings = []
    if stack.zero < most_zero:
        savings.append(PARALLEL[most_zero] if strategy is None else f"zero={most_zero}")
    checkpoints = first.checkpoint if strategy is None else strategy.checkpoint == "full"
    if not checkpoints:
        savings.append("checkpoints")
    return tuple(savings)


def _list_suited(family: str, *, fp8: bool) -> str:
    """Names of the stacks that train models of a family, in fp8 or in any format."""
    names = [
        stack.name
        for stack in STACKS.values()
        if stack.trains in ("any", family) and (stack.runs_fp8 or not fp8)
    ]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check_autocast(model: Transformer, strategy: Strategy, stack: Stack) -> None:
    """Raise a ValueError where weights that ranks share would be cast by autocast."""
    if not np.all(can_run(model, strategy, stack)):
        raise ValueError(
            f"stack {stack.name!r} runs mixed precision by autocast, on replicas of a whole model; "
            "ranks share more; take stack='fsdp' or 'megatron', or a fact of your own, mixed='masters'"
        )


def can_run(model: Transformer, strategy: Strategy, stack: Stack) -> Any:
    """Find the strategies that a stack can run.

    Parameters
    ----------
    model : Transformer
        The model.
    strategy : Strategy
        One or many.
    stack : Stack
        The software.

    Returns
    -------
    can : bool or array
        Autocast needs replicas of the whole model.
    """
    return strategy.replicated | np.logical_not(model.mixed and stack.mixed == "autocast")


def needs_strategy(model: Any, stack: Stack) -> bool:
    """Find out whether a stack runs a model as a strategy, also where none is given.

    Parameters
    ----------
    model : Workload
        What is predicted.
    stack : Stack
        The software.

    Returns
    -------
    needs : bool
        True for a Transformer that it runs with fp32 masters or with buffers of gradients.
    """
    if not isinstance(model, Transformer):
        return False
    return stack.buffers or (model.mixed and stack.mixed == "masters")


def _state_sharing(model: Transformer, ranks: int) -> Strategy:
    """How ranks share a Transformer by its own settings, with any micro-batch."""
    return Strategy(
        dp=ranks,
        zero=PARALLEL.index(model.parallel),
        checkpoint=model.computed_again.name,
        checkpoint_layers=model.checkpoint_layers,
        checkpoint_group=model.checkpoint_group,
        overlap=model.overlap,
    )


def _divide_batch(model: Transformer, strategy: Strategy, ranks: int) -> Strategy:
    """The same strategy with the micro-batch of a Transformer by its own settings."""
    count = check_ranks(model.batch, ranks, None, model.accumulate)
    if not isinstance(model.batch, int | np.integer):
        raise ValueError(
            "sizes are arrays; strategies of settings are stated one by one; take numbers"
        )
    return replace(strategy, micro_batch=int(model.batch) // (count * model.accumulate))


def state_strategy(model: Transformer, ranks: int) -> Strategy:
    """State the settings of a Transformer as a strategy.

    Parameters
    ----------
    model : Transformer
        The model.
    ranks : int
        Ranks that take part [-].

    Returns
    -------
    strategy : Strategy
        Replicas with the micro-batch, the sharing and the checkpoints of the model.

    Raises
    ------
    ValueError
        For a batch that the ranks cannot share evenly, and for one that is an array.

    Examples
    --------
    >>> state_strategy(Transformer.gpt2(batch=16, parallel="fsdp", accumulate=2), 4)
    Strategy(tp=1, pp=1, dp=4, micro_batch=2, zero=3)
    """
    return _divide_batch(model, _state_sharing(model, ranks), ranks)


def _check_adapters(model: Transformer, stack: Stack) -> None:
    """Raise a ValueError where gradients of adapters would be added to buffers."""
    if model.lora_rank and (stack.buffers or stack.fused_accumulation):
        raise ValueError(
            f"stack is {stack.name!r} and lora_rank {model.lora_rank}; this software adds gradients to "
            "buffers, with which adapters were never checked; take a stack such as 'ddp' or 'fsdp'"
        )


def apply_facts(model: Transformer, stack: Stack) -> Transformer:
    """A Transformer with the facts of a stack that say how a rank computes.

    Parameters
    ----------
    model : Transformer
        The model.
    stack : Stack
        The software.

    Returns
    -------
    model : Transformer
        With these settings, where they were left at their defaults.

    Raises
    ------
    ValueError
        For low-rank adapters with buffers of gradients.
    """
    _check_adapters(model, stack)
    facts: dict[str, Any] = {}
    if model.attention == "fused" and stack.attention:
        facts["attention"] = stack.attention
    if stack.fused_accumulation:
        facts["fused_accumulation"] = True
    if stack.keeps_fp8 and model.dtype == "fp8":
        facts["keeps_fp8"] = True
    if model.loss_chunks == 1 and stack.loss_chunks > 1:
        facts["loss_chunks"] = stack.loss_chunks
    if stack.fp8_gathers and not stack.buffers and model.dtype == "fp8":
        facts["fp8_gathers"] = True
    if stack.fp8_recipe and model.dtype == "fp8" and not model.fp8_recipe:
        facts["fp8_recipe"] = stack.fp8_recipe
    if model.vocabulary_multiple == 1:
        facts["vocabulary_multiple"] = stack.vocabulary_multiple
    if model.mixed and stack.mixed == "masters" and not model.reduce_dtype:
        computed = "bf16" if model.dtype == "fp8" else model.dtype
        facts["reduce_dtype"] = stack.reduce_dtype or computed
    return replace(model, **facts) if facts else model


def share_states(model: Transformer, strategy: Strategy, stack: Stack) -> Strategy:
    """A strategy with the facts of a stack that say how ranks share work.

    Parameters
    ----------
    model : Transformer
        The model.
    strategy : Strategy
        One or many.
    stack : Stack
        The software.

    Returns
    -------
    strategy : Strategy
        `zero` where it is 0, `tiled` and `overlap_experts` where they are False, experts only where
        ranks share them, in schedules that can overlap their messages; `host_threads` where it is 0 and
        several ranks let the host update; and `buffers`: where the stack
        has them, and for fp32 masters of replicas that share nothing.

    Raises
    ------
    ValueError
        For low-rank adapters with buffers of gradients.
    """
    _check_adapters(model, stack)
    facts: dict[str, Any] = {}
    if stack.zero:
        zero = np.where(np.equal(strategy.zero, 0), stack.zero, strategy.zero)
        facts["zero"] = zero if zero.ndim else int(zero)
    if stack.overlaps_tensor:
        tiled = np.logical_or(strategy.tiled, np.greater(strategy.tp, 1))
        facts["tiled"] = tiled if tiled.ndim else bool(tiled)
    if stack.overlaps_experts:
        in_turn = np.equal(strategy.pp, 1) | np.equal(strategy.schedule, "interleaved")
        can_overlap = (
            np.greater(strategy.ep, 1)
            & in_turn
            & np.logical_not(recomputes(strategy.checkpoint, "experts"))
        )
        overlaps = np.logical_or(strategy.overlap_experts, can_overlap)
        facts["overlap_experts"] = overlaps if np.ndim(overlaps) else bool(overlaps)
    if stack.host_threads:
        several = np.equal(strategy.host_threads, 0) & np.greater(strategy.ranks, 1)
        updates = several & strategy.offloads_optimizer
        threads = np.where(updates, stack.host_threads, strategy.host_threads)
        facts["host_threads"] = threads if threads.ndim else int(threads)
    shared = replace(strategy, **facts) if facts else strategy
    has_masters = model.mixed and stack.mixed == "masters"
    masters = shared.without_idle_zero().replicated & has_masters
    buffers = strategy.buffers | masters | (stack.buffers or model.fused_accumulation)
    if np.any(buffers):
        shared = replace(shared, buffers=buffers if np.ndim(buffers) else bool(buffers))
    return shared


def name_usual_stacks(workload: Any, strategy: Strategy | None, execution: str | None) -> list[str]:
    """Name the software that usually runs a workload.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        What is predicted.
    strategy : Strategy or None
        How ranks share it; its fields may be arrays.
    execution : str or None
        How it is executed.

    Returns
    -------
    names : list of str
        One for each strategy: TorchRec for a DLRM; FSDP where ranks share weights or gradients, or
        states of a whole model; else Megatron-LM where they share layers, stages, sequences or
        experts, or where the host updates shards of the states of a whole model (ZeRO 1), with
        Transformer Engine in fp8; otherwise DistributedDataParallel.
    """
    first = workload[0] if isinstance(workload, list | tuple) and workload else workload
    if isinstance(first, DLRM) or getattr(first, "family", "") == "dlrm":
        return ["torchrec"]
    runs_as = execution
    if runs_as is None and isinstance(first, Graph):
        runs_as = first.execution
    suffix = "-compiled" if runs_as == "compiled" else ""
    if strategy is None:
        shares = getattr(first, "parallel", PARALLEL[0]) != PARALLEL[0]
        return [f"{'fsdp' if shares else 'ddp'}{suffix}"]
    check_strategy_type(strategy)
    megatron = "megatron-te" if getattr(first, "dtype", "") == "fp8" else "megatron"
    # where the optimizer is updated depends on the software, where activations wait does not
    offload = np.where(np.equal(strategy.offload, "activations"), "none", strategy.offload)
    shared = replace(strategy, offload=offload if offload.ndim else str(offload))
    shared = shared.without_idle_zero()
    of_torch = shared.alone & np.logical_not(shared.offloads_optimizer)
    is_fsdp = np.greater(shared.zero, np.where(of_torch, 0, 1))
    names = np.where(of_torch, f"ddp{suffix}", megatron)
    names = np.where(is_fsdp, f"fsdp{suffix}", names)
    return [str(name) for name in np.broadcast_to(names, np.shape(strategy.ranks)).ravel()]
