"""Sizes of recurrent layers as cuDNN's call describes them, and the algorithm that PyTorch takes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from perfkit.workloads.columns import OperationSizes

#: PyTorch's names of the kinds of layers, in the order of cuDNN's numbers.
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
#: Gates of a step, by kind.
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
#: Largest width of states for which PyTorch takes cuDNN's kernel for narrow layers: that of layers with
#: gates and without, forward and backward; aten/src/ATen/native/cudnn/RNN.cpp,
#: use_rnn_persist_small_h.
NARROW = {
    ("gated", "forward"): 192,
    ("gated", "backward"): 128,
    ("plain", "forward"): 384,
    ("plain", "backward"): 256,
}
#: Numbers of a layer's recurrent weights that the registers of a multiprocessor hold: 256 kB of four
#: bytes (NVIDIA, CUDA C++ Programming Guide, technical specifications by compute capability).
IN_REGISTERS = 65_536


class RecurrentShape(NamedTuple):
    """Sizes of a stack of recurrent layers.

    Parameters
    ----------
    mode : str
        One of `MODES`.
    steps : int
        Steps of the longest sequence [-].
    tokens : int
        Steps of all samples together [-].
    inputs, hidden, outputs : int
        Numbers of an input, of a state, and of an output: of a projected state where there is one [-].
    layers, directions : int
        Layers, and directions of each [-].
    is_packed : bool
        Whether samples are packed, so that they may have unlike many steps.
    """

    mode: str
    steps: int
    tokens: int
    inputs: int
    hidden: int
    outputs: int
    layers: int
    directions: int
    is_packed: bool

    @property
    def gates(self) -> int:
        """Gates of a step [-]."""
        return _GATES[self.mode]

    def count_flops(self) -> float:
        """Arithmetic of the products of one pass [FLOP]."""
        of_token = 0.0
        for layer in range(self.layers):
            inputs = self.inputs if layer == 0 else self.outputs * self.directions
            of_token += self.gates * self.hidden * (inputs + self.outputs)
            if self.outputs != self.hidden:
                of_token += self.hidden * self.outputs
        return 2.0 * self.tokens * self.directions * of_token

    def count_kept(self) -> int:
        """Numbers that the backward pass needs besides weights, inputs and outputs [-]."""
        of_cell = {"lstm": 1, "gru": 1}.get(self.mode, 0)
        of_step = (self.gates + of_cell) * self.hidden * self.layers
        between = self.outputs * (self.layers - 1)
        return self.tokens * self.directions * (of_step + between)

    def name_algorithm(self, phase: str) -> str:
        """Kernel that PyTorch takes of cuDNN, as a variant of the class ``recurrent``.

        Parameters
        ----------
        phase : str
            ``forward`` or ``backward``.

        Returns
        -------
        variant : str
            Such as ``forward.narrow_gated``; that of kernels that keep their weights in registers is
            ``narrow``, of narrow layers that do not ``spilled``, all others are ``standard``.
        """
        cell = "gated" if self.gates > 1 else "plain"
        is_projected = self.outputs != self.hidden
        if is_projected or self.is_packed or self.hidden > NARROW[cell, phase]:
            return f"{phase}.standard"
        weights = self.gates * self.hidden * self.hidden
        kernel = "narrow" if weights <= IN_REGISTERS else "spilled"
        return f"{phase}.{kernel}_{cell}"


def read_recurrent(args: Sequence[Any], *, backward: bool) -> RecurrentShape:
    """Read the sizes of a call.

    Parameters
    ----------
    args : sequence
        Complete arguments of ``_cudnn_rnn`` or ``_cudnn_rnn_backward``.
    backward : bool
        Whether it is the latter, which has four more tensors before the settings.

    Returns
    -------
    shape : RecurrentShape
        Its sizes.
    """
    data = args[0]
    settings = args[10:] if backward else args[6:]
    mode, hidden, projected, layers, batch_first, _, _, bidirectional, samples = settings[:9]
    if samples:
        steps, tokens = len(samples), data.shape[0]
    else:
        steps = data.shape[1] if batch_first else data.shape[0]
        tokens = data.shape[0] * data.shape[1]
    return RecurrentShape(
        mode=MODES[mode],
        steps=steps,
        tokens=tokens,
        inputs=data.shape[-1],
        hidden=hidden,
        outputs=projected or hidden,
        layers=layers,
        directions=2 if bidirectional else 1,
        is_packed=bool(samples),
    )


def size_recurrent(args: Sequence[Any], *, backward: bool) -> OperationSizes:
    """Sizes of a call: the arithmetic of all layers, and the product that each step waits for.

    Parameters
    ----------
    args : sequence
        Complete arguments of ``_cudnn_rnn`` or ``_cudnn_rnn_backward``.
    backward : bool
        Whether it is the latter, which has two products for each of the forward pass.

    Returns
    -------
    sizes : OperationSizes
        ``rows`` are the steps of all layers and directions, which follow one another; ``m``, ``n`` and
        ``k`` the mean samples of a step, the numbers of all gates, and those of a state.
    """
    shape = read_recurrent(args, backward=backward)
    passes = 2.0 if backward else 1.0
    return OperationSizes(
        flops=passes * shape.count_flops(),
        m=shape.tokens / max(shape.steps, 1),
        n=shape.gates * shape.hidden,
        k=shape.outputs,
        elements=shape.tokens * shape.directions * shape.outputs,
        rows=shape.steps * shape.layers * shape.directions,
    )
