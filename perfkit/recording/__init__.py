"""Graphs of any PyTorch training step, recorded without running it.

The step runs on tensors without contents, while a recorder appends each operation that PyTorch
dispatches to the columns of a `perfkit.workloads.graph.Graph`.

Reading order: `steps` (`capture`, the table of contents), `sandbox` (where the step runs) and
`patches` (what it changes in PyTorch, each with its reason and versions), `recorder` (operations to
columns; the table of PyTorch's operations is `perfkit.workloads.vocabulary`), `values` and `places`
(what is known of tensors), `precision` (autocast and kernels of a GPU), `gpu_answers` (what
programs ask of one), `exchanges` (collectives), `refusals`, `scripts` (whole loops as they are
written) with `scripts_answers`; then `modules`, `nets` and `convolutions` (the workloads as steps of PyTorch).
"""

from importlib.metadata import version
from importlib.util import find_spec


def check_torch() -> str:
    """Version of PyTorch, which is not loaded; an ImportError if it is missing or older than all
    that were tried."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("torch is not installed; run pip install torch", name="torch")
    found = version("torch")
    if tuple(map(int, found.split(".")[:2])) < (2, 9):
        raise ImportError(
            f"torch is {found}; measuring and capture need 2.9 or newer; run pip install -U torch"
        )
    return found
