"""Tables of TorchRec's configurations, of frames of their fields, of models and of constraints; and
what is refused."""

import re
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest

import perfkit as pk
from perfkit.workloads.tables import EmbeddingTable, TableSet
from tests.torchrec_stand_ins import (
    CacheParams,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FeatureProcessedEmbeddingBagCollection,
    Module,
    ParameterConstraints,
    PoolingType,
    ShardedEmbeddingBagCollection,
)

USER = EmbeddingBagConfig(1_000_000, 64, "user", DataType.FP16, ["clicks", "likes"])
ITEM = EmbeddingBagConfig(500, 32, "item", DataType.FP16, ["item"], pooling=PoolingType.MEAN)
CONSTRAINTS = {
    "user": ParameterConstraints(
        sharding_types=["row_wise", "column_wise"], min_partition=32, pooling_factors=[20.0, 3.5]
    ),
    "item": ParameterConstraints(pooling_factors=[2.0], num_poolings=[3.0], is_weighted=True),
}
#: What these two are, with the constraints.
WANTED = (
    EmbeddingTable(1_000_000, 64, 23.5, dtype="fp16", name="user", num_features=2),
    EmbeddingTable(500, 32, 6.0, dtype="fp16", name="item", weighted=True, num_features=3),
)


def refuse(message: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(message))


