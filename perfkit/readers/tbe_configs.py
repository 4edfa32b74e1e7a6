"""TBEDataConfig, in which FBGEMM writes down what its table-batched embedding kernels were fed."""

import math
import warnings
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from perfkit.models.distributions import Zipf
from perfkit.resources import MOST_ROWS
from perfkit.units import check_positive
from perfkit.workloads.tables import EmbeddingTable

__all__ = ["parse_tbe_config"]

_KEYS = {"T", "E", "D", "mixed_dim", "weighted", "batch_params", "indices_params", "pooling_params", "use_cpu", "Es",
         "Ds", "max_indices", "embedding_specs", "feature_table_map"}  # fmt: skip
#: Most heavy hitters over all tables [-]: FBGEMM keeps some tens for each.
_MOST_HITTERS = 10_000_000


def parse_tbe_config(
    config: Mapping[str, Any], *, place: str = "config", itemsize: int = 4
) -> tuple[list[EmbeddingTable], int]:
    r"""Read one TBEDataConfig.

    Parameters
    ----------
    config : mapping
        What its JSON holds: T tables of E rows (or Es) and D columns (or Ds), ``batch_params``, ``pooling_params`` and
        ``indices_params``.
    place : str, optional
        What errors call it.
    itemsize : int, optional
        Bytes of one number, of which the format says nothing [B].

    Returns
    -------
    tables : list of EmbeddingTable
        Named ``table 0``, ... by feature, or by table where ``feature_table_map`` lets features share one.
    batch : int
        Samples, the most of any table [-].

    Raises
    ------
    ValueError
        With the key, for what is missing, of the wrong kind or impossible.

    Warns
    -----
    UserWarning
        For keys that are not known, and what perfkit can only take on the average.

    Notes
    -----
    The generator of FBGEMM looks row i up with probability :math:`h_i` where it is one of the H heavy hitters and with
    :math:`(1 - \sum h) (i + q)^{-s} / \sum_{j \ge H} (j + q)^{-s}` beyond, i from 0: a `Zipf` law with shift q - 1. One
    law holds for all tables, cut off at the rows of each. Sizes of bags are normal with mean L and deviation
    :math:`\sigma`, rounded towards zero and at least 0, :math:`E[X^+] - \Phi(L/\sigma)/2 + \varphi(L/\sigma)/12\sigma`
    on the average, or uniform from L to :math:`\sigma`; measured means ``Ls`` are taken as they are. Tables of fewer
    samples than others (``Bs``) have their lookups spread over the largest batch.

    References
    ----------
    .. [1] pytorch/FBGEMM, fbgemm_gpu/tbe/bench/tbe_data_config.py, tbe_data_config_param_models.py and
       src/tbe/eeg/indices_generator.cpp, 2025

    Examples
    --------
    >>> tables, batch = parse_tbe_config({
    ...     "T": 2, "E": 1000, "D": 64, "batch_params": {"B": 512}, "pooling_params": {"L": 20},
    ...     "indices_params": {"heavy_hitters": [0.2, 0.1], "zipf_q": 5.0, "zipf_s": 1.1},
    ... })
    >>> batch, tables[0].distribution
    (512, Zipf(rows=1000, exponent=1.1, shift=4.0, heavy_hitters=(0.2, 0.1)))
    """
    if odd := sorted(set(config) - _KEYS):
        warnings.warn(f"{place} has {', '.join(odd)}, which perfkit does not know and leaves out", stacklevel=3)
    count = int(check_positive(f"{place}.T", config.get("T"), integer=True, maximum=MOST_ROWS))
    rows = _per_table(config, place, "E", "Es", count, integer=True)
    dims = _per_table(config, place, "D", "Ds", count, integer=True)
    if config.get("mixed_dim") and len(set(dims)) == 1 and not config.get("Ds"):
        warnings.warn(f"{place} draws the columns of each table around D = {dims[0]:g}; D is taken", stacklevel=3)
    batches = _batches(_section(config, place, "batch_params"), f"{place}.batch_params", count)
    poolings, spreads = _poolings(_section(config, place, "pooling_params"), f"{place}.pooling_params", count)
    batch = max(batches)
    poolings = [pooling * samples / batch for pooling, samples in zip(poolings, batches, strict=True)]
    groups = _share_tables(config, place, count, rows, dims)
    laws = _Laws(_section(config, place, "indices_params"), f"{place}.indices_params")
    if len(laws.hitters) * count > _MOST_HITTERS:
        raise ValueError(
            f"{place} has {len(laws.hitters)} heavy hitters for each of {count} tables; leave small ones out"
        )
    tables = []
    for number, features in groups:
        pooling, spread = sum(poolings[f] for f in features), math.hypot(*(spreads[f] for f in features))
        if pooling > 0:
            size, dim = int(rows[features[0]]), int(dims[features[0]])
            law = laws.cut(size)
            tables.append(EmbeddingTable(size, dim, pooling, law.exponent, itemsize, f"table {number}", law, spread))
    if len(tables) < len(groups):
        warnings.warn(f"{place}: {len(groups) - len(tables)} tables without lookups are left out", stacklevel=3)
    return tables, int(batch)


def _section(config: Mapping[str, Any], place: str, key: str) -> Mapping[str, Any]:
    section = config.get(key)
    if not isinstance(section, Mapping):
        shown = "missing" if section is None else repr(section)
        raise ValueError(f"{place}.{key} is {shown}; it must be a table of names and values")
    return section


