"""Names in traces of PyTorch's profiler: perfkit's own, and those that versions of PyTorch write.

perfkit has one name for each field and category, that of PyTorch 2; `read_kineto` gives every trace
these names, so nothing else has to know of others. Where PyTorch renames a field or a category, one
line here is the whole change.
"""

from collections.abc import Mapping

#: perfkit's own name of a field of an event, or of its arguments, by the name that another version
#: writes. Source: pytorch/kineto, tb_plugin/torch_tb_profiler/profiler/trace.py, which takes both.
RENAMED_FIELDS = {
    "external id": "External id",
    "Input dims": "Input Dims",
}
#: perfkit's own name of a category by that of another version, in lower case: capital letters do
#: not matter. Source: the same file.
RENAMED_CATEGORIES = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
}
#: Categories of work on a device.
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
#: Categories of other events about the streams of a device.
STREAMS = ("gpu_user_annotation", "cuda_sync", "overhead")
#: Category of an event that spans everything.
WHOLE = "trace"
#: Categories of other events that PyTorch's profiler writes.
_HOST = (
    "cpu_op",
    "cpu_instant_event",
    "user_annotation",
    "python_function",
    "external_correlation",
    WHOLE,
    "ac2g",
    "fwdbwd",
    "async_cpu_to_gpu",
    "collective_comm",
)
#: How categories of calls of a driver end, such as ``cuda_runtime`` and ``hip_driver``.
_CALLS = ("_runtime", "_driver")


def find_renamed_fields(data: bytes | bytearray) -> dict[str, str]:
    """Own names of the fields that a trace names otherwise, see `RENAMED_FIELDS`.

    Examples
    --------
    >>> find_renamed_fields(b'{"args": {"external id": 7}}')
    {'external id': 'External id'}
    """
    return {other: own for other, own in RENAMED_FIELDS.items() if f'"{other}"'.encode() in data}


def rename_fields(fields: dict[str, object], renamed: Mapping[str, str]) -> None:
    """Give fields of an object perfkit's names; a field that has both names keeps perfkit's."""
    for other, own in renamed.items():
        if other in fields:
            fields.setdefault(own, fields.pop(other))


def name_category(written: str) -> str:
    """Own name of a category.

    Examples
    --------
    >>> name_category("Memcpy"), name_category("Kernel"), name_category("cpu_op")
    ('gpu_memcpy', 'kernel', 'cpu_op')
    """
    lower = written.lower()
    return RENAMED_CATEGORIES.get(lower, lower)


def is_of_profiler(category: str) -> bool:
    """Whether PyTorch's profiler writes events of this category, in perfkit's name."""
    return category in (*DEVICE, *STREAMS, *_HOST) or category.endswith(_CALLS)
