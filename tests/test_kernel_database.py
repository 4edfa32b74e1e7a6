"""The reader of the public kernel database: small files with every difficulty, and the real
files."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from perfkit.models.collectives import bus_bandwidth
from perfkit.readers.kernel_database import (
    find_database,
    list_tables,
    read_attention,
    read_casts,
    read_collectives,
    read_gemms,
)
from tests import samples

WITNESS = "seconds collector collector_version kernel file"
Rows = list[dict[str, Any]]
Add = Callable[..., Path]


def writer(home: Path) -> Add:
    """Function that adds a table to a database below `home`."""

    def add(place: str, table: str, rows: Rows) -> Path:
        system, collector, version = place.split("/")
        folder = (
            home
            / "aiconfigurator_core"
            / "systems"
            / "data"
            / system
            / "family"
            / collector
            / version
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{table}_perf.parquet"
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(path)
        return path

    return add


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    monkeypatch.setenv("PERFKIT_KERNEL_DATABASE", str(tmp_path))
    return writer(tmp_path)


def sweep(version: str | None, latency: float = 0.01, **changes: Any) -> Rows:
    """One message; without a version as the oldest files have it: fewer columns, in another
    order."""
    row = {
        "nccl_dtype": "half",
        "num_gpus": 8,
        "message_size": 1024,
        "op_name": "all_reduce",
        "latency": latency,
    }
    about = {"framework": "TRTLLM", "version": version, "device": "X", "kernel_source": "NCCL"}
    return [(row if version is None else {**about, **row}) | changes]


def product(latency: float = 0.1, **changes: Any) -> dict[str, Any]:
    about = {
        "framework": "SGLang",
        "version": "0.5.14",
        "device": "X",
        "op_name": "gemm",
        "kernel_source": "torch",
    }
    return {
        **about,
        "gemm_dtype": "bfloat16",
        "m": 64,
        "n": 128,
        "k": 256,
        "latency": latency,
    } | changes


def attend(**changes: Any) -> dict[str, Any]:
    about = {
        "framework": "SGLang",
        "version": "0.5.14",
        "op_name": "context_attention",
        "kernel_source": "fa3",
    }
    shape = {
        "batch_size": 2,
        "isl": 512,
        "num_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "step": 0,
    }
    return {
        **about,
        **shape,
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "latency": 0.05,
    } | changes


def test_messages_are_bytes_and_times_seconds(add: Add) -> None:
    rows = sweep("2.29.2") + sweep("2.29.2", nccl_dtype="int8", op_name="alltoall", num_gpus=2)
    path = add("h/nccl/2.27.3", "nccl", rows)
    frame = read_collectives("h")
    names = (
        "system operation ranks nodes dtype nbytes seconds algbw busbw library library_version file"
    )
    assert frame.columns == names.split()
    first, second = frame.rows(named=True)
    assert first["dtype"] == "fp16"
    assert first["nbytes"] == 2048
    assert first["seconds"] == pytest.approx(1e-5)
    assert second["dtype"] == "int8"
    assert second["nbytes"] == 1024
    assert second["operation"] == "all_to_all"
    assert first["algbw"] == pytest.approx(2048e5)
    for row in (first, second):
        expected = bus_bandwidth(
            row["nbytes"], row["seconds"], ranks=row["ranks"], operation=row["operation"]
        )
        assert row["busbw"] == pytest.approx(expected)
    assert (find_database() / first["file"]) == path
    assert first["library"] == "nccl"
    assert first["nodes"] is None


def test_the_version_of_the_rows_counts_not_that_of_the_folder(add: Add) -> None:
    add("h/nccl/2.23", "nccl", sweep(None, 0.04))
    add("h/nccl/2.27.3", "nccl", sweep("2.29.2", 0.01) + sweep("2.29.2", 0.02))
    add("h/nccl/2.29.2", "nccl", sweep("2.29.2", 0.03))
    newest = read_collectives("h")
    assert newest["seconds"].to_list() == pytest.approx([1e-5, 2e-5, 3e-5])
    assert set(newest["library_version"]) == {"2.29.2"}


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.5.6.post2", "0.5.14"),
        ("1.3.0rc3", "1.3.0rc20"),
        ("1.3.0rc20", "1.3.0"),
        ("0.9", "0.12"),
        ("0.5.9", "0.5.9.post1"),
        ("0.20.0", "0.20.1.dev3+g99d20260430"),
    ],
)
def test_newest_version(add: Add, older: str, newer: str) -> None:
    for version in (newer, older):
        add(f"h/sglang/{version}", "gemm", [product(version=version)])
    assert read_gemms("h")["collector_version"].to_list() == [newer]


def test_a_version_of_few_rows_that_hides_the_others_is_named(add: Add) -> None:
    """A file is measured by one version; another one on one row may be damage."""
    rows = [product(n=2**power) for power in range(5, 12)]
    add("h/sglang/0.5.14", "gemm", [*rows, product(version="2.5")])
    with pytest.warns(UserWarning, match=r"1 of 8 rows of .* version 2\.5 .* correct it") as said:
        assert read_gemms("h")["collector_version"].to_list() == ["2.5"]
    assert len(said) == 1
    add("h/sglang/0.5.14", "gemm", rows)
    add("h/sglang/2.5", "gemm", [product(version="2.5")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_gemms("h")["collector_version"].to_list() == ["2.5"]


def test_each_collector_has_its_newest_version(add: Add) -> None:
    add("h/sglang/0.5.14", "gemm", [product(0.3)])
    add("h/vllm/0.24.0", "gemm", [product(0.1, framework="VLLM", version="0.24.0")])
    frame = read_gemms("h")
    assert frame.columns == ["system", "dtype", *"mnk", *WITNESS.split()]
    rows = frame.select("collector", "collector_version", "seconds").rows()
    assert rows == [
        ("sglang", "0.5.14", pytest.approx(3e-4)),
        ("vllm", "0.24.0", pytest.approx(1e-4)),
    ]


def test_number_formats(add: Add) -> None:
    add(
        "h/sglang/0.5.14",
        "gemm",
        [product(gemm_dtype=name) for name in ("bfloat16", "fp8", "fp8_block")],
    )
    add("a/sglang/0.5.14", "gemm", [product(gemm_dtype="float16")])
    assert read_gemms("h")["dtype"].to_list() == ["bf16"]
    assert read_gemms("h", dtype="fp8")["dtype"].to_list() == ["fp8"], (
        "a part of a name is not the name"
    )
    assert read_gemms("h", dtype=None)["dtype"].to_list() == ["bf16", "fp8", "fp8_block"]
    for system, name, known in (
        ("h", "fp4", "bf16, fp8, fp8_block"),
        ("a", "bf16", "fp16"),
        ("a", "float16", "fp16"),
    ):
        with pytest.raises(ValueError, match=f"dtype is '{name}'; known are {known}"):
            read_gemms(system, dtype=name)


def test_attention(add: Add) -> None:
    add("h/sglang/0.5.14", "context_attention", [attend(), attend(window_size=128)][1:])
    add("h/trtllm/1.0.0", "context_attention", [attend(framework="TRTLLM", version="1.0.0")])
    encoder = attend(op_name="encoder_attention")
    for name in ("num_key_value_heads", "kv_cache_dtype", "step"):
        del encoder[name]
    add("h/sglang/0.5.14", "encoder_attention", [encoder])
    frame = read_attention("h")
    shape = ["causal", "batch", "sequence", "past", "heads", "kv_heads", "head_dim", "window"]
    assert frame.columns == ["system", "dtype", "kv_dtype", *shape, *WITNESS.split()]
    causal, full = (True, 2, 512, 0, 16, 4, 128), (False, 2, 512, 0, 16, 16, 128)
    assert frame.select(shape).rows() == [(*causal, 128), (*causal, 0), (*full, 0)]
    assert frame["kv_dtype"].to_list() == ["bf16", "bf16", "bf16"]
    assert frame["seconds"].to_list() == pytest.approx([5e-5, 5e-5, 5e-5])
    assert frame["collector"].to_list() == ["sglang", "trtllm", "sglang"]


def test_casts_read_two_bytes_and_write_one(add: Add) -> None:
    about = {"framework": "VLLM", "version": "0.24.0", "kernel_source": "static"}
    add(
        "h/vllm/0.24.0",
        "scale_matrix",
        [{**about, "m": 1000, "k": 4096, "quant_dtype": "fp8", "latency": 0.004}],
    )
    row = read_casts("h").row(0, named=True)
    assert row["nbytes"] == 3 * 1000 * 4096
    assert row["seconds"] == pytest.approx(4e-6)
    assert (row["rows"], row["columns"], row["dtype"]) == (1000, 4096, "fp8")


def test_pointers_broken_files_and_missing_columns(add: Add) -> None:
    path = add("h/sglang/0.5.14", "gemm", [product()])
    sound, pointer = (
        path.read_bytes(),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    )
    broken = r"gemm_perf\.parquet cannot be read"
    contents = {
        pointer: r"gemm_perf\.parquet cannot be read: it is a Git LFS pointer.*git lfs pull",
        sound[:99]: broken,
        b"<html>": broken,
    }
    for data, message in contents.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_gemms("h")
    row = product()
    del row["k"]
    add("h/sglang/0.5.14", "gemm", [row])
    with pytest.raises(
        ValueError, match=r"gemm_perf\.\w+ has no column k; it has framework, version.*, latency"
    ):
        read_gemms("h")


def test_unknown_names_are_answered_with_the_known_ones(add: Add) -> None:
    path = add("h100_sxm/sglang/0.5.14", "gemm", [product()])
    (find_database() / "a30").mkdir()
    with pytest.raises(
        ValueError, match=r"system is 'h100'; known are h100_sxm; did you mean 'h100_sxm'\?"
    ):
        read_gemms("h100")
    with pytest.raises(ValueError, match="system is 'a30'; known are h100_sxm"):
        list_tables("a30")
    with pytest.raises(
        ValueError, match="table of h100_sxm is 'context_attention'; known are gemm"
    ):
        read_attention("h100_sxm")
    with pytest.raises(ValueError, match="table of h100_sxm is 'nccl'; known are gemm"):
        read_collectives("h100_sxm")
    add("h100_sxm/nccl/2.29.2", "nccl", sweep("2.29.2", nccl_dtype="fp5"))
    with pytest.raises(
        ValueError,
        match="nccl of h100_sxm has no row that can be used: 1 rows have the unknown number format 'fp5'",
    ):
        read_collectives("h100_sxm")
    row = list_tables().filter(pl.col("table") == "gemm").row(0, named=True)
    assert (row["collector"], row["version"], row["nbytes"]) == (
        "sglang",
        "0.5.14",
        path.stat().st_size,
    )


def test_what_was_not_measured_is_left_out_aloud(add: Add) -> None:
    add("h/sglang/0.5.14", "gemm", [product(), product(0.0, m=1), product(-1.0, m=2)])
    text = "2 of 3 rows have no positive time and are left out; the first is in h/.*gemm"
    with pytest.warns(UserWarning, match=text):
        assert read_gemms("h")["m"].to_list() == [64]


@pytest.mark.parametrize(
    "damage",
    [
        {"m": None},
        {"n": 0},
        {"k": -64},
        {"m": "many"},
        {"k": 2.5},
        {"n": 1e300},
        {"m": float("nan")},
        {"gemm_dtype": None},
        {"gemm_dtype": "?"},
        {"latency": "slow"},
        {"latency": None},
        {"version": "1e300"},
    ],
    ids=str,
)
def test_a_damaged_product_spoils_no_file(add: Add, damage: dict[str, Any]) -> None:
    sound = [product(m=size) for size in (64, 128)]
    add("h/sglang/0.5.14", "gemm", sound)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = read_gemms("h", dtype=None)
    add("h/sglang/0.5.14", "gemm", [sound[0], product(**damage), sound[1]])
    with pytest.warns(UserWarning, match=r"1 of 3 rows ha(ve|s)|1 of 3 rows name") as told:
        assert read_gemms("h", dtype=None).equals(expected)
    assert len(told) == 1
    assert "are left out; the first is in h/" in str(told[0].message)
    add("h/sglang/0.5.14", "gemm", [product(**damage)])
    with pytest.raises(ValueError, match="gemm of h has no row that can be used: 1 rows"):
        read_gemms("h", dtype=None)


def test_damaged_rows_of_several_causes_are_counted_in_one_warning(add: Add) -> None:
    damaged = [product(m=0), product(m=None), product(gemm_dtype="?"), product(0.0)]
    add("h/sglang/0.5.14", "gemm", [product(), *damaged])
    causes = (
        r"4 of 5 rows are left out: 2 have no positive whole number m, 1 have no positive time, "
        r"1 have the unknown number format '\?'; the first is in h/"
    )
    with pytest.warns(UserWarning, match=causes):
        assert read_gemms("h", dtype=None)["m"].to_list() == [64]


def test_damaged_messages_attention_and_casts_spoil_no_file(add: Add) -> None:
    damaged = [
        *sweep("2.29.2", num_gpus=None),
        *sweep("2.29.2", message_size=0),
        *sweep("2.29.2", nccl_dtype="fp5"),
        *sweep("2.29.2", op_name="gossip"),
    ]
    add("h/nccl/2.29.2", "nccl", [*sweep("2.29.2"), *damaged])
    with pytest.warns(UserWarning, match="4 of 5 rows are left out: .* operation 'gossip'"):
        assert len(read_collectives("h")) == 1
    add("h/sglang/0.5.14", "context_attention", [attend(), attend(step="x"), attend(isl=-1)])
    with pytest.warns(UserWarning, match="2 of 3 rows are left out: .*number isl.*number step"):
        assert len(read_attention("h")) == 1
    cast = {"op_name": "scale_matrix", "quant_dtype": "fp8", "m": 1000, "k": 64, "latency": 0.01}
    about = {"framework": "SGLang", "version": "0.5.14", "kernel_source": "torch_ops"}
    rows = [{**about, **cast}, {**about, **cast, "m": None}]
    add("h/sglang/0.5.14", "scale_matrix", rows)
    with pytest.warns(UserWarning, match="1 of 2 rows have no positive whole number m"):
        assert len(read_casts("h")) == 1


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented database of `tests/data`."""
    monkeypatch.setenv("PERFKIT_KERNEL_DATABASE", str(samples.FOLDER / "kernel_database"))


