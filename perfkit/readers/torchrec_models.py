"""Embedding tables of TorchRec's own objects: configurations, models that have them, and constraints.

TorchRec need not be installed: objects are known by what they have.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perfkit.ground.files import reading
from perfkit.ground.units import check_choice, check_positive, show
from perfkit.readers.torchrec_tables import PLACING, TORCHREC_FIELDS
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS
from perfkit.workloads.tables import EmbeddingTable, TableSet, list_tables, name_tables

#: Methods and attributes by which a module has configurations: those of collections, those of what
#: wraps a collection (features with processors or managed collisions), and those of sharded ones.
_METHODS = ("embedding_bag_configs", "embedding_configs")
_WRAPPED = ("_embedding_bag_collection", "_embedding_collection", "_embedding_module")
_ATTRIBUTES = ("_embedding_bag_configs", "_embedding_configs")
#: Parts of a path that wrappers add: DistributedModelParallel with the DistributedDataParallel inside,
#: and torch.compile.
_WRAPPERS = ("_dmp_wrapped_module", "_orig_mod")


class ConfigFields(NamedTuple):
    """Fields of a configuration by name, its place in errors, and fields that are not known."""

    place: str
    values: dict[str, Any]
    unknown: list[str]


def find_configs(source: Any) -> list[ConfigFields] | None:
    """Find the configurations of embedding tables in an object of TorchRec.

    Parameters
    ----------
    source : object
        One or several configurations, or a model that has collections of them, sharded or not.

    Returns
    -------
    configs : list of ConfigFields or None
        One for each table, those of a model with the path of their collection as ``module``; None if
        it is no such object.

    Raises
    ------
    ValueError
        For a model without tables, and for other objects of TorchRec, which name the next step.
    """
    if _is_config(source):
        return [_read_config("source", source, "")]
    if isinstance(source, list | tuple) and source and any(map(_is_config, source)):
        for number, config in enumerate(source):
            if not _is_config(config):
                raise ValueError(
                    f"source[{number}] is {show(config)}; it must be a configuration of TorchRec as "
                    "the others"
                )
        return [_read_config(f"source[{i}]", config, "") for i, config in enumerate(source)]
    if isinstance(source, Mapping | list | tuple | str):
        return None
    if callable(getattr(source, "named_modules", None)) or _list_configs(source) is not None:
        return _read_model(source)
    return None


def explain_object(source: Any) -> str | None:
    """Say what an object of TorchRec or torch is that has no tables to read, and the next step; None
    for any other."""
    if isinstance(source, Mapping):
        first = next(iter(source.values()), None)
        if _is_config(first):
            return "configurations by name; pass them as a list, list(source.values())"
        if _is_constraints(first):
            return (
                "ParameterConstraints; pass them as constraints=, and the configurations as source"
            )
        return None
    if isinstance(source, list | tuple):
        if source and _list_configs(source[0]) is not None:
            return "a list of collections; pass the model that has them"
        if source and hasattr(source[0], "num_embeddings") and not _is_config(source[0]):
            return (
                "a list of torch's embeddings; pass a list of dicts of rows and dim, as "
                '{"rows": e.num_embeddings, "dim": e.embedding_dim}'
            )
        return None
    if isinstance(getattr(source, "_stats", None), list):
        return "a planner; plan, and pass '\\n'.join(planner._stats[0]._stats_table)"
    if isinstance(getattr(source, "plan", None), Mapping):
        return (
            "a plan, which has no rows and columns; pass the model or its configurations, and the plan "
            "to Plan.from_torchrec"
        )
    return None


def _is_config(source: Any) -> bool:
    """Whether an object is a configuration of a table: it has its fields, and is no frame of them."""
    if hasattr(source, "columns"):
        return False
    return all(
        hasattr(source, name) for name in ("num_embeddings", "embedding_dim", "feature_names")
    )


def _is_constraints(source: Any) -> bool:
    """Whether an object is ParameterConstraints."""
    return hasattr(source, "sharding_types") and hasattr(source, "pooling_factors")


def _read_config(
    place: str, config: Any, module: str, *, is_weighted: bool = False
) -> ConfigFields:
    """Fields of a configuration."""
    values: dict[str, Any] = {}
    for name in (*TORCHREC_FIELDS, "name", "pooling"):
        if hasattr(config, name):
            values[name] = getattr(config, name)
    if "pooling" not in values:  # an EmbeddingConfig
        values["pooling"] = "NONE"
    values["module"] = module
    if is_weighted:
        values["is_weighted"] = True
    unknown = [name for name in vars(config) if name not in values and not name.startswith("_")]
    return ConfigFields(place, values, unknown)


def _read_model(model: Any) -> list[ConfigFields]:
    """Fields of the configurations of all collections of a model."""
    configs = []
    for path, collection in _walk_collections(model):
        place = path or "source"
        is_weighted = _is_weighted(collection)
        for number, config in enumerate(_list_configs(collection) or ()):
            if not _is_config(config):
                raise ValueError(
                    f"{place} has {show(config)} among its tables; it must be a configuration with "
                    "num_embeddings, embedding_dim and feature_names"
                )
            entry = _read_config(f"{place}[{number}]", config, path, is_weighted=is_weighted)
            configs.append(entry)
    if not configs:
        raise ValueError(
            f"source is a {type(model).__name__} without an EmbeddingBagCollection or "
            "EmbeddingCollection; pass a model that has one, its configurations, or a list of dicts of "
            "rows and dim"
        )
    return configs


def _walk_collections(model: Any) -> Iterator[tuple[str, Any]]:
    """Collections of a model with their paths, and not what is inside of them; modules come before
    those inside."""
    if not callable(getattr(model, "named_modules", None)):
        yield "", model
        return
    last: str | None = None
    for path, module in model.named_modules():
        if last is not None and (not last or path.startswith(f"{last}.")):
            continue
        if _list_configs(module) is not None:
            last = path
            yield _strip_wrappers(path), module


def _strip_wrappers(path: str) -> str:
    """The path of a module in the model that was wrapped."""
    parts: list[str] = []
    for part in path.split("."):
        if part in _WRAPPERS:
            parts.clear()
        elif part != "module" or parts or not path.startswith(_WRAPPERS):
            parts.append(part)
    return ".".join(parts)


def _list_configs(module: Any) -> Sequence[Any] | None:
    """Configurations of a collection, or of the one that it wraps; None for any other module."""
    for name in _METHODS:
        method = getattr(module, name, None)
        if callable(method):
            return list(method())
    for name in _WRAPPED:
        inner = getattr(module, name, None)
        if inner is not None:
            configs = _list_configs(inner)
            if configs is not None:
                return configs
    for name in _ATTRIBUTES:
        configs = getattr(module, name, None)
        if isinstance(configs, list | tuple):
            return list(configs)
    return None


def _is_weighted(collection: Any) -> bool:
    """Whether the lookups of a collection, or of the one that it wraps, have weights."""
    is_weighted = getattr(collection, "is_weighted", None)
    if callable(is_weighted):
        return bool(is_weighted())
    for name in _WRAPPED:
        inner = getattr(collection, name, None)
        if inner is not None:
            return _is_weighted(inner)
    return bool(getattr(collection, "_is_weighted", False))


# -- constraints
# --------------------------------------------------------------------------------------------------


def list_constraints(constraints: Any) -> dict[str, dict[str, Any]]:
    """Fields of ParameterConstraints by table, those that place a table apart.

    Parameters
    ----------
    constraints : mapping
        An object of ParameterConstraints, or a mapping of its fields, by the name of a table.

    Returns
    -------
    fields : dict
        Fields by name for each table. Those without a value are left out, as are the names of
        features, which its configuration has.

    Raises
    ------
    ValueError
        For anything else.
    """
    fields: dict[str, dict[str, Any]] = {}
    for name, values in _walk_constraints(constraints):
        skipped = (*PLACING, "feature_names")
        fields[name] = {
            key: value
            for key, value in values.items()
            if key not in skipped and value is not None and value is not False
        }
    return fields


def _walk_constraints(constraints: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of the constraints of each table."""
    if not isinstance(constraints, Mapping):
        raise ValueError(
            f"constraints is {show(constraints)}; it must be ParameterConstraints by the name of their "
            "table, a mapping"
        )
    for name, entry in constraints.items():
        if not isinstance(name, str):
            raise ValueError(f"constraints has the table {show(name)}; it must be a name, a str")
        if isinstance(entry, Mapping):
            values = {str(key): value for key, value in entry.items()}
        elif _is_constraints(entry):
            values = {key: getattr(entry, key) for key in TORCHREC_FIELDS if hasattr(entry, key)}
        else:
            raise ValueError(
                f"constraints of {show(name)} are {show(entry)}; they must be ParameterConstraints, or "
                "a mapping of their fields"
            )
        for key in values:
            check_choice(f"field of the constraints of {show(name)}", key, TORCHREC_FIELDS)
        yield name, values