def _list(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{place} is {value!r}; it must be a list")
    return value


def _per_table(section: Mapping[str, Any], place: str, one: str, many: str, count: int, **rule: Any) -> list[float]:
    """A value of every table: the list where there is one, otherwise the same for all."""
    key = one if section.get(many) is None else many
    value = section.get(key)
    if key == one and not isinstance(value, list):
        return [check_positive(f"{place}.{one}", value, **rule)] * count
    values = _list(value, f"{place}.{key}")
    if len(values) != count:
        raise ValueError(f"{place}.{key} has {len(values)} entries; it must have one for each of the {count} tables")
    return [check_positive(f"{place}.{key}[{i}]", v, **rule) for i, v in enumerate(values)]


def _spread(section: Mapping[str, Any], place: str, key: str, kind: str) -> tuple[float, bool]:
    """Second number of a distribution, 0 where there is none, and whether it is the upper end of a uniform one."""
    value = section.get(key)
    sigma = 0.0 if value is None else check_positive(f"{place}.{key}", value, zero=True)
    shape = section.get(kind) or "normal"
    if shape not in ("normal", "uniform"):
        raise ValueError(f"{place}.{kind} is {shape!r}; it must be normal or uniform")
    return sigma, shape == "uniform" and sigma > 0


def _batches(section: Mapping[str, Any], place: str, count: int) -> list[float]:
    """Samples of each table over all ranks, on the average."""
    batches = _per_table(section, place, "B", "Bs", count, integer=True)
    sigma, uniform = _spread(section, place, "sigma_B", "vbe_distribution")
    if section.get("Bs") is None and sigma:  # B is then that of a rank
        ranks = check_positive(f"{place}.vbe_num_ranks", section.get("vbe_num_ranks"), integer=True)
        warnings.warn(f"{place} draws the samples of each table; their mean is taken", stacklevel=4)
        batches = [float(round(ranks * ((b + sigma) / 2 if uniform else b))) for b in batches]
    return batches


def _poolings(section: Mapping[str, Any], place: str, count: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the lookups of a sample into each table."""
    means = _per_table(section, place, "L", "Ls", count, zero=True)
    sigma, uniform = _spread(section, place, "sigma_L", "length_distribution")
    if not sigma:
        return means, [0.0] * count
    low = means[0]
    if uniform and sigma < low:
        raise ValueError(
            f"{place}.sigma_L is {sigma:g}, the upper end where L is the lower; it must be at least {low:g}"
        )
    deviation = math.sqrt(((sigma - low + 1) ** 2 - 1) / 12) if uniform else sigma
    if section.get("Ls") is None:
        mean = (low + sigma) / 2 if uniform else _mean_of_whole(low, sigma)
        means = [mean] * count
    return means, [deviation] * count


def _mean_of_whole(mean: float, sigma: float) -> float:
    """Mean of a normal variable rounded towards zero and cut at 0: the sum of its chances to reach 1, 2, 3, ..."""
    normal, z = NormalDist(), mean / sigma
    above, density = normal.cdf(z), normal.pdf(z)
    return max(mean * above + sigma * density - above / 2 + density / (12 * sigma), 0.0)


def _share_tables(
    config: Mapping[str, Any], place: str, count: int, rows: list[float], dims: list[float]
) -> list[tuple[int, list[int]]]:
    """Numbers of the tables with the features that look into each."""
    mapping = config.get("feature_table_map")
    if mapping is None:
        return [(i, [i]) for i in range(count)]
    groups: dict[int, list[int]] = {}
    for i, table in enumerate(_list(mapping, f"{place}.feature_table_map")):
        groups.setdefault(check_positive(f"{place}.feature_table_map[{i}]", table, integer=True, zero=True), []).append(
            i
        )
    if len(mapping) != count:
        raise ValueError(
            f"{place}.feature_table_map has {len(mapping)} entries; it must have one for each of T = {count}"
        )
    for table, features in groups.items():
        if len({(rows[f], dims[f]) for f in features}) > 1:
            raise ValueError(f"{place}: features {features} share table {table}; their Es and Ds must be alike")
    if len(groups) < count:
        warnings.warn(
            f"{place}: {count} features share {len(groups)} tables; lookups are added up, and a sample gets one pooled "
            "row of each table",
            stacklevel=4,
        )
    return sorted(groups.items())


class _Laws:
    """The law of all tables, and what of it a table of fewer rows keeps."""

    def __init__(self, section: Mapping[str, Any], place: str) -> None:
        self.place = place
        hitters = _list(section.get("heavy_hitters"), f"{place}.heavy_hitters")
        self.hitters = [
            check_positive(f"{place}.heavy_hitters[{i}]", h, zero=True, maximum=1) for i, h in enumerate(hitters)
        ]
        self.q = check_positive(f"{place}.zipf_q", section.get("zipf_q"))
        self.s = check_positive(f"{place}.zipf_s", section.get("zipf_s"), zero=True, maximum=10)

    def cut(self, rows: int) -> Zipf:
        """The law of the first rows."""
        kept = self.hitters[:rows]
        if len(kept) == rows:  # the last row gets what the others leave
            total = sum(kept)
            kept = [h / total for h in kept[:-1]] if total > 0 else []
        try:
            return Zipf(rows, self.s, max(self.q - 1, 2.0**-52 - 1), tuple(kept))
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from error
