"""TBEDataConfig, in which FBGEMM writes down what its table-batched embedding kernels were fed."""

import math
import warnings
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

from perfkit.ground.files import MOST_ROWS
from perfkit.ground.units import check_choice, check_positive, show
from perfkit.models.distributions import Zipf
from perfkit.workloads.tables import EmbeddingTable

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
        Its JSON: T tables of E rows (or Es) and D columns (or Ds), ``batch_params``, ``pooling_params`` and
        ``indices_params``.
    place : str, optional
        Its name in errors.
    itemsize : int, optional
        Bytes of one number, which the format does not hold [B].

    Returns
    -------
    tables : list of EmbeddingTable
        Named ``table 0``, ... by feature, or by table where ``feature_table_map`` lets features share one.
    batch : int
        Samples, the most of any table [-].

    Raises
    ------
    ValueError
        For keys that are missing, of the wrong type or impossible.

    Warns
    -----
    UserWarning
        For unknown keys, and for quantities of which perfkit uses only the mean.

    Notes
    -----
    The generator of FBGEMM looks up row i, counted from 0, with probability :math:`h_i` if it is one of the H heavy
    hitters. Other rows have :math:`(1 - \sum h) (i + q)^{-s} / \sum_{j \ge H} (j + q)^{-s}`: a `Zipf` law with shift
    q - 1. One law holds for all tables, cut off at the rows of each. Sizes of bags are uniform from L to
    :math:`\sigma`, or normal with mean L and deviation :math:`\sigma`, rounded towards zero and at least 0. Their mean
    is then :math:`E[X^+] - \Phi(L/\sigma)/2 + \varphi(L/\sigma)/12\sigma`. Measured means ``Ls`` are used unchanged.
    Tables with fewer samples than others (``Bs``) have their lookups spread over the largest batch.

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
    if not isinstance(config, Mapping) or _KEYS.isdisjoint(config):
        raise ValueError(f"{place} is no TBEDataConfig; it has none of {', '.join(sorted(_KEYS))}")
    if odd := sorted(set(config) - _KEYS):
        warnings.warn(f"{place} has {', '.join(odd)}, which perfkit does not know and leaves out", stacklevel=3)
    count = int(check_positive(f"{place}.T", config.get("T"), integer=True, maximum=MOST_ROWS))
    rows = _per_table(config, place, "E", "Es", count, integer=True)
    dims = _per_table(config, place, "D", "Ds", count, integer=True)
    if config.get("mixed_dim") and len(set(dims)) == 1 and not config.get("Ds"):
        warnings.warn(f"{place} draws the columns of each table around D = {dims[0]:g}; D is taken", stacklevel=3)
    batches = _find_batches(_section(config, place, "batch_params"), f"{place}.batch_params", count)
    means, spread = _find_poolings(_section(config, place, "pooling_params"), f"{place}.pooling_params", count)
    batch = max(batches)
    poolings = [mean * samples / batch for mean, samples in zip(means, batches, strict=True)]
    groups = _share_tables(config, place, count, rows, dims)
    laws = _find_laws(_section(config, place, "indices_params"), f"{place}.indices_params", count)
    tables = []
    for number, features in groups.items():
        pooling, law = sum(poolings[f] for f in features), laws(int(rows[features[0]]))
        if pooling > 0:
            size, name = (law.rows, int(dims[features[0]])), f"table {number}"
            wide = math.hypot(*[spread] * len(features))
            tables.append(EmbeddingTable(*size, pooling, law.exponent, itemsize, name, law, wide))
    if len(tables) < len(groups):
        warnings.warn(f"{place}: {len(groups) - len(tables)} tables without lookups are left out", stacklevel=3)
    return tables, int(batch)


def _section(config: Mapping[str, Any], place: str, key: str) -> Mapping[str, Any]:
    section = config.get(key)
    if not isinstance(section, Mapping):
        raise ValueError(f"{place}.{key} is {show(section)}; it must be a table of names and values")
    return section


def _numbers(value: Any, place: str, count: int | None = None, **rule: Any) -> list[Any]:
    """Numbers of a list, one for each table where there is a count."""
    if not isinstance(value, list | tuple) or count not in (None, len(value)):
        wanted = "a list" if count is None else f"a list with one for each of the {count} tables"
        raise ValueError(f"{place} is {show(value)}; it must be {wanted}")
    return [check_positive(f"{place}[{i}]", number, **rule) for i, number in enumerate(value)]