def read_parameter_constraints(
    constraints: Mapping[str, Any], tables: TableSet | Sequence[EmbeddingTable]
) -> dict[str, Any]:
    """Read where TorchRec's ParameterConstraints allow tables, as arguments of `perfkit.shard`.

    What they say of lookups, weights and kernels belongs to the tables: pass them to
    `perfkit.read_tables`, too.

    Parameters
    ----------
    constraints : mapping
        An object of ParameterConstraints, or a mapping of its fields, by the name of a table.
    tables : TableSet or sequence of EmbeddingTable
        The tables; one name may be that of several, in several modules.

    Returns
    -------
    arguments : dict
        ``forbid``, the kinds of placement that a table must not have, and ``min_columns``, by
        table.

    Raises
    ------
    ValueError
        For unknown tables, fields and sharding types, and for a table that may be placed in no way
        that perfkit knows.

    Examples
    --------
    >>> tables = [EmbeddingTable(10**6, 256, name="user"), EmbeddingTable(100, 16, name="day")]
    >>> rules = {"user": {"sharding_types": ["table_wise", "column_wise"], "min_partition": 64}}
    >>> arguments = read_parameter_constraints(rules, tables)
    >>> arguments["forbid"]["user"]
    ['table_column_wise', 'row_wise', 'table_row_wise', 'data_parallel']
    >>> arguments["min_columns"]
    {'user': 64}
    """
    listed = list_tables("tables", tables)
    with reading("constraints", "pass ParameterConstraints by table", told=True):
        return _read_rules(constraints, listed)


