"""The program of one rank of a pipeline: blocks of operations, and what waits for which collective."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from perfkit.models.v_schedules import Step
from perfkit.prediction.stage_operations import Block
from perfkit.workloads.columns import Wait, Waits

_NOTHING = np.zeros(0, dtype=int)


class Unit(NamedTuple):
    """What replicas gather and reduce together.

    Parameters
    ----------
    region : str
        ``embeddings``, ``layers`` or ``head``; or ``ends``, embeddings and head together.
    layer : int
        Which layer of the model, from 0; 0 for the other regions [-].
    """

    region: str
    layer: int


#: All weights of a model outside of its layers.
BOTH_ENDS = Unit("ends", 0)


class Program:
    """The operations of one rank, block after block. Collectives are known by their numbers, in the
    order in which they were launched."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        #: The layer of each block.
        self.layers: list[int] = []
        #: Waits that are not those of a block.
        self.waits: list[Wait] = []
        #: Operations and collectives up to here [-].
        self.length = 0
        self.sent = 0
        #: Collectives that a pass, a unit and the update wait for.
        self.before_pass: dict[Step, list[int]] = {}
        self.before_unit: dict[Unit, list[int]] = {}
        self.before_update: list[int] = []
        #: Reductions that end before the gradients of the next unit are packed.
        self.before_packing: list[int] = []
        #: Copies of activations of a layer to the host and back, by layer.
        self.leaving: dict[int, list[int]] = {}
        self.returning: dict[int, list[int]] = {}
        #: Units whose gradients are complete on this rank and not yet reduced.
        self.complete: list[Unit] = []

    def run(self, block: Block, layer: int = 0) -> None:
        """Append a block."""
        self.blocks.append(block)
        self.layers.append(layer)
        self.length += len(block.rows)
        self.sent += block.sent

    def send(self, row: int, layer: int = 0) -> int:
        """Launch a collective and return its number."""
        self.run(Block(np.array([row]), _NOTHING, _NOTHING, 1), layer)
        return self.sent - 1

    def wait(self, collectives: Sequence[int]) -> None:
        """Go on only when these collectives have ended."""
        self.waits += [Wait(self.length, number) for number in collectives]

    def list_rows(self) -> np.ndarray:
        """Rows of all operations in their table [-]."""
        return np.concatenate([block.rows for block in self.blocks])

    def list_layers(self) -> np.ndarray:
        """The layer of each operation [-]."""
        return np.repeat(self.layers, [len(block.rows) for block in self.blocks])

    def list_waits(self) -> Waits:
        """All waits, those of blocks first."""
        lengths = [len(block.rows) for block in self.blocks]
        collectives = [block.sent for block in self.blocks]
        waits = [len(block.waiting) for block in self.blocks]
        operations_before = np.cumsum(lengths) - lengths
        collectives_before = np.cumsum(collectives) - collectives
        waiting = np.concatenate([block.waiting for block in self.blocks])
        waiting = waiting + np.repeat(operations_before, waits)
        awaited = np.concatenate([block.awaited for block in self.blocks])
        awaited = awaited + np.repeat(collectives_before, waits)
        others = Waits.from_rows(self.waits)
        operation = np.concatenate([waiting, others.operation])
        collective = np.concatenate([awaited, others.collective])
        return Waits(operation, collective, np.zeros(len(operation), dtype=bool))