def _per_table(section: Mapping[str, Any], place: str, one: str, many: str, count: int, **rule: Any) -> list[float]:
    """Value of each table: the list `many`, or `one` value for all, which files of old also write as a list."""
    key = one if section.get(many) is None else many
    if key == one and not isinstance(section.get(one), list):
        return [check_positive(f"{place}.{one}", section.get(one), **rule)] * count
    return _numbers(section[key], f"{place}.{key}", count, **rule)


def _find_spread(section: Mapping[str, Any], place: str, key: str, kind: str) -> tuple[float, bool]:
    """Spread of a drawn size, 0 where it is not drawn, and whether it is uniform."""
    sigma = 0.0 if section.get(key) is None else check_positive(f"{place}.{key}", section[key], zero=True)
    shape = check_choice(f"{place}.{kind}", section.get(kind) or "normal", ("normal", "uniform"))
    return sigma, shape == "uniform" and sigma > 0


def _find_batches(section: Mapping[str, Any], place: str, count: int) -> list[float]:
    """Samples of each table."""
    batches = _per_table(section, place, "B", "Bs", count, integer=True)
    sigma, uniform = _find_spread(section, place, "sigma_B", "vbe_distribution")
    if section.get("Bs") is None and sigma:  # B is then that of a rank
        ranks = check_positive(f"{place}.vbe_num_ranks", section.get("vbe_num_ranks"), integer=True)
        warnings.warn(f"{place} draws the samples of each table; their mean is taken", stacklevel=4)
        batches = [float(round(ranks * ((b + sigma) / 2 if uniform else b))) for b in batches]
    return batches


def _find_poolings(section: Mapping[str, Any], place: str, count: int) -> tuple[list[float], float]:
    """Mean lookups of a sample by table, and their standard deviation."""
    means = _per_table(section, place, "L", "Ls", count, zero=True)
    sigma, uniform = _find_spread(section, place, "sigma_L", "length_distribution")
    low = means[0]
    if not sigma:
        return means, 0.0
    if uniform and sigma < low:
        raise ValueError(f"{place}.sigma_L is {sigma:g}, the upper end of L to sigma_L; it must be at least {low:g}")
    if section.get("Ls") is None:  # the generator cuts a normal size to a whole number from 0
        normal, z = NormalDist(), low / sigma
        above, density = normal.cdf(z), normal.pdf(z)
        cut = max(low * above + sigma * density - above / 2 + density / (12 * sigma), 0.0)
        means = [(low + sigma) / 2 if uniform else cut] * count
    return means, math.sqrt(((sigma - low + 1) ** 2 - 1) / 12) if uniform else sigma


def _share_tables(
    config: Mapping[str, Any], place: str, count: int, rows: list[float], dims: list[float]
) -> dict[int, list[int]]:
    """Features that look into each table."""
    groups: dict[int, list[int]] = {}
    mapping = list(range(count)) if config.get("feature_table_map") is None else config["feature_table_map"]
    where = f"{place}.feature_table_map"
    for i, table in enumerate(_numbers(mapping, where, count, integer=True, zero=True)):
        groups.setdefault(table, []).append(i)
    for table, features in groups.items():
        if len({(rows[f], dims[f]) for f in features}) > 1:
            raise ValueError(f"{place}: features {features} share table {table}; their Es and Ds must be alike")
    if len(groups) < count:
        text = (
            f"{place}: {count} features share {len(groups)} tables; lookups are added up, and a sample gets one pooled"
        )
        warnings.warn(f"{text} row of each table", stacklevel=4)
    return dict(sorted(groups.items()))


def _find_laws(section: Mapping[str, Any], place: str, count: int) -> Callable[[int], Zipf]:
    """Law of a table by its rows: all tables have the same one, cut off."""
    hitters = _numbers(section.get("heavy_hitters"), f"{place}.heavy_hitters", zero=True, maximum=1)
    q = check_positive(f"{place}.zipf_q", section.get("zipf_q"))
    s = check_positive(f"{place}.zipf_s", section.get("zipf_s"), zero=True, maximum=10)
    if len(hitters) * count > _MOST_HITTERS:
        raise ValueError(f"{place} has {len(hitters)} heavy hitters for each of {count} tables; leave small ones out")

    def cut(rows: int) -> Zipf:
        kept = hitters[:rows]
        if len(kept) == rows:  # the last row gets what the others leave
            total = sum(kept)
            kept = [h / total for h in kept[:-1]] if total > 0 else []
        try:
            return Zipf(rows, s, max(q - 1, 2.0**-52 - 1), tuple(kept))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    return cut
