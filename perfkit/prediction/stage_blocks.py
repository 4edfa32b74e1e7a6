"""What one micro-batch of a strategy runs on a rank: blocks of operations for each region and pass,
whose layers are of one kind."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from perfkit.models.checkpoints import recomputes
from perfkit.models.experts import DISPATCH
from perfkit.platform.platform import Platform
from perfkit.prediction.messages import MessageTimes
from perfkit.prediction.micro_batches import MicroBatch, size_micro_batch
from perfkit.prediction.stage_operations import Block, OperationTable
from perfkit.prediction.strategy_records import REGIONS
from perfkit.prediction.tiles import Piece, send_in_tiles
from perfkit.workloads.fp8 import find_layout
from perfkit.workloads.layers import count_unneeded
from perfkit.workloads.operations import CAST_ONCE
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Passes: forward, backward, and the gradients of weights that a schedule puts off.
_PHASES = ("forward", "backward", "weights")


class Communicator(IntEnum):
    """Communicators of a rank: those that share layers, sequences, experts, and products of an expert
    (`perfkit.workloads.rank_share.SHARING_EXPERT`); replicas, groups of replicas (hybrid sharding), and
    replicas of experts; and those that share experts once more, for messages beside passes. Those of
    neighbouring stages follow, two for each pair."""

    TENSOR = 0
    CONTEXT = 1
    EXPERTS = 2
    EXPERT = 3
    REPLICAS = 4
    ACROSS = 5
    ROUTED = 6
    BESIDE = 7


#: What the ranks of each communicator share, as charts name it.
GROUP_NAMES: dict[int, str] = {
    Communicator.TENSOR: "tensor-parallel",
    Communicator.CONTEXT: "context-parallel",
    Communicator.EXPERTS: "expert-parallel",
    Communicator.EXPERT: "tensor-parallel in experts",
    Communicator.REPLICAS: "data-parallel",
    Communicator.ACROSS: "data-parallel across groups",
    Communicator.ROUTED: "data-parallel of experts",
    Communicator.BESIDE: "expert-parallel beside passes",
}


class _AttentionRun(NamedTuple):
    """Kernels of attention that follow one another in a pass.

    Parameters
    ----------
    first, last : int
        Positions of the first and of the last one in the pass [-].
    computes_gradients : bool
        Whether they are those of the backward pass, and not computed again.
    """

    first: int
    last: int
    computes_gradients: bool


class KindOfPass:
    """What passes of a micro-batch run in each region of a model whose layers are of one kind.

    Parameters
    ----------
    model : Transformer
        The model as if all of its layers were of this kind.
    platform : Platform
        Where it runs.
    s : Strategy
        A single one.
    table : OperationTable
        Operations of the recorded micro-batches of all kinds; further ones are added.
    number : int
        Which of these micro-batches is that of this kind [-].
    micro_batch : MicroBatch
        What was recorded of it.

    Attributes
    ----------
    sizes : Sizes
        Sizes of a micro-batch and its messages.
    weights, trained, sent : dict of str to float
        Numbers of the weights of each region on a rank, those of them that are trained, and those that
        a gather of all of them sends [-].
    all_trained : float
        Trained numbers of all regions [-].
    passes : dict of (str, str, bool) to Block
        Blocks by region, phase, and whether they are those of the first micro-batch.
    beside : dict of (str, bool) to Block
        Layers whose tokens go to experts beside another pass, by phase and whether they are those of
        the first micro-batch.
    """

    def __init__(
        self,
        model: Transformer,
        platform: Platform,
        s: Strategy,
        table: OperationTable,
        number: int,
        micro_batch: MicroBatch,
    ) -> None:
        self.model = model
        self.s = s
        self.table = table
        self.number = number
        self.puts_off_weights = bool(s.puts_off_weights)
        self.sizes = size_micro_batch(model, s)
        #: How tokens go to experts, and the size of a message of them [B].
        self.dispatch = "all_to_all"
        self.dispatched = float(self.sizes.routed)
        if s.dispatch == "once" and model.experts:
            self.dispatch = DISPATCH
            sent = MessageTimes(platform).size_dispatched(
                np.array([self.sizes.tokens * self.sizes.load]),
                s.ep,
                s.apart_for_experts,
                model,
            )
            self.dispatched = float(sent[0])
        self.weights = {}
        self.trained = {}
        self.sent = {}
        for position, region in enumerate(REGIONS):
            self.weights[region] = float(micro_batch.weights[position][-1])
            self.trained[region] = float(micro_batch.trained[position][-1])
            self.sent[region] = float(micro_batch.sent[position][-1])
        self.all_trained = sum(self.trained.values())
        self.scattered = bool(s.scattered)
        self.micro_batches = int(self.sizes.micro)
        self.owners = int(s.owners)
        #: Calls without a kernel behind the last kernel of a backward pass, for the weights of a region
        #: whose gradients are not added up there [-].
        self.calls_left: dict[tuple[str, bool], float] = {}
        self.passes: dict[tuple[str, str, bool], Block] = {}
        for region in REGIONS:
            for phase in _PHASES:
                for first in (False, True):
                    block = self.make_pass(region, phase, first=first)
                    self.passes[region, phase, first] = block
        #: The end of the forward pass of a layer, which runs again where another layer of its group
        #: follows.
        self.end_again = self.make_end_again()
        self.beside: dict[tuple[str, bool], Block] = {}
        if s.overlap_experts:
            for phase in ("forward", "backward"):
                for first in (False, True):
                    self.beside[phase, first] = self.make_beside(phase, first=first)

    def find(self, region: str, phase: str) -> list[int]:
        """Rows of a region in a phase, as they were recorded."""
        return self.table.find(region, phase, self.number)

    def make_pass(self, region: str, phase: str, *, first: bool) -> Block:
        """The block of a region in a pass, of the first micro-batch or of a later one."""
        if phase == "forward":
            rows = self.list_forward_rows(region, first=first)
        else:
            rows = self.list_backward_rows(region, phase, first=first)
        if region == "layers" and phase != "weights":
            return self.add_exchanges(rows, phase, self.list_expert_messages(phase))
        return self.table.make_block(rows)

    def list_forward_rows(self, region: str, *, first: bool) -> list[int]:
        """Rows of a forward pass; weights in fp8 that are kept are cast in the first one alone."""
        rows = self.find(region, "forward")
        if first:
            return rows
        return [row for row in rows if self.table.labels[row].name != CAST_ONCE]

    def make_end_again(self) -> Block:
        """The block of operations that a layer which is computed again leaves out."""
        rows = self.find("layers", "forward")
        left_out = count_unneeded([self.table.labels[row].name for row in rows])
        end = rows[len(rows) - left_out :]
        return self.table.make_block([self.table.copy(row, "backward") for row in end])

    def make_beside(self, phase: str, *, first: bool) -> Block:
        """The block of a layer in a pass whose tokens go to experts beside another pass."""
        rows = self.list_forward_rows("layers", first=first)
        if phase == "backward":
            rows = self.list_backward_rows("layers", "backward", first=first)
        return self.add_exchanges(rows, phase, [])

    def list_backward_rows(self, region: str, phase: str, *, first: bool) -> list[int]:
        """Rows of a backward pass, or of the gradients of weights that it puts off."""
        table, s = self.table, self.s
        # gradients of a single micro-batch are added to nothing; those of the first of several
        # too, but to the zeros of buffers where ranks share layers or sequences; those of
        # Megatron-LM hold that of a single micro-batch, too
        without_sums = first and not s.buffers and (self.micro_batches == 1 or bool(s.alone))
        # shards are added up behind the reduction of their unit, see `UnitRows`
        without_sums = without_sums or bool(s.shards_units and s.scattered)
        rows = []
        calls_of_sums = 0.0
        for row in self.find(region, "backward"):
            if self.is_put_off(region, row) != (phase == "weights"):
                continue
            if table.labels[row].name != "add_":
                # the host still makes the calls without a kernel of sums that are left out
                rows.append(table.call_before(row, calls_of_sums) if calls_of_sums else row)
                calls_of_sums = 0.0
                continue
            sum_of_gradients = row
            if self.scattered:
                sum_of_gradients = table.copy(row, "backward", 1.0 / self.owners)
            if without_sums:
                calls_of_sums += table.host_calls[sum_of_gradients].bare
            else:
                rows.append(sum_of_gradients)
        if phase == "backward":
            self.calls_left[region, first] = calls_of_sums
        return rows

    def list_sums(self, region: str) -> list[int]:
        """Rows of a region that add gradients to those of earlier micro-batches, one for each
        weight."""
        rows = self.find(region, "backward")
        return [row for row in rows if self.table.labels[row].name == "add_"]

    def list_casts(self, region: str) -> list[int]:
        """Rows that copy the weights of a region in another format, one for each weight; none where
        all is in one format."""
        casts = self.find("exchange.narrow", "update")
        before = 0
        for earlier in REGIONS[: REGIONS.index(region)]:
            before += len(self.list_sums(earlier))
        return casts[before : before + len(self.list_sums(region))]

    def is_put_off(self, region: str, row: int) -> bool:
        """Whether an operation of a backward pass is run later, with the gradients of weights."""
        if region != "layers" or not self.puts_off_weights:
            return False
        label = self.table.labels[row]
        return label.kind == "gemm" and find_layout(label.variant) == "tn"

    def add_exchanges(self, rows: list[int], phase: str, before: list[int]) -> Block:
        """A layer with some messages before it, those of ranks that share experts, and those of ranks
        that share sequences around attention."""
        if phase == "backward" and self.s.checkpoint == "selective":
            rows = self.list_attention_again(phase) + rows
        ordered = [*before]
        waits: dict[int, int] = {}
        begin = 0
        for run in self.find_attention_runs(rows, phase):
            ordered += rows[begin : run.first]
            kernels = rows[run.first : run.last + 1]
            if self.s.cp_kind == "ulysses":
                messages = self.list_swaps(phase)
                ordered += messages + kernels + messages[:1]
            elif self.s.cp_kind == "all_gather":
                ordered += self.list_gathers(phase) + kernels
                if run.computes_gradients:
                    ordered += self.list_reductions(phase)
            else:
                messages = self.list_ring_messages(phase, gradients=run.computes_gradients)
                kernels_of_part = len(kernels)
                kernels = self.share_on_ring(kernels, phase)
                # each message on the ring runs beside the kernels of a part of the keys
                first_kernel = len(ordered) + len(messages)
                for number in range(len(messages)):
                    kernels_before = min(kernels_of_part * (number + 1), len(kernels))
                    waits[len(ordered) + number] = first_kernel + kernels_before
                ordered += messages + kernels
            begin = run.last + 1
        ordered += rows[begin:]
        if self.s.tiled and self.s.tp > 1:
            return self.send_in_tiles(ordered, waits)
        return self.table.make_block(ordered, waits)

    def send_in_tiles(self, rows: list[int], waits: dict[int, int]) -> Block:
        """A pass through a layer whose messages among ranks that share it are sent in tiles, as many
        as there are ranks."""
        tile = 1.0 / self.s.tp
        tiled = send_in_tiles([self.table.labels[row] for row in rows], waits)
        placed_rows = []
        for placed in tiled.operations:
            row = rows[placed.position]
            if placed.piece is Piece.TILE:
                row = self.table.take_part(row, tile, is_first=placed.is_first)
            elif placed.piece is Piece.OTHERS:
                row = self.table.take_part(row, 1.0 - tile, is_first=placed.is_first)
            placed_rows.append(row)
        return self.table.make_block(placed_rows, tiled.waits)

    def list_attention_again(self, phase: str) -> list[int]:
        """Attention between its projections, computed again in the backward pass."""
        forward = self.find("layers", "forward")
        positions = self.table.find_attention(forward)
        again = forward[positions[0] : positions[-1] + 1]
        return [self.table.copy(row, phase) for row in again]

    def find_attention_runs(self, rows: list[int], phase: str) -> list[_AttentionRun]:
        """Kernels of attention in a pass: those that are computed again, and those of the pass."""
        positions = self.table.find_attention(rows)
        again = 0
        if phase == "backward" and recomputes(self.s.checkpoint, "attention"):
            again = len(self.table.find_attention(self.find("layers", "forward")))
        runs = []
        if positions[:again]:
            runs.append(_AttentionRun(positions[0], positions[again - 1], False))
        if positions[again:]:
            runs.append(_AttentionRun(positions[again], positions[-1], phase == "backward"))
        return runs

    def share_on_ring(self, kernels: list[int], phase: str) -> list[int]:
        """Kernels of attention of ranks that share sequences: a single one runs once for each part
        of the keys."""
        if self.s.cp == 1 or len(kernels) > 1:
            return kernels
        part = self.table.copy(kernels[0], phase, 1.0 / self.s.cp)
        return [part for _ in range(self.s.cp)]

    def list_expert_messages(self, phase: str) -> list[int]:
        """Messages of tokens to their experts and back, once more where these are computed
        again."""
        if not self.model.experts or self.s.ep == 1:
            return []
        message = self.send_tokens(phase, Communicator.EXPERTS)
        if phase == "backward" and recomputes(self.s.checkpoint, "experts"):
            return [message, message, message, message]
        return [message, message]

    def send_tokens(self, phase: str, group: int) -> int:
        """Row of a message of tokens to their experts or back."""
        return self.table.send(self.dispatch, phase, "layers.0.mlp", self.dispatched, group)

    def list_swaps(self, phase: str) -> list[int]:
        """Messages before attention that exchange tokens for heads: queries, keys and values."""
        if self.s.cp == 1:
            return []
        message = self.table.send(
            "all_to_all", phase, "layers.0.attention", self.sizes.swapped, Communicator.CONTEXT
        )
        return [message, message, message]

    def list_gathers(self, phase: str) -> list[int]:
        """Messages before attention that gather keys and values of the whole sequence."""
        if self.s.cp == 1:
            return []
        message = self.send_whole_keys("all_gather", phase)
        return [message, message]

    def list_reductions(self, phase: str) -> list[int]:
        """Messages behind attention that add up the gradients of all keys and values, and leave each
        rank those of its tokens."""
        if self.s.cp == 1:
            return []
        message = self.send_whole_keys("reduce_scatter", phase)
        return [message, message]

    def send_whole_keys(self, operation: str, phase: str) -> int:
        """Row of a message of the keys of a whole sequence."""
        nbytes = self.s.cp * self.sizes.keys
        return self.table.send(operation, phase, "layers.0.attention", nbytes, Communicator.CONTEXT)

    def list_ring_messages(self, phase: str, *, gradients: bool) -> list[int]:
        """Messages of keys and values on a ring, with their gradients."""
        tensors = 4.0 if gradients else 2.0
        if self.s.cp == 1:
            return []
        message = self.table.send(
            "send_recv",
            phase,
            "layers.0.attention",
            tensors * self.sizes.keys,
            Communicator.CONTEXT,
        )
        return [message for _ in range(self.s.cp - 1)]
