"""Graphs of any PyTorch training step, recorded without running it."""

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
