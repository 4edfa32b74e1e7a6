"""Pipelines whose stages hold two chunks of layers in a V: the order of passes of each stage.

Of p stages, stage s holds chunk s of the way through the model and chunk 2 p - 1 - s, so that the
first stage has both ends of the model, and the last one hands micro-batches to itself."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

#: The two chunks of a stage: on the way from the first stage to the last one, and on the way back.
DOWN, UP = 0, 1


class Step(NamedTuple):
    """A pass of a micro-batch through a chunk of layers.

    Parameters
    ----------
    phase : str
        ``forward``, ``backward``, or ``weights``: gradients of weights that a backward pass has put
        off.
    micro, chunk : int
        Which micro-batch, and which chunk of the stage, from 0 [-].
    whole : bool
        Whether a backward pass has its gradients of weights with it, although the schedule puts off
        those of others.
    in_pair : bool
        Whether a forward pass makes a pair with the backward pass that follows: both begin when the
        messages of both have arrived, and send when both have ended.
    """

    phase: str
    micro: int
    chunk: int
    whole: bool = False
    in_pair: bool = False

    @property
    def key(self) -> "Step":
        """The same pass, whether it has its gradients of weights with it or not, alone or in a
        pair."""
        return self._replace(whole=False, in_pair=False)


class Place(NamedTuple):
    """A chunk of layers.

    Parameters
    ----------
    stage, chunk : int
        Its stage, and its number among the chunks of this stage, from 0 [-].
    """

    stage: int
    chunk: int


def find_position(stage: Any, chunk: Any, stages: Any, *, is_v_shaped: Any) -> np.ndarray:
    """Find where a chunk of a stage is on the way of a forward pass.

    Parameters
    ----------
    stage, chunk : int or array
        The stage, and its chunk, from 0 [-].
    stages : int or array
        Stages [-].
    is_v_shaped : bool or array of bool
        Whether stages have two chunks in a V; else a micro-batch passes all stages once for each
        chunk.

    Returns
    -------
    position : array
        Its number among all chunks, from 0 [-].

    Examples
    --------
    >>> [int(find_position(0, 1, 4, is_v_shaped=is_v)) for is_v in (False, True)]
    [4, 7]
    """
    comes_back = is_v_shaped & np.equal(chunk, UP)
    return np.asarray(np.where(comes_back, 2 * stages - 1 - stage, chunk * stages + stage))


def find_place(position: int, stages: int, *, is_v_shaped: bool) -> Place:
    """Find the stage and the chunk at a position on the way of a forward pass.

    Parameters
    ----------
    position : int
        Number among all chunks, from 0 [-].
    stages : int
        Stages [-].
    is_v_shaped : bool
        Whether stages have two chunks in a V.

    Returns
    -------
    place : Place
        The stage and its chunk.

    Examples
    --------
    >>> find_place(7, 4, is_v_shaped=True)
    Place(stage=0, chunk=1)
    """
    chunk, stage = divmod(position, stages)
    if is_v_shaped and chunk == UP:
        stage = stages - 1 - stage
    return Place(stage, chunk)


class _Order:
    """Steps of a stage so far. Micro-batches pass each chunk in their order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        #: Chunk and micro-batch of gradients of weights that are put off, in the order of their
        #: backward passes.
        self.put_off: list[tuple[int, int]] = []

    def forward(self, chunk: int) -> None:
        """The next forward pass through a chunk."""
        self.steps.append(Step("forward", self.forwards[chunk], chunk))
        self.forwards[chunk] += 1

    def backward(self, chunk: int) -> None:
        """The next backward pass through a chunk, whose gradients of weights are put off."""
        micro = self.backwards[chunk]
        self.steps.append(Step("backward", micro, chunk))
        self.put_off.append((chunk, micro))
        self.backwards[chunk] += 1

    def whole_backward(self, chunk: int) -> None:
        """The next backward pass through a chunk, with its gradients of weights."""
        self.steps.append(Step("backward", self.backwards[chunk], chunk, whole=True))
        self.backwards[chunk] += 1

    def weights(self) -> None:
        """The gradients of weights that were put off first of all, if any were."""
        if self.put_off:
            chunk, micro = self.put_off.pop(0)
            self.steps.append(Step("weights", micro, chunk))

    def weights_of(self, chunk: int) -> None:
        """The gradients of weights of a chunk that were put off first."""
        of_chunk = [micro for other, micro in self.put_off if other == chunk]
        self.put_off.remove((chunk, of_chunk[0]))
        self.steps.append(Step("weights", of_chunk[0], chunk))

    def pair(self, forward: int, backward: int) -> None:
        """The next forward pass through one chunk with the next whole backward pass through the
        other one."""
        self.steps.append(Step("forward", self.forwards[forward], forward, in_pair=True))
        self.forwards[forward] += 1
        self.whole_backward(backward)

    def backward_and_weights(self, chunk: int) -> None:
        """The next backward pass through a chunk, and its gradients of weights behind it, which no
        other stage waits for."""
        self.backward(chunk)
        self.weights_of(chunk)


