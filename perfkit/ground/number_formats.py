"""Names of number formats: perfkit's own, and those of other programs."""

from collections.abc import Collection
from typing import Any

from perfkit.ground.units import check_choice

#: perfkit's name of a number format by that of other programs, in small letters.
_NAMES = {
    "float": "fp32",
    "float32": "fp32",
    "mpi_float": "fp32",
    "half": "fp16",
    "float16": "fp16",
    "double": "fp64",
    "float64": "fp64",
    "mpi_double": "fp64",
    "bfloat16": "bf16",
    "bfp16": "bf16",
    "char": "int8",
    "mpi_char": "int8",
    "mpi_int": "int32",
    "int": "int32",
    "f8e4m3": "fp8",
    "f8e5m2": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def spell_dtype(name: str) -> str:
    """Spell a number format in perfkit's words.

    Examples
    --------
    >>> spell_dtype("float32"), spell_dtype("BFP16"), spell_dtype("torch.bfloat16"), spell_dtype("int8")
    ('fp32', 'bf16', 'bf16', 'int8')
    """
    small = name.strip().lower().removeprefix("torch.")
    return _NAMES.get(small, small)


def read_dtype(name: str, value: Any, allowed: Collection[str]) -> str:
    """Read a number format, by perfkit's name, PyTorch's name or PyTorch's dtype.

    Parameters
    ----------
    name : str
        Name of the argument, for the message.
    value : str or torch.dtype
        What was given.
    allowed : collection of str
        Formats that may be given, by perfkit's names.

    Returns
    -------
    format : str
        perfkit's name.

    Raises
    ------
    ValueError
        For what is none of the allowed ones.

    Examples
    --------
    >>> read_dtype("dtype", "bfloat16", ["bf16", "fp32"])
    'bf16'
    >>> read_dtype("dtype", "fp31", ["bf16", "fp32"])
    Traceback (most recent call last):
    ...
    ValueError: dtype is 'fp31'; known are bf16, fp32; did you mean 'fp32'?
    """
    is_of_torch = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    if is_of_torch or isinstance(value, str):
        spelled = spell_dtype(str(value))
        if spelled in allowed:
            return spelled
    return check_choice(name, value, allowed)
