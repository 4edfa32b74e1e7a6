"""TBEDataConfig of FBGEMM: a description of the tables and lookups of its table-batched embedding
kernels."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

from perfkit.ground.files import MOST_ROWS, reading
from perfkit.ground.units import check_choice, check_positive, show
from perfkit.models.distributions import Zipf
from perfkit.workloads.tables import EmbeddingTable

#: Most heavy hitters of all tables together [-]; their laws take some 2 s.
MOST_HITTERS = 3_000_000
_KEYS = {
    "T",
    "E",
    "D",
    "mixed_dim",
    "weighted",
    "batch_params",
    "indices_params",
    "pooling_params",
    "use_cpu",
    "Es",
    "Ds",
    "max_indices",
    "embedding_specs",
    "feature_table_map",
}


def parse_tbe_config(
    config: Mapping[str, Any], *, place: str = "config", itemsize: int = 4
) -> tuple[list[EmbeddingTable], int]:
    r"""Read one TBEDataConfig.

    Parameters
    ----------
    config : mapping
        Parsed JSON: T tables of E rows (or Es) and D columns (or Ds), ``batch_params``,
        ``pooling_params`` and ``indices_params``.
    place : str, optional
        Its name in errors.
    itemsize : int, optional
        Bytes of one number, which the format does not contain [B].

    Returns
    -------
    tables : list of EmbeddingTable
        Named ``table 0``, ... by feature, or by table where ``feature_table_map`` lets features
        share tables.
    batch : int
        Largest number of samples of any table [-].

    Raises
    ------
    ValueError
        For missing keys, for values of the wrong type or out of range, and for tables whose columns
        or samples the generator draws.

    Warns
    -----
    UserWarning
        For unknown keys.

    Notes
    -----
    The generator of FBGEMM looks up row i, counted from 0, with probability :math:`h_i` if it is
    one of the H heavy hitters. Other rows have :math:`(1 - \sum h) (i + q)^{-s} / \sum_{j \ge H} (j
    + q)^{-s}`: a `Zipf` law with shift q - 1. All tables have the same law, cut off at their rows.
    Sizes of bags are uniform from L to :math:`\sigma`, or normal with mean L and deviation
    :math:`\sigma`, rounded towards zero and at least 0. The mean of the normal ones is
    :math:`E[X^+] - \Phi(L/\sigma)/2 + \varphi(L/\sigma)/12\sigma`. Measured means ``Ls`` are used
    unchanged. If a table has fewer samples than others (``Bs``), its lookups are spread over the
    largest batch.

    References
    ----------
    .. [1] pytorch/FBGEMM, fbgemm_gpu/tbe/bench/tbe_data_config.py, tbe_data_config_param_models.py
       and src/tbe/eeg/indices_generator.cpp, 2025

    Examples
    --------
    >>> tables, batch = parse_tbe_config({
    ...     "T": 2, "E": 1000, "D": 64, "batch_params": {"B": 512}, "pooling_params": {"L": 20},
    ...     "indices_params": {"heavy_hitters": [0.2, 0.1], "zipf_q": 5.0, "zipf_s": 1.1},
    ... })
    >>> batch, tables[0].distribution
    (512, Zipf(rows=1000, exponent=1.1, shift=4.0, heavy_hitters=(0.2, 0.1)))
    """
    if not isinstance(config, Mapping) or _KEYS.isdisjoint(config):
        raise ValueError(f"{place} is no TBEDataConfig; it has none of {', '.join(sorted(_KEYS))}")
    unknown = sorted(set(config) - _KEYS)
    if unknown:
        warnings.warn(
            f"{place} has {', '.join(unknown)}, which perfkit does not know and ignores",
            stacklevel=3,
        )
    count = int(check_positive(f"{place}.T", config.get("T"), integer=True, maximum=MOST_ROWS))
    whole = _Section(config, place, count)
    rows = whole.read("E", "Es", integer=True)
    dims = whole.read("D", "Ds", integer=True)
    if config.get("mixed_dim") and len(set(dims)) == 1 and not config.get("Ds"):
        raise ValueError(
            f"{place}.mixed_dim draws the columns of its tables around D = {dims[0]:g}; "
            "write those that were drawn as Ds"
        )
    batches = _find_batches(whole.enter("batch_params"))
    bags = _find_bags(whole.enter("pooling_params"))
    batch = max(batches)
    # spread over the largest batch
    poolings = [mean * samples / batch for mean, samples in zip(bags.means, batches, strict=True)]
    groups = _share_tables(whole, rows, dims)
    find_law = _find_laws(whole.enter("indices_params"))
    tables = []
    for number, features in groups.items():
        pooling = sum(poolings[feature] for feature in features)
        if pooling > 0:
            law = find_law(int(rows[features[0]]))
            table = EmbeddingTable(
                law.rows,
                int(dims[features[0]]),
                pooling,
                law.exponent,
                itemsize,
                f"table {number}",
                law,
                bags.spread * math.sqrt(len(features)),
                num_features=len(features),
            )
            tables.append(table)
    if len(tables) < len(groups):
        warnings.warn(
            f"{place}: {len(groups) - len(tables)} tables without lookups are left out",
            stacklevel=3,
        )
    return tables, int(batch)


class _Section(NamedTuple):
    """Part of a configuration, its name in errors, and the number of tables."""

    values: Mapping[str, Any]
    place: str
    tables: int

    def enter(self, key: str) -> "_Section":
        """A part of this part by its key."""
        if not isinstance(self.values.get(key), Mapping):
            shown = show(self.values.get(key))
            raise ValueError(
                f"{self.place}.{key} is {shown}; it must be a table of names and values"
            )
        return _Section(self.values[key], f"{self.place}.{key}", self.tables)

    def take(self, key: str, **rule: Any) -> float:
        """A number."""
        return float(check_positive(f"{self.place}.{key}", self.values.get(key), **rule))

    def take_list(self, key: str, count: int | None, **rule: Any) -> list[Any]:
        """Numbers of a list, which must have `count` entries unless it is None."""
        value = self.values.get(key)
        if not isinstance(value, list | tuple) or count not in (None, len(value)):
            wanted = (
                "a list" if count is None else f"a list with one for each of the {count} tables"
            )
            raise ValueError(f"{self.place}.{key} is {show(value)}; it must be {wanted}")
        return [
            check_positive(f"{self.place}.{key}[{i}]", number, **rule)
            for i, number in enumerate(value)
        ]

    def read(self, one: str, many: str, **rule: Any) -> list[float]:
        """Value of each table: the list `many`, or `one` for all tables, which old files write as a
        list too."""
        key = one if self.values.get(many) is None else many
        if key == one and not isinstance(self.values.get(one), list):
            return [self.take(one, **rule)] * self.tables
        return self.take_list(key, self.tables, **rule)

    def take_sigma(self, key: str) -> float:
        """Sigma of a random size, 0 for a fixed one."""
        return 0.0 if self.values.get(key) is None else self.take(key, zero=True)


def _find_batches(section: _Section) -> list[float]:
    """Samples of each table."""
    batches = section.read("B", "Bs", integer=True)
    if section.values.get("Bs") is None and section.take_sigma("sigma_B"):
        raise ValueError(
            f"{section.place}.sigma_B draws the samples of each table; write those that were "
            "drawn as Bs"
        )
    return batches


class _Bags(NamedTuple):
    """Sizes of the bags of a sample.

    Parameters
    ----------
    means : list of float
        Mean lookups of each table [-].
    spread : float
        Their standard deviation [-].
    """

    means: list[float]
    spread: float


def _find_bags(section: _Section) -> _Bags:
    """Sizes of bags: uniform from L to sigma, or normal with mean L."""
    means = section.read("L", "Ls", zero=True)
    sigma = section.take_sigma("sigma_L")
    kind = section.values.get("length_distribution") or "normal"
    check_choice(f"{section.place}.length_distribution", kind, ("normal", "uniform"))
    if not sigma:
        return _Bags(means, 0.0)
    low = means[0]
    if kind == "uniform":
        if sigma < low:
            text = f"{section.place}.sigma_L is {sigma:g}, the upper end of the range from L"
            raise ValueError(f"{text}; it must be at least {low:g}")
        spread = math.sqrt(((sigma - low + 1) ** 2 - 1) / 12)
        drawn_mean = (low + sigma) / 2
    else:
        spread = sigma
        drawn_mean = _cut_normal_mean(low, sigma)
    were_measured = section.values.get("Ls") is not None
    if not were_measured:
        means = [drawn_mean for _ in means]
    return _Bags(means, spread)


def _cut_normal_mean(mean: float, sigma: float) -> float:
    """Mean of normal sizes that are rounded towards zero, and at least 0, see `parse_tbe_config`."""
    above, density = NormalDist().cdf(mean / sigma), NormalDist().pdf(mean / sigma)
    return max(mean * above + sigma * density - above / 2 + density / (12 * sigma), 0.0)


def _share_tables(config: _Section, rows: list[float], dims: list[float]) -> dict[int, list[int]]:
    """Features of each table."""
    count = config.tables
    table_of_feature: Sequence[int] = range(count)
    if config.values.get("feature_table_map") is not None:
        table_of_feature = config.take_list("feature_table_map", count, integer=True, zero=True)
    groups: dict[int, list[int]] = {}
    for feature, table in enumerate(table_of_feature):
        groups.setdefault(table, []).append(feature)
    for table, features in groups.items():
        sizes = {(rows[feature], dims[feature]) for feature in features}
        if len(sizes) > 1:
            raise ValueError(
                f"{config.place}: features {features} share table {table}; their Es and Ds must be equal"
            )
    return dict(sorted(groups.items()))


def _find_laws(section: _Section) -> Callable[[int], Zipf]:
    """Make a function from the rows of a table to its law: all tables have the same law, cut
    off."""
    written = section.values.get("heavy_hitters")
    if isinstance(written, list) and len(written) * section.tables > MOST_HITTERS:
        raise ValueError(
            f"{section.place}.heavy_hitters has {len(written)} entries for each of {section.tables} tables; "
            f"perfkit takes at most {MOST_HITTERS:,} in all"
        )
    hitters = section.take_list("heavy_hitters", None, zero=True, maximum=1)
    q, s = section.take("zipf_q"), section.take("zipf_s", zero=True, maximum=10)

    @cache
    def cut(rows: int) -> Zipf:
        kept = hitters[:rows]
        if len(kept) == rows:  # the last row gets the rest
            total = sum(kept)
            kept = [h / total for h in kept[:-1]] if total > 0 else []
        with reading(section.place, "change the heavy hitters"):
            return Zipf(rows, s, max(q - 1, 2.0**-52 - 1), tuple(kept))

    return cut
