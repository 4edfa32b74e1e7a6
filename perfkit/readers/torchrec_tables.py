"""Tables of TorchRec, whatever told of them: their fields in perfkit's words, and what is said about
them.

`translate_fields` reads the fields of an ``EmbeddingBagConfig``, an ``EmbeddingConfig`` and of
``ParameterConstraints``, from objects, frames and files alike. `list_notes` says what is assumed or
left out.
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from perfkit.ground.units import check_choice, count_values, escape, is_listed, read_number, show
from perfkit.workloads.sizes import check_number
from perfkit.workloads.table_kernels import FUSED, TABLE_KERNELS
from perfkit.workloads.tables import OUTPUT_FORMATS, EmbeddingTable
from perfkit.workloads.torchrec_format import KERNELS

#: Formats of numbers by the names of torchrec.types.DataType and of torch.
_FORMATS = {
    "FP32": "fp32",
    "FP16": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "UINT8": "int8",
    "NFP8": "fp8",
    "FLOAT32": "fp32",
    "FLOAT": "fp32",
    "FLOAT16": "fp16",
    "HALF": "fp16",
    "BFLOAT16": "bf16",
    "FLOAT8_E4M3FN": "fp8",
}
#: Bytes of whole numbers, which no table that is trained has, by the same names [B].
_BYTES = {"INT64": 8, "INT32": 4}
#: Format of pooled rows where nobody says another one: that of FBGEMM's kernels, as in
#: torchrec/distributed/batched_embedding_kernel.py, ``fused_params.get("output_dtype", SparseType.FP32)``.
OUTPUT_DTYPE = "fp32"
#: Numbers that are parts of a byte, by the same names.
_PARTS_OF_BYTES = ("INT4", "INT2")
_POOLING_TYPES = ("SUM", "MEAN", "NONE")
#: Sizes of a table, whose columns `perfkit.read_tables` knows.
_SIZES = ("num_embeddings", "embedding_dim")
#: Fields whose values are read.
_READ = (
    *_SIZES,
    "data_type",
    "feature_names",
    "pooling_factor",
    "pooling_factors",
    "num_poolings",
    "is_weighted",
    "compute_kernel",
    "compute_kernels",
    "cache_params",
    "use_virtual_table",
    "output_dtype",
)
#: Fields of configurations that change no time and no memory of training, or that are not priced.
_UNUSED = (
    "weight_init_max",
    "weight_init_min",
    "num_embeddings_post_pruning",
    "init_fn",
    "need_pos",
    "input_dim",
    "total_num_buckets",
    "virtual_table_eviction_policy",
    "stash_weights",
    "enable_embedding_update",
    "has_feature_processor",
    "embedding_names",
)
#: Fields of constraints that say how a table may be placed, see `perfkit.read_parameter_constraints`.
PLACING = ("sharding_types", "min_partition")
#: Fields of constraints that are not priced.
_UNUSED_CONSTRAINTS = (
    "batch_sizes",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "device_group",
    "key_value_params",
)
#: All fields of TorchRec that are known, ``name`` and ``pooling`` apart, which are perfkit's, too.
TORCHREC_FIELDS = (*_READ, *_UNUSED, *PLACING, *_UNUSED_CONSTRAINTS)
#: Longest text of a list in a file that is read [-].
_LONGEST_LIST = 100_000


class TorchrecTable(NamedTuple):
    """A table of TorchRec, and what else is known of it.

    Parameters
    ----------
    table : EmbeddingTable
        The table, with the lookups of all its features together.
    has_lookups : bool
        Whether its lookups are known.
    kernel : str or None
        TorchRec's compute kernel; None if it is not known.
    """

    table: EmbeddingTable
    has_lookups: bool = True
    kernel: str | None = None


class TorchrecFields(NamedTuple):
    """Fields of a table in perfkit's words.

    Parameters
    ----------
    columns : dict
        Values by the names of `EmbeddingTable`; rows and columns have TorchRec's names, and fields
        that are not TorchRec's are as they were.
    features : int
        Features that look up rows of the table [-].
    is_pooled : bool or None
        Whether the rows of a sample are added up; None if it is not known.
    kernel : str or None
        TorchRec's compute kernel; None if it is not known.
    unused : list of str
        Fields of TorchRec that have a value and are not used.
    output_dtype : str
        Format of pooled rows: FBGEMM writes fp32 where nobody says another one.
    """

    columns: dict[str, Any]
    features: int
    is_pooled: bool | None
    kernel: str | None
    unused: list[str]
    output_dtype: str = OUTPUT_DTYPE


def is_torchrec(names: Iterable[Any]) -> bool:
    """Whether one of the names of fields is TorchRec's."""
    return not set(TORCHREC_FIELDS).isdisjoint(names)


