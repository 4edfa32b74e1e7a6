"""How ranks share the training of a Transformer: tensors, stages, replicas, sequences and
experts."""

from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.records import set_fields
from perfkit.ground.units import check_choice, check_positive, check_sizes, check_type, show
from perfkit.models.checkpoints import EVERY_LAYER, check_checkpoints, recomputes
from perfkit.models.partitions import (
    BREADTH_FIRST,
    CHUNKED,
    V_SHAPED,
    check_schedule,
    find_schedules,
)
from perfkit.models.v_schedules import UP, find_position
from perfkit.workloads.sizes import check_size

_SIZES = ("tp", "pp", "cp", "ep", "micro_batch", "chunks", "checkpoint_group")
#: How tokens go to experts.
DISPATCHES = ("all_to_all", "once")
#: How ranks of `cp` come to the keys of other ranks.
CP_KINDS = ("ring", "all_gather", "ulysses")
#: The same in the words of Megatron (``--cp-comm-type``) and torchtitan
#: (``context_parallel_rotate_method``), and a kind that is refused by name.
_CP_WORDS = {
    "p2p": "that is 'ring' here",
    "alltoall": "that is 'ring' here",
    "allgather": "that is 'all_gather' here",
    "a2a": "that is 'ulysses' here",
    "a2a+p2p": "no step of it is published that could check it; take 'ring' or 'ulysses'",
}
#: What lies in the memory of the host.
OFFLOADS = ("none", "optimizer", "activations", "parameters")
#: Most threads of the CPU that a rank may have: those of eight sockets of 64 cores with two threads each
#: [-].
MOST_THREADS = 2**10
#: Those whose host updates weights.
_WITH_OPTIMIZER = ("optimizer", "parameters")


