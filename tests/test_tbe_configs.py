"""Configurations of FBGEMM: the tables they describe, the lookups of its generator, and files that
are refused."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfkit.models.distributions import Zipf, unique_rows
from perfkit.readers.table_configs import read_tables
from perfkit.readers.tbe_configs import parse_tbe_config
from tests import samples

#: As TBEDataConfig.json() of FBGEMM writes it, with lists for each feature.
RECORDED: dict[str, Any] = {
    "T": 3,
    "E": 3334.0,
    "D": 64,
    "mixed_dim": True,
    "weighted": False,
    "use_cpu": False,
    "max_indices": 9999,
    "Es": [1000, 8, 8992],
    "Ds": [32, 64, 96],
    "embedding_specs": None,
    "feature_table_map": None,
    "batch_params": {
        "B": 512,
        "sigma_B": None,
        "vbe_distribution": None,
        "vbe_num_ranks": None,
        "Bs": [512, 512, 512],
    },
    "indices_params": {
        "heavy_hitters": [0.1, 0.05, 0.025, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01],
        "zipf_q": 2.5,
        "zipf_s": 1.15,
        "index_dtype": "torch.int64",
        "offset_dtype": "torch.int64",
    },
    "pooling_params": {
        "L": 13,
        "sigma_L": 6,
        "length_distribution": "normal",
        "Ls": [20.25, 1.0, 15.5],
    },
}


def changed(**changes: Any) -> dict[str, Any]:
    """The recorded configuration with other values; a name such as ``batch_params__B`` is one in a
    section."""
    config = copy.deepcopy(RECORDED)
    for path, value in changes.items():
        section, _, key = path.rpartition("__")
        if section:
            config[section][key] = value
        else:
            config[key] = value
    return config


def test_a_recorded_config() -> None:
    tables, batch = parse_tbe_config(RECORDED, itemsize=2)
    assert batch == 512
    sizes = [(t.rows, t.dim, t.pooling, t.itemsize, t.spread) for t in tables]
    assert sizes == [(1000, 32, 20.25, 2, 6), (8, 64, 1.0, 2, 6), (8992, 96, 15.5, 2, 6)]
    assert [t.name for t in tables] == ["table 0", "table 1", "table 2"]
    assert tables[0].exponent == 1.15
    law = tables[2].distribution
    assert isinstance(law, Zipf)
    assert (law.rows, law.exponent, law.shift) == (8992, 1.15, 1.5)
    assert law.heavy_hitters == tuple(RECORDED["indices_params"]["heavy_hitters"])
    small = tables[1].distribution  # 8 rows, 10 heavy hitters: the last row gets what is left
    shares = np.array([0.1, 0.05, 0.025, 0.01, 0.01, 0.01, 0.01, 0.01]) / 0.225
    assert small.buckets()[0] == pytest.approx(shares)


def test_a_sample_of_two_tables() -> None:
    tables = read_tables(samples.FOLDER / "tables.tbe.json")
    assert (tables.batch, tables.embedding) == (256, "fused")
    assert [(t.rows, t.dim, t.pooling) for t in tables] == [(1000, 64, 20.0), (100_000, 128, 4.5)]
    assert tables.tables[0].distribution == Zipf(1000, 1.1, 2.0, heavy_hitters=(0.2, 0.1))


def test_the_law_is_that_of_the_generator() -> None:
    """Row i is a heavy hitter, or has (i + q)**-s of what is left, i from 0."""
    tables, _ = parse_tbe_config(changed(Es=[5000, 5000, 5000]))
    hitters = np.array(RECORDED["indices_params"]["heavy_hitters"])
    tail = (np.arange(10, 5000) + 2.5) ** -1.15
    p = np.concatenate([hitters, (1 - hitters.sum()) * tail / tail.sum()])
    drawn = [
        len(np.unique(np.random.default_rng(seed).choice(5000, 20_000, p=p))) for seed in range(5)
    ]
    assert float(unique_rows(tables[0].distribution, 20_000)) == pytest.approx(
        np.mean(drawn), rel=0.02
    )


@pytest.mark.parametrize(("mean", "sigma"), [(20, 5), (3, 2), (1, 4), (100, 1)])
def test_normal_bags_are_cut_to_whole_numbers_from_zero(mean: int, sigma: int) -> None:
    params = {"L": mean, "sigma_L": sigma, "length_distribution": "normal"}
    tables, _ = parse_tbe_config(changed(pooling_params=params, Es=[1000, 1000, 1000]))
    drawn = np.maximum(np.random.default_rng(0).normal(mean, sigma, 400_000).astype(int), 0)
    assert tables[0].pooling == pytest.approx(drawn.mean(), rel=0.01)


def test_uniform_bags_lie_between_the_numbers() -> None:
    params = {"L": 4, "sigma_L": 10, "length_distribution": "uniform"}
    tables, _ = parse_tbe_config(changed(pooling_params=params, Es=[1000, 1000, 1000]))
    assert (tables[0].pooling, tables[0].spread) == (7, 2)
    with pytest.raises(ValueError, match="sigma_L is 3, the upper end"):
        parse_tbe_config(changed(pooling_params=params | {"sigma_L": 3}))


def test_single_numbers_hold_for_all_tables() -> None:
    sizes = {"T": 4, "E": 1e6, "D": 128, "batch_params": {"B": 1024}, "pooling_params": {"L": 20}}
    laws = {"heavy_hitters": [], "zipf_q": 0.1, "zipf_s": 0.1}
    tables, batch = parse_tbe_config({**sizes, "indices_params": laws})
    assert batch == 1024
    assert len(tables) == 4
    assert tables[3].distribution == Zipf(10**6, 0.1, -0.9)
    assert tables[3].spread == 0


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_bags_of_a_fixed_size_may_differ_between_tables(kind: str) -> None:
    """Old files write the sizes of all tables as a list `L`."""
    params = {"L": [20, 5, 7], "sigma_L": None, "length_distribution": kind}
    tables, _ = parse_tbe_config(changed(pooling_params=params))
    assert [table.pooling for table in tables] == [20, 5, 7]
    assert [table.spread for table in tables] == [0, 0, 0]


def test_uneven_batches_keep_their_lookups() -> None:
    config = changed(batch_params__Bs=[512, 256, 1024])
    tables, batch = parse_tbe_config(config)
    assert batch == 1024
    assert [batch * t.pooling for t in tables] == [512 * 20.25, 256 * 1.0, 1024 * 15.5]


SHARED = {"Es": [1000, 8992, 8992], "Ds": [32, 96, 96]}


def test_features_that_share_a_table() -> None:
    tables, _ = parse_tbe_config(changed(feature_table_map=[0, 1, 1], **SHARED))
    assert [(t.rows, t.pooling, t.spread, t.num_features) for t in tables] == [
        (1000, 20.25, 6, 1),
        (8992, 16.5, pytest.approx(math.hypot(6, 6)), 2),
    ]


@pytest.mark.parametrize(
    ("changes", "message", "left"),
    [
        ({"pooling_params__Ls": [0.0, 1.0, 2.0]}, "1 tables without lookups", 2),
        ({"colour": "red"}, "has colour, which perfkit does not know", 3),
    ],
)
def test_what_is_left_out_is_told(changes: dict[str, Any], message: str, left: int) -> None:
    with pytest.warns(UserWarning, match=message):
        assert len(parse_tbe_config(changed(**changes))[0]) == left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (SHARED | {"feature_table_map": [0, 1]}, "one for each of the 3"),
        (SHARED | {"feature_table_map": [0, 0, 1]}, "must be equal"),
        (SHARED | {"feature_table_map": [0, -1, 1]}, r"map\[1\] is -1"),
        ({"T": 10**12}, r"config\.T is 10{12}; .* at most 200000"),
        (
            {"Es": [1, 2]},
            r"config\.Es is \[1, 2\]; it must be a list with one for each of the 3 tables",
        ),
        ({"Es": [1, 2, 0]}, r"config\.Es\[2\] is 0"),
        ({"Ds": "64"}, r"config\.Ds is '64'; it must be a list"),
        ({"batch_params": None}, r"config\.batch_params is None"),
        ({"pooling_params__length_distribution": "zipf"}, "known are normal, uniform"),
        ({"Ds": None}, r"config\.mixed_dim draws the columns .* around D = .*as Ds$"),
        (
            {"batch_params": {"B": 100, "sigma_B": 10, "vbe_num_ranks": 8}},
            r"config\.batch_params\.sigma_B draws the samples of each table; .*as Bs$",
        ),
        ({"batch_params": {"B": 512.5}}, r"params\.B is 512\.5; it must be a whole number"),
        ({"batch_params__Bs": [512, 256.5, 1024]}, r"Bs\[1\] is 256\.5; .* a whole number"),
        ({"pooling_params": [20]}, r"config\.pooling_params is \[20\]"),
        ({"indices_params__zipf_s": 50}, r"indices_params\.zipf_s is 50"),
        ({"indices_params__heavy_hitters": 0.5}, "heavy_hitters is 0.5; it must be a list"),
        ({"indices_params__heavy_hitters": [0.5, "x"]}, r"heavy_hitters\[1\] is 'x'"),
        (
            {"indices_params__heavy_hitters": [0.9, 0.9]},
            r"config\.indices_params: heavy_hitters add up to 1\.8",
        ),
    ],
)
def test_configs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tbe_config(changed(**changes))


def write_config(folder: Path, content: Any) -> Path:
    """A file of a configuration, or of several."""
    path = folder / "set.json"
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_one_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, RECORDED)
    tables = read_tables(path)
    assert len(tables) == 3
    assert (tables.batch, tables.embedding, tables.name) == (512, "fused", "set")
    assert read_tables(path, batch=4096, itemsize=2).batch == 4096


def test_tables_of_several_configs_bear_its_number(tmp_path: Path) -> None:
    tables = read_tables(write_config(tmp_path, [RECORDED, RECORDED]))
    assert [t.name for t in tables][2:4] == ["0.table 2", "1.table 0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([RECORDED, changed(batch_params__Bs=[9, 9, 9])], r"set\.json has batches of 9, 512"),
        ([RECORDED, {"rows": 10, "dim": 4}], r"set\.json\[1\] is no TBEDataConfig"),
        (
            changed(pooling_params__Ls=[20.0, 9.0, 15.0]),
            r"pooling of 'table 1' is 9; it must be at most its 8 rows",
        ),
    ],
)
def test_configs_that_do_not_fit_together(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tables(write_config(tmp_path, content))