def list_zb_v_steps(stage: int, stages: int, micro_batches: int) -> list[Step]:
    """List the steps of a stage of ZB-V.

    Parameters
    ----------
    stage, stages : int
        Number of the stage, from 0, and how many there are [-].
    micro_batches : int
        Micro-batches of an iteration [-].

    Returns
    -------
    steps : list of Step
        In their order.

    Notes
    -----
    Each stage fills the time until its first micro-batch returns with forward passes, so that 2 p
    passes through a chunk are held at once on every stage. Then forward pass, backward pass and
    gradients of weights take turns, of the one chunk and of the other. At the end gradients of weights
    are put off until backward passes have ended that other stages wait for [1]_. With fewer than 2 p -
    1 micro-batches the passes of those that are missing are left out, as PyTorch does.

    References
    ----------
    .. [1] P. Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241, section 6

    Examples
    --------
    >>> "".join(step.phase[0] + str(step.chunk) for step in list_zb_v_steps(1, 2, 3))
    'f0f1f0f1b1w1f0b0w0f1b1w1b0b1b0w0w1w0'
    """
    behind = stages - stage
    order = _Order()
    for _ in range(2 * behind - 1):
        order.forward(DOWN)
    for _ in range(stage):
        order.forward(UP)
        order.forward(DOWN)
    for _ in range(behind):
        order.forward(UP)
        order.backward_and_weights(UP)
    passing = max(micro_batches, 2 * stages - 1)
    while order.forwards[UP] < passing:
        if order.forwards[DOWN] < passing:
            order.forward(DOWN)
        order.backward_and_weights(DOWN)
        order.forward(UP)
        order.backward_and_weights(UP)
    for _ in range(stage):
        order.backward(DOWN)
        order.backward(UP)
    for _ in range(behind):
        order.backward(DOWN)
        order.weights_of(DOWN)
    for chunk in (UP, DOWN):
        while any(other == chunk for other, _ in order.put_off):
            order.weights_of(chunk)
    return [step for step in order.steps if step.micro < micro_batches]


def list_dualpipe_v_steps(stage: int, stages: int, micro_batches: int) -> list[Step]:
    """List the steps of a stage of DualPipeV, which is DualPipe cut in half.

    Parameters
    ----------
    stage, stages : int
        Number of the stage, from 0, and how many there are [-].
    micro_batches : int
        Micro-batches of an iteration, at least twice the stages [-].

    Returns
    -------
    steps : list of Step
        In their order.

    Notes
    -----
    DualPipe lets micro-batches enter at both ends of 2 p stages, which hold two copies of the weights
    [1]_. Both halves do the same, and one of them alone, whose micro-batches turn round at its end,
    is DualPipeV [2]_. In the middle each forward pass through one chunk makes a pair with a whole
    backward pass through the other one. Gradients of weights are put off at the begin, before the middle, and
    in the second half of the end.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3 technical report", arXiv:2412.19437, section 3.2.1
    .. [2] DeepSeek-AI, DualPipe, https://github.com/deepseek-ai/DualPipe, schedule of DualPipeV

    Examples
    --------
    >>> "".join(step.phase[0] + str(step.chunk) for step in list_dualpipe_v_steps(1, 2, 4))
    'f0f1f0f1f0b1f1b0f0b1f1b0b1b0b1b0w1w0'
    """
    behind = stages - stage - 1
    order = _Order()
    for _ in range(2 * behind):
        order.forward(DOWN)
    for _ in range(stage + 1):
        order.forward(DOWN)
        order.forward(UP)
    for _ in range(behind):
        order.backward(UP)
        order.weights()
        order.forward(UP)
    for number in range(micro_batches - 2 * stages + stage + 1):
        if number == 0 and behind == 0:
            # apart, the first stage to turn micro-batches round goes on earlier
            order.forward(DOWN)
            order.whole_backward(UP)
        else:
            order.pair(DOWN, UP)
        order.pair(UP, DOWN)
    for _ in range(behind):
        order.whole_backward(UP)
        order.pair(UP, DOWN)
    # of the 2 (s + 1) backward passes that follow, the first s + 1 are whole
    for number in range(2 * (stage + 1)):
        chunk = UP if number % 2 == 0 else DOWN
        if number < stage + 1:
            order.whole_backward(chunk)
        else:
            order.backward(chunk)
    for _ in range(behind):
        order.weights()
        order.backward(DOWN)
    while order.put_off:
        order.weights()
    return order.steps


#: Orders of the steps of stages with two chunks in a V, by the names of schedules.
V_ORDERS: Mapping[str, Callable[[int, int, int], list[Step]]] = MappingProxyType(
    {"zb_v": list_zb_v_steps, "dualpipe_v": list_dualpipe_v_steps}
)