def translate_fields(values: Mapping[str, Any]) -> TorchrecFields:
    """Say the fields of a table of TorchRec in perfkit's words.

    Parameters
    ----------
    values : mapping
        Values of an ``EmbeddingBagConfig`` or ``EmbeddingConfig`` by the names of its fields, and
        those of its ``ParameterConstraints``. In files, lists and names of types are text.

    Returns
    -------
    fields : TorchrecFields
        The same. ``pooling`` is there only if the pooling factor is known. It is that of all
        features together: a list has one for each feature, and a number is that of each.

    Raises
    ------
    ValueError
        For numbers that are no whole bytes, for a virtual table, for another number of pooling
        factors than of features, and for a field that is given twice.

    Examples
    --------
    >>> fields = translate_fields({
    ...     "num_embeddings": 1000, "embedding_dim": 64, "name": "user", "data_type": "FP16",
    ...     "feature_names": ["clicks", "likes"], "pooling_factors": [20.0, 3.0], "weight_init_max": 0.1,
    ... })
    >>> fields.columns
    {'name': 'user', 'num_embeddings': 1000, 'embedding_dim': 64, 'num_features': 2, 'dtype': 'fp16', 'pooling': 23.0}
    >>> fields.unused
    ['weight_init_max']
    """
    own = {name: value for name, value in values.items() if name not in TORCHREC_FIELDS}
    told = {name: value for name, value in values.items() if name in TORCHREC_FIELDS}
    told = {name: value for name, value in told.items() if not _is_nothing(value)}
    columns = dict(own)
    is_pooled = None
    if "pooling" in columns and _is_pooling_type(columns["pooling"]):
        is_pooled = _name_member(columns.pop("pooling")) != "NONE"
        if not is_pooled:
            _put(columns, "pooled", False, "pooling")
    if read_flag("use_virtual_table", told.get("use_virtual_table", False)):
        raise ValueError(
            "use_virtual_table is True: num_embeddings is then the space of the ids, and not the rows "
            "that are stored; give the number of those, and leave use_virtual_table out"
        )
    features = _count_features(told)
    unused = []
    for name in told:
        # TorchRec sets init_fn where nobody does
        if name in (*_UNUSED, *_UNUSED_CONSTRAINTS) and name != "init_fn":
            unused.append(name)
    columns |= {name: told[name] for name in _SIZES if name in told}
    pooled_rows = round(sum(_read_numbers("num_poolings", told.get("num_poolings", 1), features)))
    if pooled_rows > 1:
        _put(columns, "num_features", pooled_rows, "feature_names or num_poolings")
    if "data_type" in told:
        _put_format(columns, told["data_type"])
    lookups = _count_lookups(told, features)
    if lookups is not None:
        _put(columns, "pooling", lookups, "pooling_factor")
    if "is_weighted" in told:
        _put(columns, "weighted", read_flag("is_weighted", told["is_weighted"]), "is_weighted")
    kernel = _find_compute_kernel(told, unused)
    if kernel is not None:
        _put(columns, "kernel", find_kernel(kernel), "compute_kernel")
    load_factor = _find_load_factor(told.get("cache_params"))
    if load_factor is not None:
        if TABLE_KERNELS[find_kernel(kernel)].has_cache:
            _put(columns, "load_factor", load_factor, "cache_params")
        else:
            unused.append("cache_params")
    output_dtype = OUTPUT_DTYPE
    if "output_dtype" in told:
        name = _name_member(told["output_dtype"])
        output_dtype = _FORMATS[check_choice("output_dtype", name, _FORMATS)]
        check_choice("output_dtype", output_dtype, OUTPUT_FORMATS)
    return TorchrecFields(columns, features, is_pooled, kernel, unused, output_dtype)


def find_kernel(torchrec_name: str | None) -> str:
    """Name of the kernel of a table by TorchRec's compute kernel; that of device memory if it is
    unknown."""
    return KERNELS.get(torchrec_name or "", FUSED).name