def test_a_sample_lists_its_tables(sample: None) -> None:
    tables = list_tables("x60")
    assert set(tables["table"]) == {"context_attention", "gemm", "nccl", "scale_matrix"}
    assert set(tables["collector"]) == {"nccl", "sglang", "vllm"}
    assert (tables["nbytes"] > 0).all()


def test_a_sample_of_products(sample: None) -> None:
    products = read_gemms("x60", dtype=None)
    assert products.select("dtype", "m", "n", "k").rows() == [
        ("bf16", 64, 128, 256),
        ("fp8", 64, 128, 256),
    ]
    assert products["seconds"].to_list() == pytest.approx([1e-5, 6e-6])


def test_a_sample_of_collectives(sample: None) -> None:
    """A latency of 20 µs, and 20 ps for each element of two bytes."""
    rows = read_collectives("x60")
    assert set(rows["operation"]) == {"all_reduce", "all_to_all"}
    assert set(rows["ranks"]) == {2, 8}
    elements = rows["nbytes"] / 2
    assert rows["seconds"].to_list() == pytest.approx((2e-5 + 2e-11 * elements).to_list())


def test_samples_of_attention_and_casts(sample: None) -> None:
    (attention,) = read_attention("x60").to_dicts()
    assert (attention["dtype"], attention["kv_dtype"]) == ("bf16", "fp8")
    assert (attention["heads"], attention["kv_heads"], attention["sequence"]) == (16, 4, 512)
    (cast,) = read_casts("x60").to_dicts()
    assert cast["nbytes"] == 3 * 1000 * 4096