def read(source: Any, **options: Any) -> tuple[TableSet, list[str]]:
    """The tables of a source, and what is said about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tables = pk.read_tables(source, **options)
    assert all(warning.filename == __file__ for warning in caught)
    return tables, [str(warning.message) for warning in caught]


def test_configurations_with_constraints_are_tables() -> None:
    tables, said = read([USER, ITEM], constraints=CONSTRAINTS, batch=4096)
    assert tables.tables == WANTED
    assert (tables.batch, tables.embedding) == (4096, "fused")
    assert said == []
    mapped = {name: asdict(entry) for name, entry in CONSTRAINTS.items()}
    assert read([USER, ITEM], constraints=mapped)[0].tables == WANTED
    assert read((ITEM,), constraints={"item": CONSTRAINTS["item"]}) == (
        TableSet(WANTED[1:], embedding="fused", output_dtype="fp32"),
        [],
    )


def test_without_constraints_the_pooling_factor_is_said_to_be_unknown() -> None:
    tables, said = read([USER, ITEM])
    assert [table.pooling for table in tables] == [2.0, 1.0]
    assert len(said) == 1
    assert "the pooling factor of 2 tables ('user' first) is not known" in said[0]
    assert "pass constraints=" in said[0]
    _, said = read([ITEM], constraints={"item": ParameterConstraints()})
    assert said == []  # the planner itself takes 1


def test_a_default_of_constraints_is_that_of_each_feature() -> None:
    tables, _ = read([USER], constraints={"user": ParameterConstraints()})
    assert tables.tables[0].pooling == 2.0
    with refuse("pooling_factors has 1 entries for 2 features; give one for each feature"):
        read([USER], constraints={"user": ParameterConstraints(pooling_factors=[20.0])})


def write_frames(folder: Path) -> dict[str, Any]:
    """The two configurations as everything that has columns."""
    records = [asdict(USER), asdict(ITEM)]
    factors = [[20.0, 3.5], [2.0]]
    for record, factor in zip(records, factors, strict=True):
        record["pooling_factors"] = factor
    text = [{key: str(value) for key, value in record.items()} for record in records]
    for plain, record in zip(text, records, strict=True):
        plain["num_embeddings"] = record["num_embeddings"]
        plain["embedding_dim"] = record["embedding_dim"]
    frame = pandas.DataFrame(records)
    frame.to_csv(folder / "configs.csv", index=False)
    polars.DataFrame(text).write_parquet(folder / "configs.parquet")
    return {
        "records": records,
        "text": text,
        "pandas": frame,
        "polars": polars.DataFrame(text),
        "columns": {key: [record[key] for record in records] for key in records[0]},
        "csv": folder / "configs.csv",
        "parquet": folder / "configs.parquet",
    }


def test_fields_in_frames_and_files_are_the_same_tables(tmp_path: Path) -> None:
    wanted = (WANTED[0], replace(WANTED[1], pooling=2.0, weighted=False, num_features=1))
    for name, source in write_frames(tmp_path).items():
        tables, said = read(source)
        assert tables.tables == wanted, name
        assert said == [], name


def test_numbers_of_one_pooling_factor_are_those_of_each_feature() -> None:
    record = {
        "num_embeddings": 1000,
        "embedding_dim": 8,
        "pooling_factor": 4,
        "feature_names": "a,b,c",
    }
    assert read([record])[0].tables[0].pooling == 12.0
    assert read([record])[0].tables[0].num_features == 3
    assert read([{**record, "num_poolings": [1, 2, 2]}])[0].tables[0].num_features == 5
    listed = {**record, "pooling_factor": np.array([1.0, 2.0, 4.0])}
    assert read([listed])[0].tables[0].pooling == 7.0


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("user_id|friend_id", "names, each once: a list of str, or text with commas between them"),
        ("user_id;friend_id", "a name with '|', ';' or a space in it goes into a list"),
        ("user_id friend_id", "or text with commas"),
        ("['user_id' 'friend_id']", "or text with commas"),
        ("a,,b", "or text with commas"),
        (5, "feature_names is 5; it must be names"),
        (["a", 5], "it must be names"),
        (["a", "a"], "with 'a' twice"),
        ("a, a", "with 'a' twice"),
    ],
)
def test_names_of_features_that_are_no_list_are_refused(names: Any, words: str) -> None:
    record = {"num_embeddings": 1000, "embedding_dim": 8, "pooling_factor": 4}
    with pytest.raises(ValueError, match=re.escape(words)):
        read([{**record, "feature_names": names}])


def test_features_of_a_table_are_shown_where_there_are_several() -> None:
    record = {"num_embeddings": 1000, "embedding_dim": 8, "pooling_factor": 4}
    for names, count in (
        ("a,b", 2),
        ("['a b', 'c|d']", 2),
        (["a b"], 1),
        ([], 1),  # TorchRec names it after the table
    ):
        tables = read([{**record, "feature_names": names}])[0]
        assert tables.tables[0].num_features == count
        several = count > 1
        assert ("num_features=2" in repr(tables.tables[0])) is several
        assert ("2 features, 8 lookups" in repr(tables)) is several
        assert ("num_features" in tables.table().columns) is several


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"num_embeddings": 5}, "source row 0 lacks embedding_dim;"),
        ({"num_embeddings": -3, "embedding_dim": 8}, "source row 0: num_embeddings is -3"),
        ({"rows": -3, "embedding_dim": 8}, "source row 0: rows is -3"),
        ({"E": 5}, "source row 0 lacks D;"),
        ({"E": 5, "D": -8}, "source row 0: D is -8"),
        (
            {"num_embeddings": 5, "embedding_dim": 8, "pooling_factor": -1},
            "source row 0: pooling_factor is -1",
        ),
        (
            {"num_embeddings": 5, "embedding_dim": 8, "data_typ": "FP16"},
            "num_features, num_embeddings, embedding_dim, data_type, feature_names, pooling_factor; did you mean data_type?",
        ),
    ],
)
def test_errors_have_the_names_of_who_wrote_the_table(record: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read([record])


@pytest.mark.parametrize(
    ("data_type", "itemsize"),
    [
        (DataType.FP32, 4),
        ("FP16", 2),
        ("DataType.BF16", 2),
        ("<DataType.INT8: 'INT8'>", 1),
        ("torch.float16", 2),
        ("fp32", 4),
        ("INT64", 8),
        ("NFP8", 1),
    ],
)
def test_each_spelling_of_a_number_format_has_its_bytes(data_type: Any, itemsize: int) -> None:
    record = {
        "num_embeddings": 1000,
        "embedding_dim": 8,
        "pooling_factor": 1,
        "data_type": data_type,
    }
    tables, said = read([record])
    assert tables.tables[0].itemsize == itemsize
    assert said == []


def test_fields_that_are_not_used_are_listed_once() -> None:
    odd = replace(USER, weight_init_max=0.1, stash_weights=True, feature_names=["clicks"])
    odd.future_field = 7  # type: ignore[attr-defined]
    more = replace(ITEM, weight_init_max=0.1, need_pos=True)
    rules = {
        "user": ParameterConstraints(batch_sizes=[512], output_dtype=DataType.FP16),
        "item": ParameterConstraints(compute_kernels=["fused", "fused_uvm"]),
    }
    _, said = read([odd, more], constraints=rules)
    assert said == [
        "source: fields that are not used: weight_init_max, stash_weights, batch_sizes, "
        "future_field, need_pos, compute_kernels"
    ]
    record = {**asdict(USER), "weight_init_max": 0.1, "pooling_factors": [1.0, 2.0]}
    assert "fields that are not used: weight_init_max" in read([record])[1][0]


def test_kernels_and_caches_of_constraints_are_those_of_tables() -> None:
    cached = ParameterConstraints(
        compute_kernels=["fused_uvm_caching"], cache_params=CacheParams(load_factor=0.3)
    )
    table = read([ITEM], constraints={"item": cached})[0].tables[0]
    assert (table.kernel, table.load_factor) == ("uvm_caching", 0.3)
    rules = {"item": replace(cached, compute_kernels=["dense"])}
    tables, said = read([ITEM], constraints=rules)
    assert (tables.tables[0].kernel, tables.tables[0].load_factor) == ("fused", None)
    assert said == ["source: fields that are not used: cache_params"]
    rules = {"item": ParameterConstraints(compute_kernels=["quant"])}
    _, said = read([ITEM], constraints=rules)
    assert said == [
        "source: compute kernel 'quant' of 'item' is not known; it is priced as in device memory"
    ]
    record = {"rows": 10, "dim": 4, "compute_kernel": "fused_uvm_caching", "cache_params": 0.3}
    with pytest.raises(ValueError, match=r"cache_params is 0\.3; it must be CacheParams"):
        read([record])
    record["cache_params"] = {"load_factor": 0.3}
    assert read([record])[0].tables[0].load_factor == 0.3


def make_model(**parts: Any) -> Module:
    """A model whose collections are inside of other modules."""
    return Module(sparse=Module(**parts), over=Module(linear=Module()))


def test_tables_of_a_model_keep_the_paths_of_their_modules() -> None:
    history = EmbeddingConfig(300, 32, "user", DataType.FP16, ["history"])
    model = make_model(
        bags=EmbeddingBagCollection([USER, ITEM]),
        history=EmbeddingCollection([history]),
        processed=FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection([replace(ITEM, name="position")], is_weighted=True)
        ),
    )
    rules = {
        "user": ParameterConstraints(),
        "item": ParameterConstraints(),
        "position": ParameterConstraints(),
    }
    tables, said = read(model, constraints=rules)
    assert [(t.module, t.name, t.rows) for t in tables] == [
        ("sparse.bags", "user", 1_000_000),
        ("sparse.bags", "item", 500),
        ("sparse.history", "user", 300),
        ("sparse.processed", "position", 500),
    ]
    assert [table.weighted for table in tables] == [False, False, False, True]
    assert [table.pooled for table in tables] == [True, True, False, True]
    assert said == []
    plan = pk.Plan.round_robin(4, ranks=2).to_torchrec(tables.tables)
    assert {path: list(part) for path, part in plan.items()} == {
        "sparse.bags": ["user", "item"],
        "sparse.history": ["user"],
        "sparse.processed": ["position"],
    }
    collection = EmbeddingBagCollection([ITEM])
    assert read(collection)[0].tables[0].module == ""


def test_a_sharded_model_has_the_paths_of_the_model_inside() -> None:
    sharded = make_model(
        bags=ShardedEmbeddingBagCollection([ITEM]),
        processed=FeatureProcessedEmbeddingBagCollection(
            ShardedEmbeddingBagCollection([replace(ITEM, name="position")], is_weighted=True)
        ),
    )
    rules = {"item": ParameterConstraints(), "position": ParameterConstraints()}
    for wrapped in (
        Module(_dmp_wrapped_module=Module(module=sharded)),  # DDP inside of DMP
        Module(_dmp_wrapped_module=sharded),
        Module(_orig_mod=sharded),
        sharded,
    ):
        tables, said = read(wrapped, constraints=rules)
        assert [table.module for table in tables] == ["sparse.bags", "sparse.processed"]
        assert [table.weighted for table in tables] == [False, True]
        assert said == []
    own = Module(module=sharded)  # a part of the model has that name
    assert read(own, constraints=rules)[0].tables[0].module == "module.sparse.bags"


def test_rows_that_are_not_pooled_are_a_row_for_each_lookup() -> None:
    history = EmbeddingConfig(3000, 32, "history", feature_names=["history", "carts"])
    rules = {"history": ParameterConstraints(pooling_factors=[40.0, 2.0])}
    tables, said = read([history], constraints=rules)
    assert (tables.tables[0].results, tables.tables[0].num_features) == (42.0, 2)
    assert said == []


def test_constraints_are_arguments_of_a_search() -> None:
    tables = [
        EmbeddingTable(1000, 128, name="user", module="bags"),
        EmbeddingTable(1000, 128, name="user", module="history"),
        EmbeddingTable(1000, 128, name="item", module="bags"),
    ]
    rules = {**CONSTRAINTS, "item": ParameterConstraints(sharding_types=["grid_shard", "row_wise"])}
    found = pk.read_parameter_constraints(rules, tables)
    kinds = ["table_wise", "table_column_wise", "table_row_wise", "data_parallel"]
    assert found["forbid"]["bags.user"] == found["forbid"]["history.user"] == kinds
    assert "column_wise" in found["forbid"]["item"]
    assert found["min_columns"] == {"bags.user": 32, "history.user": 32}
    problem = TableSet(tables, batch=256, embedding="fused")
    plan = pk.shard(problem, "h100-sxm-8", ranks=2, steps=10, **found).plan
    assert {placement.kind for placement in plan.placements} <= {"row_wise", "column_wise"}


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ([], "constraints is []; it must be ParameterConstraints by the name of their table"),
        ({3: ParameterConstraints()}, "constraints has the table 3; it must be a name"),
        (
            {"itemm": ParameterConstraints()},
            "table of constraints is 'itemm'; known are item, user",
        ),
        ({"item": 5}, "constraints of 'item' are 5; they must be ParameterConstraints"),
        ({"item": {"sharding_type": ["row_wise"]}}, "did you mean 'sharding_types'?"),
        ({"item": {"pooling_factors": ["x"]}}, "pooling_factors is ['x']; it must be numbers"),
        ({"item": {"num_poolings": [1, 2]}}, "num_poolings has 2 entries for 1 features; give one"),
        ({"item": {"compute_kernel": 3}}, None),
    ],
)
def test_constraints_that_cannot_be(constraints: Any, message: str | None) -> None:
    if message is None:
        assert read([USER, ITEM], constraints=constraints)
        return
    with refuse(message):
        read([USER, ITEM], constraints=constraints)


def test_sharding_types_that_cannot_be() -> None:
    tables = [EmbeddingTable(10, 8, name="item")]
    with refuse("table of constraints is 'other'; known are item"):
        pk.read_parameter_constraints({"other": ParameterConstraints()}, tables)
    with refuse("sharding type of 'item' is 'rowwise'; known are table_wise"):
        rules = {"item": ParameterConstraints(sharding_types=["rowwise"])}
        pk.read_parameter_constraints(rules, tables)
    with refuse("sharding_types of 'item' is grid_shard alone, which perfkit does not price"):
        rules = {"item": ParameterConstraints(sharding_types=["grid_shard"])}
        pk.read_parameter_constraints(rules, tables)


def like(**values: Any) -> Any:
    """An object with these attributes."""
    return type("Planned", (), values)()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([replace(USER, use_virtual_table=True)], "source[0]: use_virtual_table is True: num_emb"),
        (
            [replace(USER, data_type=DataType.INT4)],
            "source[0]: data_type is INT4, less than a byte",
        ),
        ([replace(USER, data_type="FP17")], "source[0]: data_type is 'FP17'; known are FP32, FP16"),
        (
            [replace(USER, num_embeddings=0)],
            "source[0]: num_embeddings is 0; it must be a whole number above 0",
        ),
        ([USER, 5], "source[1] is 5; it must be a configuration of TorchRec as the others"),
        ([USER, replace(ITEM, name="user")], "source: two tables are named 'user'"),
        (CONSTRAINTS, "source is ParameterConstraints; pass them as constraints="),
        (
            {"user": USER},
            "source is configurations by name; pass them as a list, list(source.values())",
        ),
        (
            [EmbeddingBagCollection([USER])],
            "source is a list of collections; pass the model that has",
        ),
        ([like(num_embeddings=5)], "source is a list of torch's embeddings; pass a list of dicts"),
        (like(plan={"m": {}}), "source is a plan, which has no rows and columns; pass the model"),
        (
            like(_stats=[]),
            "source is a planner; plan, and pass '\\n'.join(planner._stats[0]._stats_",
        ),
        (
            make_model(),
            "source is a Module without an EmbeddingBagCollection or EmbeddingCollection",
        ),
        (EmbeddingBagCollection([]), "source is a EmbeddingBagCollection without an"),
        (EmbeddingBagCollection([5]), "source has 5 among its tables; it must be a configuration"),  # type: ignore[list-item]
        (
            [{"num_embeddings": 9, "embedding_dim": 4, "colour": 1, "shape": 2}],
            "source row 0 has columns that are not known: colour, shape; known here are rows, dim",
        ),
        (
            [{"num_embeddings": 9, "embedding_dim": 4, "itemsize": 4, "data_type": "FP16"}],
            "it has data_type and itemsize, which are the same; give one",
        ),
        (
            [{"num_embeddings": 9, "embedding_dim": 4, "is_weighted": "perhaps"}],
            "is_weighted is 'perhaps'; it must be True or False",
        ),
    ],
    ids=range(18),
)
def test_tables_of_torchrec_that_cannot_be(source: Any, message: str) -> None:
    with refuse(message):
        read(source)


def test_constraints_of_what_has_none_are_refused() -> None:
    with refuse("constraints are for configurations, models and frames of TorchRec"):
        pk.read_tables("mlperf-dlrm-v1", constraints={})
    with refuse("constraints are for configurations, models and frames of TorchRec"):
        pk.read_tables("#  FQN  Sharding  Ranks  #", constraints={})


def test_thousands_of_configurations_are_read_fast() -> None:
    """3,000 took 0.15 s when this was written."""
    many = [replace(ITEM, name=f"t{number}") for number in range(3000)]
    rules = {config.name: ParameterConstraints(pooling_factors=[3.0]) for config in many}
    tables, said = read(make_model(bags=EmbeddingBagCollection(many)), constraints=rules)
    assert len(tables) == 3000
    assert said == []
    assert len(pk.read_parameter_constraints(rules, tables)["forbid"]) == 0


def test_errors_of_tables_say_once_what_to_do_and_know_paths() -> None:
    config = EmbeddingBagConfig(10, 8, "t_0", DataType.INT4, ["f"])
    with pytest.raises(ValueError, match=r"less than a byte.*; change the table$"):
        pk.read_tables(config)
    config.data_type = DataType.FP32
    rules = {"sparse.ebc.t_0": ParameterConstraints(pooling_factors=[2.0])}
    with pytest.raises(ValueError, match="known are t_0; did you mean 't_0'"):
        pk.read_tables(config, constraints=rules)