def list_notes(found: Sequence[TorchrecTable]) -> list[str]:
    """Say what is assumed or left out of tables of TorchRec.

    Parameters
    ----------
    found : sequence of TorchrecTable
        The tables.

    Returns
    -------
    notes : list of str
        One for each kind; it counts the tables that it holds for, and names the first.

    Examples
    --------
    >>> user = EmbeddingTable(1000, 64, 5.0, name="user", module="sparse")
    >>> list_notes([TorchrecTable(user, kernel="key_value")])
    []
    >>> list_notes([TorchrecTable(user)])
    []
    """
    notes = []
    unknown = _name_tables(found, lambda one: not one.has_lookups)
    if unknown:
        notes.append(
            f"the pooling factor of {unknown} is not known, and 1 lookup a sample and feature is "
            "taken; pass constraints=, the ParameterConstraints by table, or a column pooling_factor"
        )
    for kernel in dict.fromkeys(one.kernel for one in found):
        if kernel is None or kernel in KERNELS:
            continue
        alike = [one for one in found if one.kernel == kernel]
        notes.append(
            f"compute kernel {show(kernel)} of {_name_tables(alike, lambda _: True)} is not known; it "
            "is priced as in device memory"
        )
    return notes


def warn_of(place: str, notes: Sequence[str], *, stacklevel: int) -> None:
    """Say notes on a source of tables in one warning; nothing if there are none."""
    if notes:
        text = f"{place}: {'; '.join(notes)}"
        warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


def name_fields(names: Iterable[str]) -> str:
    """Names of fields in one line, each once and in the order of their first use."""
    return escape(", ".join(dict.fromkeys(names)), 400)


def read_flag(name: str, value: Any) -> bool:
    """A truth, which files have as text or as 0 and 1."""
    text = str(value).lower()
    if text in ("true", "1", "1.0"):
        return True
    if text in ("false", "0", "0.0"):
        return False
    raise ValueError(f"{name} is {show(value)}; it must be True or False")


# -- values
# --------------------------------------------------------------------------------------------------


def _put(columns: dict[str, Any], column: str, value: Any, name: str) -> None:
    """Put a value into a column that must still be free."""
    if column in columns:
        raise ValueError(f"it has {name} and {column}, which are the same; give one")
    columns[column] = value


def _is_nothing(value: Any) -> bool:
    """Whether a field has no value, or the one that TorchRec gives it when nobody does."""
    if value is None or value is False:
        return True
    if isinstance(value, str):
        return value in ("", "None", "False", "[]", "{}")
    return isinstance(value, list | tuple | dict) and not value


def _name_member(value: Any) -> str:
    """Name of the member of an enumeration: FP16 of ``DataType.FP16``, of its text, of
    ``<DataType.FP16: 'FP16'>`` and of ``torch.fp16``; in capital letters."""
    text = str(getattr(value, "value", value))
    text = text.strip("<>").partition(":")[0]
    return text.rpartition(".")[2].strip().upper()


def _is_pooling_type(value: Any) -> bool:
    """Whether ``pooling`` is TorchRec's kind of pooling, and not perfkit's number of lookups."""
    if read_number(value) is not None or is_listed(value):
        return False
    return _name_member(value) in _POOLING_TYPES


def _put_format(columns: dict[str, Any], data_type: Any) -> None:
    """Put the format of numbers, or their bytes, into columns that must still be free."""
    name = _name_member(data_type)
    if name in _PARTS_OF_BYTES:
        raise ValueError(
            f"data_type is {name}, less than a byte for a number; perfkit prices numbers of 1, 2, 4 and "
            "8 B: give INT8 for an upper bound"
        )
    check_choice("data_type", name, (*_FORMATS, *_BYTES))
    for column in ("itemsize", "dtype"):
        if column in columns:
            _put(columns, column, None, "data_type")
    if name in _BYTES:
        columns["itemsize"] = _BYTES[name]
    else:
        columns["dtype"] = _FORMATS[name]


def _read_list(value: Any) -> list[Any]:
    """Entries of a list, which files have as text; one entry for anything else."""
    if isinstance(value, str) and value[:1] in ("[", "(") and len(value) <= _LONGEST_LIST:
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return [value]
    if isinstance(value, Mapping) or not is_listed(value) or not hasattr(value, "__len__"):
        return [value]
    count_values("the list", value)
    return list(value)