def test_every_folder_on_the_way_finds_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = writer(tmp_path)("h/sglang/0.5.14", "gemm", [product()])
    data = next(parent for parent in path.parents if parent.name == "data")
    for place in (data, data.parent, data.parent.parent, tmp_path):
        monkeypatch.setenv("PERFKIT_KERNEL_DATABASE", str(place))
        assert find_database() == data
        assert list_tables()["system"].to_list() == ["h"]


def test_the_installed_package_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer(tmp_path)("h/sglang/0.5.14", "gemm", [product()])
    (tmp_path / "aiconfigurator_core" / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.delenv("PERFKIT_KERNEL_DATABASE", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_database() == tmp_path / "aiconfigurator_core/systems/data"
    assert "aiconfigurator_core" not in sys.modules


def test_no_database_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFKIT_KERNEL_DATABASE", str(tmp_path))
    text = "no kernel database of release 0.12 or later in .*pip install --no-deps 'aiconfigurator-core>=0"
    with pytest.raises(FileNotFoundError, match=text):
        find_database()
    monkeypatch.delenv("PERFKIT_KERNEL_DATABASE")
    monkeypatch.setattr("perfkit.readers.kernel_database.find_spec", lambda name: None)
    with pytest.raises(
        FileNotFoundError, match=r"no kernel database .* installed; .*PERFKIT_KERNEL_DATABASE"
    ):
        read_gemms("h100_sxm")


@pytest.fixture(scope="module")
def database() -> Path:
    """The database that the extracts of the validation data were made from."""
    try:
        folder = find_database()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if not list(folder.parents[2].glob("aiconfigurator_core-0.12.0.dist-info")):
        pytest.skip(f"{folder} is not release 0.12.0, which the validation data comes from")
    return folder


@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm"])
def test_extracted_collectives_are_reproduced(
    system: str, database: Path, shared_data: Path
) -> None:
    theirs = pl.read_csv(
        shared_data / f"nccl/nccl_{system}.csv", infer_schema_length=None
    ).with_columns(
        operation=pl.col("op").replace("alltoall", "all_to_all"),
        dtype=pl.col("dtype").replace("half", "fp16"),
        version=pl.col("nccl_version_recorded").replace("unrecorded", ""),
        nbytes="message_bytes",
        ranks="num_gpus",
    )
    ours = read_collectives(system).with_columns(
        version=pl.col("library_version").fill_null(""),
        source_dir_version=pl.col("file").str.split("/").list.get(-2),
    )
    keys = ["operation", "dtype", "ranks", "nbytes", "version", "source_dir_version"]
    joined = ours.with_columns(rep=pl.int_range(pl.len()).over(keys)).join(
        theirs, on=[*keys, "rep"], how="left"
    )
    assert (
        ours.height
        == joined.height
        == theirs.filter(pl.col("version").is_in(ours["version"].unique())).height
        > 0
    )
    assert (joined["seconds"] / joined["latency_us"] * 1e6 - 1).abs().max() < 1e-9


@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm"])
def test_extracted_products_are_reproduced(system: str, database: Path, shared_data: Path) -> None:
    theirs = pl.read_csv(shared_data / f"gemm/gemm_bf16_{system}.csv", infer_schema_length=None)
    wide = read_gemms(system).pivot(on="collector", index=["m", "n", "k"], values="seconds")
    joined = theirs.join(wide, on=["m", "n", "k"], how="left")
    assert joined.height == theirs.height == 3000
    for collector in ("sglang", "trtllm", "vllm"):
        expected = joined[f"latency_us_{collector}"]
        assert joined[collector].null_count() == expected.null_count()
        error = (joined[collector] * 1e6 / expected - 1).abs().max()
        assert error < 2e-5, f"{collector}: extracts are rounded to 0.1 ns"


@pytest.mark.parametrize(
    "release", ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200", "l40s"]
)
def test_real_systems_are_complete(release: str, database: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collectives, products = read_collectives(release), read_gemms(release)
    assert set(collectives["operation"]) == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    assert set(products["collector"]) == {"sglang", "trtllm", "vllm"}
    assert not products.null_count().sum_horizontal().item()
