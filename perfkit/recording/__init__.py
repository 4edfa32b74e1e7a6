"""Graphs of any PyTorch training step, recorded without running it."""

from importlib.metadata import version
from importlib.util import find_spec


def check_torch() -> None:
    """Raise an ImportError if PyTorch is missing, or older than all that perfkit was tried with; it is not loaded."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("torch is not installed; run pip install torch", name="torch")
    if tuple(map(int, (found := version("torch")).split(".")[:2])) < (2, 9):
        raise ImportError(f"torch is {found}; measuring and capture need 2.9 or newer; run pip install -U torch")