def _read_rules(constraints: Mapping[str, Any], listed: Sequence[EmbeddingTable]) -> dict[str, Any]:
    """Forbidden kinds and least columns of tables."""
    shown = name_tables(listed)
    of_name: dict[str, list[str]] = {}
    for table, name in zip(listed, shown, strict=True):
        of_name.setdefault(table.name or name, []).append(name)
    forbid: dict[str, list[str]] = {}
    min_columns: dict[str, int] = {}
    for name, values in _walk_constraints(constraints):
        check_choice("table of constraints", name, of_name)
        allowed = values.get("sharding_types")
        least = values.get("min_partition")
        for table_name in of_name[name]:
            if allowed:
                forbid[table_name] = _list_forbidden(name, allowed)
            if least is not None:
                place = f"min_partition of {show(name)}"
                min_columns[table_name] = int(check_positive(place, least, integer=True))
    return {"forbid": forbid, "min_columns": min_columns}


def _list_forbidden(name: str, allowed: Any) -> list[str]:
    """Kinds of placement that are not among the sharding types of a table."""
    known = [kind.torchrec_name for kind in PLACEMENT_KINDS if kind.torchrec_name]
    if isinstance(allowed, str) or not isinstance(allowed, Sequence):
        raise ValueError(
            f"sharding_types of {show(name)} is {show(allowed)}; it must be a list of sharding types"
        )
    types = [str(getattr(entry, "value", entry)) for entry in allowed]
    for entry in types:
        check_choice(f"sharding type of {show(name)}", entry, (*known, "grid_shard"))
    if set(types) == {"grid_shard"}:
        raise ValueError(
            f"sharding_types of {show(name)} is grid_shard alone, which perfkit does not price; allow "
            "another one"
        )
    return [kind.name for kind in PLACEMENT_KINDS if kind.torchrec_name not in types]