def _count_features(told: Mapping[str, Any]) -> int:
    """Features of a table [-]; one if they are not named, as TorchRec names it after the table then
    (torchrec/modules/embedding_modules.py)."""
    if "feature_names" not in told:
        return 1
    value = told["feature_names"]
    allowed = "names, each once: a list of str, or text with commas between them"
    names = _read_list(value)
    if len(names) == 1 and isinstance(names[0], str):
        names = names[0].split(",")
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(f"feature_names is {show(value)}; it must be {allowed}")
    stripped = [name.strip() for name in names]
    if len(set(stripped)) < len(stripped):
        twice = next(name for name in stripped if stripped.count(name) > 1)
        raise ValueError(
            f"feature_names is {show(value)}, with {show(twice)} twice; it must be {allowed}"
        )
    if isinstance(value, str) and _has_other_delimiter(value, stripped):
        raise ValueError(
            f"feature_names is {show(value)}; it must be {allowed}; a name with '|', ';' or a space in it "
            "goes into a list"
        )
    return len(names)


def _has_other_delimiter(text: str, names: Sequence[str]) -> bool:
    """Whether something else than commas seems to part the names in a text: signs inside names, or
    quotation marks with blanks alone between them, as NumPy prints arrays."""
    if re.search(r"['\"]\s+['\"]", text):
        return True
    has_quoted_names = _read_list(text) != [text]
    if has_quoted_names:
        return False
    return any(re.search(r"[|;\s]", name) for name in names)


def _count_lookups(told: Mapping[str, Any], features: int) -> float | None:
    """Lookups of a sample over all features [-]; None if nothing tells of them."""
    if "pooling_factor" in told and "pooling_factors" in told:
        raise ValueError("it has pooling_factor and pooling_factors, which are the same; give one")
    name = "pooling_factor" if "pooling_factor" in told else "pooling_factors"
    if name not in told:
        return None
    lengths = _read_numbers(name, told[name], features)
    poolings = _read_numbers("num_poolings", told.get("num_poolings", 1), features)
    total = 0.0
    for length, pooling in zip(lengths, poolings, strict=True):
        total += length * pooling
    check_number(name, total)
    return total


def _read_numbers(name: str, value: Any, features: int) -> list[float]:
    """One number for each feature; TorchRec's default, [1.0], is that of all of them."""
    entries = _read_list(value)
    numbers = [read_number(entry) for entry in entries]
    if any(number is None for number in numbers):
        raise ValueError(f"{name} is {show(value)}; it must be numbers, one for each feature")
    if len(numbers) == 1 and (numbers == [1] or not (is_listed(value) or isinstance(value, str))):
        numbers = numbers * features
    if len(numbers) != features:
        raise ValueError(
            f"{name} has {len(numbers)} entries for {features} features; give one for each feature"
        )
    return [float(number) for number in numbers if number is not None]


def _find_compute_kernel(told: Mapping[str, Any], unused: list[str]) -> str | None:
    """TorchRec's compute kernel, if there is one; a choice of several is not used."""
    name = "compute_kernel" if "compute_kernel" in told else "compute_kernels"
    if name not in told:
        return None
    kernels = _read_list(told[name])
    if len(kernels) > 1:
        unused.append(name)
        return None
    return _name_member(kernels[0]).lower()


def _find_load_factor(cache_params: Any) -> float | None:
    """Share of the rows that the cache of a table holds [-]; None if it is not said."""
    if cache_params is None:
        return None
    if isinstance(cache_params, Mapping):
        value = cache_params.get("load_factor")
    elif hasattr(cache_params, "load_factor"):
        value = cache_params.load_factor
    else:
        raise ValueError(
            f"cache_params is {show(cache_params)}; it must be CacheParams or a mapping of its fields; "
            "in a CSV file give the number in a column load_factor instead"
        )
    if value is None:
        return None
    number = read_number(value)
    if number is None:
        raise ValueError(f"load_factor of cache_params is {show(value)}; it must be a number")
    return float(number)


def _name_tables(found: Sequence[TorchrecTable], applies: Callable[[TorchrecTable], bool]) -> str:
    """The tables that something applies to: the only one by its name, or how many and the first;
    empty for none."""
    names = []
    for number, one in enumerate(found):
        if applies(one):
            name = one.table.name or f"table {number}"
            names.append(f"{one.table.module}.{name}".removeprefix("."))
    if not names:
        return ""
    if len(names) == 1:
        return show(names[0])
    return f"{len(names)} tables ({show(names[0])} first)"