@dataclass(frozen=True)
class Strategy:
    """How ranks share one training iteration; fields may be arrays, with one value for each of many
    strategies.

    Parameters
    ----------
    tp : int
        Ranks that share the matrix products of each layer (tensor parallel) [-].
    pp : int
        Stages of consecutive layers (pipeline parallel) [-].
    dp : int
        Replicas of the model, which share the batch (data parallel) [-].
    cp : int
        Ranks that share the tokens of each sequence (context parallel) [-].
    ep : int
        Ranks that share the experts of each layer (expert parallel) [-]. If it divides `dp` and
        `etp` is 0, they are replicas. Otherwise experts are spread over all ranks of a stage, as
        Megatron does it: `ep` times `etp` divides `tp` times `cp` times `dp`.
    micro_batch : int
        Sequences of a replica in one pass [-].
    schedule : str
        Order of the passes of a stage: ``gpipe``, ``1f1b``, ``interleaved``, ``breadth_first``,
        ``zero_bubble`` (H1), ``zb_v`` or ``dualpipe_v``, whose stages hold two chunks in a V. With one
        stage, ``zero_bubble`` is ``1f1b``.
    chunks : int
        Chunks of layers of each stage; above 1 only for ``interleaved``, which needs 2 or more of
        several stages, and ``breadth_first``, and 2 for ``zb_v`` and ``dualpipe_v`` [-].
    first_layers, last_layers : int
        Layers of the first stage, which also holds the embeddings, and of the last, which also
        holds the head; 0 for as many as the others have. Of several chunks the first one of the
        first stage and the last one of the last stage take the difference, see `spread_chunks`. In
        a V the first stage holds both ends, and `last_layers` is 0 [-].
    checkpoint : str
        What the backward pass computes again: ``none``, ``selective`` (attention without its
        projections), ``full`` (layers, which keep only their input), or some parts of a layer, which
        keep their inputs: ``norms``, ``activation`` (between the products of an MLP or of experts),
        ``mlp``, ``experts`` (with their router and messages), also joined with each other or with
        ``attention``, as ``norms+activation`` (Megatron's ``--recompute-modules``). ``per_op``: all
        but the results of every other product, of attention and of reduce_scatter, as torchtitan's
        selective checkpoints by operation.
    checkpoint_layers : int
        Layers of each chunk that do so, the first ones, as Megatron's ``--recompute-method block``
        with ``--recompute-num-layers``; by default all of them. With checkpoint ``none``, and for more
        layers than the model has, an error [-].
    checkpoint_group : int
        Layers of a chunk that keep one input together and are computed again at once, as Megatron's
        ``--recompute-method uniform`` with ``--recompute-num-layers``; the last group may have fewer.
        With checkpoint ``full`` of all layers and `zero` up to 1; for more layers than the model has,
        an error [-].
    zero : int
        What replicas share (ZeRO): nothing (0); states of the optimizer (1); gradients too, reduced
        after each micro-batch (2); weights too, gathered for each micro-batch (3) [-].
    shards : int
        Replicas of a group that share what `zero` says (hybrid sharding); it divides `dp`; 0 for
        all replicas [-].
    sequence_parallel : bool
        Whether the ranks of `tp` also share the tokens of all operations that are no products; of no
        effect at ``tp=1``.
    cp_kind : str
        How ranks of `cp` attend to the tokens of the others; of no effect at ``cp=1``. ``ring``: keys
        and values go around a ring beside attention, of which each rank has an equal share (head and
        tail chunks; Megatron's ``p2p``). ``all_gather``: those of the whole sequence are gathered ahead
        of attention, and their gradients reduced and scattered behind it; nothing hides either
        (Llama 3, arXiv:2407.21783, section 3.3.2; Megatron's ``all_gather``). ``ulysses``: queries, keys,
        values and outputs change places with heads (all_to_all, arXiv:2309.14509; Megatron's ``a2a``).
        See `perfkit.prediction.strategy_passes.context_parallel_time`.
    two_level : bool
        Whether tokens for experts are first gathered in each node (Tutel, arXiv:2206.03382, section
        3.4), where the ranks of `ep` fill several nodes; of no effect otherwise.
    overlap : bool
        Whether gradients are reduced and weights gathered while layers compute.
    tiled : bool
        Whether the ranks of `tp` exchange tiles of a product while other tiles compute
        (asynchronous tensor parallel, userbuffers of Transformer Engine), each message of a layer
        beside its own products; of no effect at ``tp=1``; see `perfkit.prediction.tiles`.
    buffers : bool
        Whether gradients are added up, also those of a single micro-batch, in buffers that live
        through the iteration and are reduced as they are, as in Megatron-LM. Otherwise replicas of
        the whole model are those of PyTorch's DistributedDataParallel and FSDP.
    etp : int
        Ranks that share the products of each expert (expert tensor parallel) [-]; 0 for as many as
        `tp` where experts are shared by replicas, and for 1 where all ranks of a stage share them.
    dispatch : str
        How tokens go to experts and come back. ``all_to_all``: a copy for each expert of a token.
        ``once``: each token once to each node, and there once to each rank that holds one of its
        experts, as DeepEP and HybridEP do. Of no effect at ``ep=1``; of dense models an error, as all
        that is said of experts.
    overlap_experts : bool
        Whether tokens of one micro-batch go to experts while the kernels of another run, a forward
        pass beside a backward pass (Megatron's ``--overlap-moe-expert-parallel-comm``); of no effect
        at ``ep=1``.
    offload : str
        What lies in the memory of the host. ``optimizer``: states of the optimizer and fp32
        weights; gradients are copied to the host as they are reduced, the host updates, and weights
        come back (ZeRO-Offload, arXiv:2101.06840; Megatron's ``--optimizer-cpu-offload``). It needs
        `zero` of 1 or more, also on a single rank. ``parameters``: shards of weights, too, which are
        copied to the device before each gather (`zero` 3; FSDP2's ``CPUOffloadPolicy``).
        ``activations``: what layers keep for the backward pass, or their inputs with full
        checkpoints, of all layers but the last (one stage; Megatron's ``--cpu-offloading``,
        torchtune's ``enable_activation_offloading``). See `perfkit.prediction.offload`.
    offload_fraction : float
        Share of the weights that the host updates; the device updates the others at the same time
        (Twin-Flow of DeepSpeed, Megatron's ``--optimizer-offload-fraction``) [-].
    host_threads : int
        Threads of the CPU with which a rank updates what is offloaded; 0 for as many as its share of
        the host has (``OMP_NUM_THREADS``, which torchrun sets to 1 where it starts several ranks on a
        node) [-].
    overlap_host : bool
        Whether copies of gradients and weights go beside the update of the host where there are
        `buffers` (Megatron's ``--overlap-cpu-optimizer-d2h-h2d``); other software does so by itself.
    ulysses : None
        What ``cp_kind="ulysses"`` says now; a value is an error.

    Raises
    ------
    ValueError
        For sizes that are no whole numbers above 0, for unknown names, for sizes that do not divide
        `dp`, for ranks of experts that do not divide those of a stage, for chunks with a schedule
        that has none, and for what `overlap_experts`, `dispatch` and `offload` do not go with.

    Examples
    --------
    >>> Strategy(tp=8, pp=8, dp=16, micro_batch=1, sequence_parallel=True).ranks
    1024
    """

    tp: Any = 1
    pp: Any = 1
    dp: Any = 1
    cp: Any = 1
    ep: Any = 1
    micro_batch: Any = 1
    schedule: Any = "1f1b"
    chunks: Any = 1
    first_layers: Any = 0
    last_layers: Any = 0
    checkpoint: Any = "none"
    checkpoint_layers: Any = EVERY_LAYER
    checkpoint_group: Any = 1
    zero: Any = 0
    shards: Any = 0
    sequence_parallel: Any = False
    cp_kind: Any = "ring"
    two_level: Any = False
    overlap: Any = True
    tiled: Any = False
    buffers: Any = False
    etp: Any = 0
    dispatch: Any = "all_to_all"
    overlap_experts: Any = False
    offload: Any = "none"
    offload_fraction: Any = 1.0
    host_threads: Any = 0
    overlap_host: Any = False
    ulysses: InitVar[Any] = None

    def __post_init__(self, ulysses: Any) -> None:
        if ulysses is not None:
            raise ValueError(
                f"ulysses is {show(ulysses)}; cp_kind says how sequences are shared: take "
                "cp_kind='ulysses', or leave it out for 'ring'"
            )
        for key in _SIZES:
            set_fields(self, **{key: check_size(key, getattr(self, key), 2.0**15)})
        set_fields(
            self,
            dp=check_size("dp", self.dp, 2.0**20),
            schedule=_check_schedules(self.schedule),
            checkpoint=check_checkpoints(self.checkpoint),
            checkpoint_layers=_check_counts(
                "checkpoint_layers", self.checkpoint_layers, EVERY_LAYER
            ),
            cp_kind=_check_cp_kinds(self.cp_kind),
            dispatch=_check_names("dispatch", self.dispatch, DISPATCHES),
            offload=_check_names("offload", self.offload, OFFLOADS),
            offload_fraction=_check_shares("offload_fraction", self.offload_fraction),
            zero=_check_counts("zero", self.zero, 3),
        )
        for key in ("shards", "first_layers", "last_layers", "etp"):
            set_fields(self, **{key: _check_counts(key, getattr(self, key), 2**20)})
        threads = _check_counts("host_threads", self.host_threads, MOST_THREADS)
        set_fields(self, host_threads=threads)
        for key in (
            "sequence_parallel",
            "two_level",
            "overlap",
            "tiled",
            "buffers",
            "overlap_experts",
            "overlap_host",
        ):
            set_fields(self, **{key: _check_flags(key, getattr(self, key))})
        is_wrong = self.dp % np.maximum(self.shards, 1) > 0
        if np.any(is_wrong):
            wrong = np.broadcast_to(self.shards, np.shape(is_wrong))[is_wrong][0]
            replicas = np.broadcast_to(self.dp, np.shape(is_wrong))[is_wrong][0]
            raise ValueError(
                f"shards is {wrong:g}; it must divide dp, {replicas:g}; change one of them"
            )
        self._check_experts()
        self._check_offload()
        self._check_group()
        without = np.equal(self.checkpoint, "none") & np.greater(self.checkpoint_layers, 0)
        if np.any(without & self.is_partial):
            wrong = np.broadcast_to(self.checkpoint_layers, np.shape(without))[without][0]
            raise ValueError(
                f"checkpoint_layers is {wrong:g} and checkpoint 'none', which computes nothing again; take "
                "checkpoint='full' or another form, or leave checkpoint_layers out"
            )
        if np.any((self.chunks > 1) & ~_is_one_of(self.schedule, CHUNKED)):
            fault = f"chunks is {self.chunks} with schedule {self.schedule!r}"
            raise ValueError(
                f"{fault}; only {' and '.join(CHUNKED)} have several chunks; leave it at 1"
            )
        alternates = np.equal(self.schedule, "interleaved") & np.greater(self.pp, 1)
        if np.any(alternates & np.equal(self.chunks, 1)):
            raise ValueError(
                "chunks is 1 with schedule 'interleaved', whose stages alternate between several; Megatron "
                "runs a single one as '1f1b': take chunks=2 or more, or schedule='1f1b'"
            )
        self._check_v()

    def _check_v(self) -> None:
        """Check what stages with two chunks in a V go with; else a ValueError."""
        is_v_shaped = _is_one_of(self.schedule, V_SHAPED)
        if np.any(is_v_shaped & np.not_equal(self.chunks, 2)):
            raise ValueError(
                f"chunks is {self.chunks} with schedule {self.schedule!r}, whose stages hold two chunks in "
                "a V; take chunks=2"
            )
        if np.any(is_v_shaped & np.greater(self.last_layers, 0)):
            raise ValueError(
                f"last_layers is {self.last_layers} with schedule {self.schedule!r}, whose first stage "
                "holds embeddings and head; state first_layers"
            )

    def _check_experts(self) -> None:
        """Check how ranks share experts; else a ValueError."""
        ranks_of_stage = self.tp * self.cp * self.dp
        ranks_of_experts = self.ep * self.ranks_of_expert
        is_wrong = self.spreads_experts & (ranks_of_stage % ranks_of_experts > 0)
        if np.any(is_wrong):
            shape = np.shape(is_wrong)
            ep, etp, ranks = (
                np.broadcast_to(sizes, shape)[is_wrong][0]
                for sizes in (self.ep, self.ranks_of_expert, ranks_of_stage)
            )
            raise ValueError(
                f"ep is {ep:g} and etp {etp:g}; their product must divide the ranks of a stage, "
                f"tp times cp times dp, {ranks:g}; change one of them"
            )
        if np.any(self.spreads_experts & (self.tp > 1) & np.logical_not(self.sequence_parallel)):
            raise ValueError(
                "ep spreads experts over the ranks of tp, which share no tokens; "
                "take sequence_parallel=True, as Megatron asks for, or an ep that divides dp"
            )
        if np.any(self.two_level & np.equal(self.dispatch, "once")):
            raise ValueError(
                "two_level is True and dispatch 'once', which crosses nodes in two levels already; "
                "leave two_level out"
            )
        sends_again = recomputes(self.checkpoint, "experts")
        if np.any(self.overlap_experts & sends_again):
            name = np.broadcast_to(self.checkpoint, np.shape(sends_again))[sends_again][0]
            raise ValueError(
                f"overlap_experts is True and checkpoint {str(name)!r}, which Megatron does not run "
                "together; take checkpoint 'none' or 'selective'"
            )
        in_stages = self.overlap_experts & np.greater(self.pp, 1)
        if np.any(in_stages & np.not_equal(self.schedule, "interleaved")):
            raise ValueError(
                "overlap_experts is True with several stages, whose passes wait for one another; "
                "take schedule='interleaved' with chunks, as Megatron asks for, or pp=1"
            )

    def _check_offload(self) -> None:
        """Check what an offload goes with; else a ValueError."""
        if np.any(self.offloads_optimizer & np.equal(self.zero, 0)):
            raise ValueError(
                "offload moves states of the optimizer and zero is 0; ranks offload their shards of "
                "them: take zero=1 or more, also on a single rank, as DeepSpeed and Megatron ask for"
            )
        whole = self.offloads_parameters | ~self.offloads_optimizer
        if np.any(np.less(self.offload_fraction, 1.0) & whole):
            raise ValueError(
                "offload_fraction is below 1 without offload='optimizer', whose share it is; "
                "leave it at 1"
            )
        for name in ("host_threads", "overlap_host"):
            stated = np.not_equal(getattr(self, name), 0)
            if np.any(stated & ~self.offloads_optimizer):
                raise ValueError(
                    f"{name} is stated and no optimizer is offloaded, whose update it is of; "
                    "leave it out, or take offload='optimizer'"
                )
        if np.any(self.offloads_parameters & (np.less(self.zero, 3) | self.buffers)):
            raise ValueError(
                "offload moves parameters and zero is below 3 or buffers is True; ranks offload shards "
                "of weights, as FSDP2 does: take zero=3 without buffers"
            )
        moves_passes = self.offloads_parameters | self.offloads_activations
        if np.any(moves_passes & np.greater(self.pp, 1)):
            raise ValueError(
                "offload moves parameters or activations and pp is above 1, which Megatron refuses; "
                "take pp=1, or offload='optimizer'"
            )
        if np.any(self.offloads_activations & np.not_equal(self.schedule, "1f1b")):
            raise ValueError(
                "offload moves activations and schedule is not '1f1b'; a single stage has no other order: "
                "leave it out"
            )
        is_ordinary = _is_one_of(self.checkpoint, ("none", "full")) & ~self.is_partial
        if np.any(self.offloads_activations & ~is_ordinary):
            raise ValueError(
                "offload moves activations and only a part of them is computed again, of which nobody has "
                "published both; take checkpoint 'none' or 'full' of all layers"
            )
        if np.any(self.offloads_activations & self.overlap_experts):
            raise ValueError(
                "offload moves activations and overlap_experts is True, of which nobody has published "
                "both; leave one of them out"
            )

    def _check_group(self) -> None:
        """Check what layers that are computed again together go with; else a ValueError."""
        are_grouped = self.groups_layers
        if not np.any(are_grouped):
            return
        shape = np.shape(are_grouped)
        sizes = np.broadcast_to(self.checkpoint_group, shape)[are_grouped]
        fault = f"checkpoint_group is {sizes[0]:g}"
        are_whole = np.equal(self.checkpoint, "full") & ~self.is_partial
        if np.any(are_grouped & ~are_whole):
            raise ValueError(
                f"{fault} and not all of all layers is computed again, as groups are; take checkpoint='full' "
                "without checkpoint_layers, or leave it out"
            )
        if np.any(are_grouped & np.greater(self.zero, 1)):
            raise ValueError(
                f"{fault} and zero is above 1, which gathers weights layer by layer, of which nobody has "
                "published both; take zero=1, or leave it out"
            )
        if np.any(are_grouped & (self.offloads_activations | self.puts_off_weights)):
            raise ValueError(
                f"{fault} with an offload of activations or a schedule that puts off gradients of weights, of "
                "which nobody has published both; leave it out"
            )

    def __repr__(self) -> str:
        texts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("tp", "pp", "dp") or np.any(value != field.default):
                texts.append(f"{field.name}={value!r}")
        return f"Strategy({', '.join(texts)})"

    @property
    def label(self) -> str:
        """The strategy in short, as the labels of a chart have it: degrees above 1, the sharing of
        replicas, sequences of a micro-batch, chunks, and what is computed again and offloaded.

        Examples
        --------
        >>> Strategy(tp=8, pp=2, dp=4, zero=3).label
        'tp 8 · pp 2 · fsdp'
        >>> Strategy(dp=64, micro_batch=2, zero=1, checkpoint="full").label
        'zero1 · mb 2 · full ckpt'
        """
        if np.ndim(self.ranks) > 0:
            raise ValueError("this holds many strategies; select one of them for its label")
        words = [f"{name} {size}" for name, size in self._list_degrees() if size > 1]
        sharing = self._name_sharing()
        if sharing:
            words.append(sharing)
        if self.micro_batch > 1:
            words.append(f"mb {self.micro_batch}")
        if self.chunks > 1:
            words.append(f"{self.chunks} chunks")
        if self.checkpoint != "none":
            words.append(f"{self.checkpoint} ckpt")
        if self.offload != "none":
            words.append(f"{self.offload} offload")
        return " · ".join(words) or "one rank"

    def _list_degrees(self) -> list[tuple[str, Any]]:
        """Ranks that share tensors, stages, sequences and experts, by their names in short [-]."""
        return [("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep)]

    def _name_sharing(self) -> str:
        """How replicas share weights and states, in short; empty where there is one replica."""
        if self.dp * self.cp == 1:
            return ""
        if self.zero == 0:
            return f"dp {self.dp}" if self.dp > 1 else ""
        if self.zero < 3:
            return f"zero{self.zero}"
        if 0 < self.shards < self.dp:
            return f"hsdp {self.shards}"
        return "fsdp"

    @property
    def ranks(self) -> Any:
        """Ranks that take part [-]."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def owners(self) -> Any:
        """Ranks that share what `zero` says: each owns one shard of it [-]."""
        return np.where(np.greater(self.shards, 0), self.shards, self.dp) * self.cp

    @property
    def spreads_experts(self) -> Any:
        """Whether all ranks of a stage share experts, and not replicas alone."""
        return np.greater(self.etp, 0) | (self.dp % self.ep > 0)

    @property
    def shares_experts(self) -> Any:
        """Whether experts are shared by other ranks than the rest of a layer."""
        return np.greater(self.ep, 1) | self.spreads_experts

    @property
    def ranks_of_expert(self) -> Any:
        """Ranks that share the products of an expert [-]."""
        by_default = np.where(self.spreads_experts, 1, self.tp)
        return np.where(np.greater(self.etp, 0), self.etp, by_default)

    @property
    def apart_for_experts(self) -> Any:
        """How far ranks are apart that send tokens to each other's experts [-]."""
        return np.where(self.spreads_experts, self.ranks_of_expert, self.tp * self.cp)

    @property
    def replicated(self) -> Any:
        """Whether ranks share nothing but the batch, as with DistributedDataParallel."""
        return self.alone & np.equal(self.zero, 0)

    @property
    def alone(self) -> Any:
        """Whether ranks are replicas of the whole model, with all of it or shards of it, as those of
        PyTorch are; `buffers` are not, nor a single rank that offloads shards."""
        shared = np.maximum(np.maximum(self.tp, self.pp), np.maximum(self.cp, self.ep))
        offloads = np.not_equal(self.offload, "none") & np.greater(self.zero, 0)
        is_single = np.equal(self.dp, 1) & offloads
        return np.equal(np.maximum(shared, self.etp), 1) & np.logical_not(self.buffers | is_single)

    @property
    def shards_units(self) -> Any:
        """Whether several ranks share what `zero` says by units, a layer or all weights outside of
        layers, as PyTorch's `fully_shard` does."""
        return self.alone & np.greater(self.zero, 0) & np.greater(self.dp, 1)

    @property
    def scattered(self) -> Any:
        """Whether gradients are reduced after each micro-batch, so that a rank adds up only its
        shard."""
        # this is asked for often, and `find_schedules` would look up all that is known of them
        return np.greater(self.zero, 1) & ~_is_one_of(self.schedule, BREADTH_FIRST)

    def without_idle_zero(self) -> "Strategy":
        """The same, with `zero` 0 where there is a single replica, which has nobody to share with and
        offloads nothing.

        Returns
        -------
        strategy : Strategy
            One or many, as this one.
        """
        idle = np.equal(self.dp * self.cp, 1) & ~self.offloads_optimizer
        if not np.any(idle & np.greater(self.zero, 0)):
            return self
        zero = np.where(idle, 0, self.zero)
        return replace(self, zero=zero if zero.ndim else int(zero))

    def settle_checkpoints(self, layers: int) -> "Strategy":
        """The same with one way to say it: `checkpoint` is ``none`` where no layer is computed again,
        and `checkpoint_layers` its default where all layers of each chunk are.

        Parameters
        ----------
        layers : int
            All layers of the model [-].

        Returns
        -------
        strategy : Strategy
            One or many, as this one.
        """
        if np.all(np.equal(self.checkpoint_layers, EVERY_LAYER)):
            return self
        spread = spread_chunks(layers, self)
        names = np.where(np.equal(self.checkpoint_layers, 0), "none", self.checkpoint)
        is_every = (self.checkpoint_layers >= spread.longest) | np.equal(names, "none")
        counts = np.where(is_every, EVERY_LAYER, self.checkpoint_layers)
        return replace(
            self,
            checkpoint=names if names.ndim else str(names),
            checkpoint_layers=counts if counts.ndim else int(counts),
        )

    @property
    def groups_layers(self) -> Any:
        """Whether several layers are computed again together, see `checkpoint_group`."""
        return np.greater(self.checkpoint_group, 1)

    @property
    def is_partial(self) -> Any:
        """Whether some layers of a chunk are computed again and others are not, see
        `settle_checkpoints`."""
        return np.less(self.checkpoint_layers, EVERY_LAYER)

    @property
    def runs_plain_layers(self) -> Any:
        """Whether some layers run as if nothing were computed again: those beyond `checkpoint_layers`,
        and those of a group, which keep all while they run."""
        return self.is_partial | self.groups_layers

    @property
    def puts_off_weights(self) -> Any:
        """Whether gradients of weights are put off; no other stage waits for those of a single one."""
        return np.greater(self.pp, 1) & find_schedules(self.schedule).puts_off_weights

    @property
    def offloads_optimizer(self) -> Any:
        """Whether the host updates weights."""
        return _is_one_of(self.offload, _WITH_OPTIMIZER)

    @property
    def offloads_parameters(self) -> Any:
        """Whether shards of weights lie on the host."""
        return np.equal(self.offload, "parameters")

    @property
    def offloads_activations(self) -> Any:
        """Whether what layers keep for the backward pass goes to the host."""
        return np.equal(self.offload, "activations")

    @property
    def ranks_sharing_heads(self) -> Any:
        """Ranks that share the heads of attention: those of `tp`, with ``ulysses`` times those of `cp`
        [-]."""
        return self.tp * np.where(np.equal(self.cp_kind, "ulysses"), self.cp, 1)

    @property
    def rows(self) -> Any:
        """Ranks that share the tokens of operations that are no products [-]."""
        return np.where(self.sequence_parallel, self.tp, 1)

    @classmethod
    def hsdp(
        cls,
        ranks: int | None = None,
        *,
        shards: int,
        replicas: int | None = None,
        **settings: Any,
    ) -> "Strategy":
        """Hybrid sharding (HSDP): groups of ranks share weights, gradients and states of the
        optimizer, and each group is a replica of the others, as with a mesh of two dimensions of
        PyTorch's `fully_shard`.

        Parameters
        ----------
        ranks : int, optional
            Ranks that take part; by default those of all `replicas` [-].
        shards : int
            Ranks of a group that share weights, such as those of a node over `tp`; those of `cp` share
            them, too [-].
        replicas : int, optional
            Groups, in place of `ranks`: the first size of the mesh [-].
        **settings : int, str or bool
            Further fields of `Strategy`, such as ``tp=8``; not `dp` and `zero` [-].

        Returns
        -------
        strategy : Strategy
            With ``zero=3``, and as many replicas as are left of the ranks.

        Raises
        ------
        ValueError
            For ranks that the other sizes do not divide, for both or neither of `ranks` and
            `replicas`, and for fields that hybrid sharding sets.

        Examples
        --------
        >>> Strategy.hsdp(64, shards=8)
        Strategy(tp=1, pp=1, dp=64, zero=3, shards=8)

        Torchtitan's ``data_parallel_replicate_degree`` of 4 and ``data_parallel_shard_degree`` of 2:

        >>> Strategy.hsdp(shards=2, replicas=4, tp=8).ranks
        64
        >>> Strategy.hsdp(512, shards=8, tp=8, sequence_parallel=True).dp
        64
        """
        for key in ("dp", "zero"):
            if key in settings:
                raise ValueError(
                    f"{key} is {show(settings[key])}, which hybrid sharding sets; leave it out, or spell "
                    "the strategy out: Strategy(dp=64, zero=3, shards=8)"
                )
        if (ranks is None) == (replicas is None):
            raise ValueError(
                f"ranks is {show(ranks)} and replicas {show(replicas)}; give one of them, as "
                "Strategy.hsdp(64, shards=8) or Strategy.hsdp(shards=8, replicas=8)"
            )
        others = cls(**settings)
        if replicas is not None:
            groups = check_size("replicas", replicas, 2.0**20)
            of_group = check_size("shards", shards, 2.0**20)
            return replace(others, dp=groups * of_group, zero=3, shards=of_group)
        count = check_positive("ranks", ranks, integer=True, maximum=2.0**35)
        of_model = others.tp * others.pp * others.cp
        if count % of_model:
            raise ValueError(
                f"ranks is {count:g}; tp times pp times cp, {of_model:g}, must divide it; change one of them"
            )
        return replace(others, dp=count // of_model, zero=3, shards=shards)

    @classmethod
    def stack(cls, strategies: Any) -> "Strategy":
        """Join many strategies into one whose fields are arrays.

        Parameters
        ----------
        strategies : sequence of Strategy
            Single ones.

        Returns
        -------
        strategies : Strategy
            All of them, in this order.
        """
        check_type("strategies", strategies, Sequence[Strategy])
        if not len(strategies):
            raise ValueError("strategies is empty; it must hold at least one Strategy")
        columns = {}
        for field in fields(cls):
            columns[field.name] = np.array([getattr(one, field.name) for one in strategies])
        return cls(**columns)

    @classmethod
    def join(cls, parts: Sequence["Strategy"]) -> "Strategy":
        """Join records of many strategies.

        Parameters
        ----------
        parts : sequence of Strategy
            In each of them every field is an array, or a value that all have.

        Returns
        -------
        strategies : Strategy
            Those of the first part, then those of the next.
        """
        columns = {}
        for field in fields(cls):
            values = [np.broadcast_to(getattr(part, field.name), len(part.ranks)) for part in parts]
            columns[field.name] = np.concatenate(values)
        return cls(**columns)

    def drop_equal(self) -> "Strategy":
        """Take each of many strategies once.

        Returns
        -------
        strategies : Strategy
            Those that no earlier one equals, in their order.
        """
        count = len(self.ranks)
        columns = [np.broadcast_to(getattr(self, field.name), count) for field in fields(self)]
        codes = [np.unique(column, return_inverse=True)[1] for column in columns]
        _, first = np.unique(np.column_stack(codes), axis=0, return_index=True)
        return self.select(np.sort(first))

    def select(self, index: Any) -> "Strategy":
        """Take some of many strategies.

        Parameters
        ----------
        index : array
            Their positions, or whether each is taken [-].

        Returns
        -------
        strategies : Strategy
            The chosen ones.
        """
        shape = np.shape(self.ranks)
        if not shape:
            raise ValueError(
                "this is a single strategy; select takes some of Strategy.stack([...])"
            )
        try:
            np.empty(shape, dtype=bool)[index]
        except (IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"index is {show(index)}; it must be positions below {shape[0]}, or one True or False for each"
            ) from error
        chosen = {}
        for field in fields(self):
            chosen[field.name] = np.broadcast_to(getattr(self, field.name), shape)[index]
        return replace(self, **chosen)


def check_strategy_type(value: Any) -> Strategy:
    """Check that a value is a `Strategy`.

    Parameters
    ----------
    value : object
        The argument ``strategy``.

    Returns
    -------
    strategy : Strategy
        The same.

    Raises
    ------
    ValueError
        For anything else.

    Examples
    --------
    >>> check_strategy_type("fsdp")
    Traceback (most recent call last):
    ...
    ValueError: strategy is 'fsdp'; it must be a Strategy, such as Strategy(dp=8, zero=3) for FSDP on 8 ranks
    """
    if not isinstance(value, Strategy):
        raise ValueError(
            f"strategy is {show(value)}; it must be a Strategy, such as Strategy(dp=8, zero=3) for FSDP on 8 "
            "ranks"
        )
    return value


def _is_one_of(names: Any, wanted: Sequence[str]) -> np.ndarray:
    """Whether a name, or each of an array of names, is one of a few; `numpy.isin` takes ten times as
    long for these."""
    found = np.zeros(np.shape(names), dtype=bool)
    for name in wanted:
        found |= np.equal(names, name)
    return found


def _check_names(key: str, value: Any, known: Collection[str]) -> Any:
    """Check a name, or an array of names."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        for name in np.unique(value).tolist():
            check_choice(key, name, known)
        return value
    return check_choice(key, value, known)


def _check_cp_kinds(value: Any) -> Any:
    """Check how ranks share sequences, or an array of it, with the words of other software."""
    if isinstance(value, str) and value in _CP_WORDS:
        raise ValueError(
            f"cp_kind is {value!r}; known are {', '.join(CP_KINDS)}; {_CP_WORDS[value]}"
        )
    return _check_names("cp_kind", value, CP_KINDS)


def _check_schedules(value: Any) -> Any:
    """Check the name of a schedule, or an array of them."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        for name in np.unique(value).tolist():
            check_schedule(name)
        return value
    return check_schedule(value)


def _check_counts(key: str, value: Any, most: int) -> Any:
    """Check a whole number of 0 or more, or an array of them."""
    if isinstance(value, np.ndarray) and value.ndim:
        counts = check_sizes(key, value)
        for count in np.unique(counts).tolist():
            check_positive(key, count, integer=True, zero=True, maximum=most)
        return counts.astype(np.int64)
    return check_positive(key, value, integer=True, zero=True, maximum=most)


def _check_shares(key: str, value: Any) -> Any:
    """Check a share above 0 and up to 1, or an array of them."""
    if isinstance(value, np.ndarray) and value.ndim:
        for share in np.unique(value).tolist():
            check_positive(key, share, maximum=1.0)
        return value.astype(float)
    return check_positive(key, value, maximum=1.0)


def _check_flags(key: str, value: Any) -> Any:
    """Check True or False, or an array of them."""
    if isinstance(value, np.ndarray) and value.ndim and value.dtype == bool:
        return value
    flag = bool(value) if isinstance(value, np.bool_) else value
    check_type(key, flag, bool)
    return flag


class StatedEnds(NamedTuple):
    """Which end stages of a strategy have layers that are stated.

    Parameters
    ----------
    first, last : bool or array
        Whether those of the first and of the last stage are [-].
    other_stages : int or array
        How many other stages there are [-].
    """

    first: Any
    last: Any
    other_stages: Any


def find_stated_ends(s: Strategy) -> StatedEnds:
    """Find which end stages have layers that are stated.

    Parameters
    ----------
    s : Strategy
        One or many.

    Returns
    -------
    stated : StatedEnds
        Of each.
    """
    first, last = np.greater(s.first_layers, 0), np.greater(s.last_layers, 0)
    return StatedEnds(first, last, s.pp - first.astype(int) - last.astype(int))


class LayerSpread(NamedTuple):
    """How the layers of a model are spread over the chunks of its stages, of one strategy or of many.

    Parameters
    ----------
    even, longer : array
        Layers of a chunk of a stage whose layers are not stated, and how many of these chunks, the
        earliest of a forward pass, have one more [-].
    of_ends : array
        Layers of each chunk of the first or the last stage, if its layers are stated, but for the
        first chunk of the first stage and the last chunk of the last one [-].
    first, last : array
        Layers of these two, if they are stated; they may hold none beside embeddings or head [-].
    """

    even: Any
    longer: Any
    of_ends: Any
    first: Any
    last: Any

    @property
    def longest(self) -> Any:
        """Layers of the chunk that has most [-]."""
        longest = np.where(np.greater(self.longer, 0), self.even + 1, self.even)
        for of_end in (self.of_ends, self.first, self.last):
            longest = np.maximum(longest, of_end)
        return longest

    def count_layers(self, s: Strategy, stage: Any, chunk: Any) -> Any:
        """Count the layers of a chunk.

        Parameters
        ----------
        s : Strategy
            The strategies that were spread.
        stage, chunk : int or array
            Its stage, and its number among the chunks of this stage, from 0 [-].

        Returns
        -------
        layers : array
            Layers [-].
        """
        stated = find_stated_ends(s)
        is_v_shaped = _is_one_of(s.schedule, V_SHAPED)
        # its place among the chunks of other stages, in the order of a forward pass
        place = np.where(stated.first, stage - 1, stage)
        position = find_position(place, chunk, stated.other_stages, is_v_shaped=is_v_shaped)
        layers = np.where(position < self.longer, self.even + 1, self.even)
        of_other_chunk = np.where(is_v_shaped, s.first_layers - self.first, self.of_ends)
        of_first = np.where(np.equal(chunk, 0), self.first, of_other_chunk)
        of_last = np.where(np.equal(chunk, s.chunks - 1), self.last, self.of_ends)
        layers = np.where(stated.last & np.equal(stage, s.pp - 1), of_last, layers)
        return np.where(stated.first & np.equal(stage, 0), of_first, layers)

    def add_up(self, s: Strategy, stage: Any) -> Any:
        """Add up the layers of all chunks of a stage.

        Parameters
        ----------
        s : Strategy
            The strategies that were spread.
        stage : int or array
            The stage, from 0 [-].

        Returns
        -------
        layers : array
            Layers [-].
        """
        stated = find_stated_ends(s)
        position = np.where(stated.first, stage - 1, stage)
        longer = np.ceil((self.longer - position) / np.maximum(stated.other_stages, 1))
        longer = np.clip(longer, 0, s.chunks)
        is_v_shaped = _is_one_of(s.schedule, V_SHAPED)
        if np.any(is_v_shaped):
            on_the_way_back = find_position(position, UP, stated.other_stages, is_v_shaped=True)
            first_chunk = np.where(position < self.longer, 1.0, 0.0)
            second_chunk = np.where(on_the_way_back < self.longer, 1.0, 0.0)
            longer = np.where(is_v_shaped, first_chunk + second_chunk, longer)
        layers = self.even * s.chunks + longer
        layers = np.where(stated.last & np.equal(stage, s.pp - 1), s.last_layers, layers)
        return np.where(stated.first & np.equal(stage, 0), s.first_layers, layers)


def spread_chunks(layers: Any, s: Strategy) -> LayerSpread:
    """Spread the layers of a model over the chunks of stages.

    Parameters
    ----------
    layers : int or array
        All layers [-].
    s : Strategy
        One or many.

    Returns
    -------
    spread : LayerSpread
        Layers of chunks [-].

    Notes
    -----
    Chunks of stages whose layers are not stated are even. Where these layers do not divide, the
    earliest chunks of a forward pass have one more. Stages whose layers are stated differ from them
    in one chunk: the first stage in its first chunk, the last stage in its last one, as Megatron-LM
    leaves out a layer there (``--account-for-embedding-in-pipeline-split`` and
    ``--account-for-loss-in-pipeline-split`` [1]_). Where all layers are stated, chunks are as even
    as those of a model whose layers do not divide, rounded up. In a V both chunks of a first stage
    whose layers are stated have half of them.

    References
    ----------
    .. [1] NVIDIA, Megatron-LM, ``megatron/core/transformer/transformer_block.py``,
       ``get_num_layers_to_build``

    Examples
    --------
    Eight chunks of each of sixteen stages, 126 layers, one less in the first and in the last stage:

    >>> s = Strategy(pp=16, schedule="interleaved", chunks=8, first_layers=7, last_layers=7)
    >>> spread = spread_chunks(126, s)
    >>> [int(spread.count_layers(s, stage, chunk)) for stage, chunk in ((0, 0), (0, 1), (15, 6), (15, 7))]
    [0, 1, 1, 0]
    """
    other_stages = find_stated_ends(s).other_stages
    rest = layers - s.first_layers - s.last_layers
    even, longer = np.divmod(rest, np.maximum(other_stages * s.chunks, 1))
    of_ends = np.where(other_stages > 0, even, np.ceil(layers / (s.pp * s.chunks)))
    first = s.first_layers - (s.chunks - 1) * of_ends
    is_v_shaped = _is_one_of(s.schedule, V_SHAPED)
    if np.any(is_v_shaped):
        first = np.where(is_v_shaped, np.ceil(s.first_layers / 2.0), first)
    return LayerSpread(
        even=even,
        longer=longer,
        of_ends=of_ends,
        first=first,
        last=s.last_layers - (s.chunks - 1) * of_ends,
    )


def spread_layers(layers: Any, s: Strategy) -> tuple[Any, Any, Any]:
    """Spread the layers of a model over stages.

    Parameters
    ----------
    layers : int or array
        All layers [-].
    s : Strategy
        One or many.

    Returns
    -------
    first, inner, last : array
        Layers of the first stage, of the largest one between, and of the last [-]. With two stages
        or one, `inner` is the larger of both. Where layers do not divide, the first stages have one
        more than the last ones.

    Examples
    --------
    Sixteen stages of 126 layers, one less in the first and in the last:

    >>> [int(count) for count in spread_layers(126, Strategy(pp=16, first_layers=7, last_layers=7))]
    [7, 8, 7]
    """
    spread = spread_chunks(layers, s)
    first = spread.add_up(s, 0)
    second = spread.add_up(s, 1)
    last = spread.add_up(s, s.pp - 1)
    return first, np.where(s.pp > 2, second, np.maximum(first, last)), last
