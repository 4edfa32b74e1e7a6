"""Forms of the time of kernels on a CPU, spelled out."""

import pytest

from perfkit.models.kernels import TERMS, additive, in_context, list_terms, term_names

#: Sizes of a batch of three products of 10 rows, 40 columns and an inner size of 5.
PRODUCTS = {"batch": 3.0, "m": 10.0, "n": 40.0, "k": 5.0, "flops": 12_000.0}


@pytest.mark.parametrize(
    ("term", "units"),
    [
        ("launch", 1),
        ("tiled_flops", 2 * 3 * 16 * 64 * 5),  # tiles of 8 rows and 32 columns
        ("blocked_flops", 12_000 * (48 / 40) ** 2),  # blocks of 16 channels
        ("products", 3),
        ("product_rows", 3 * 10),
        ("outputs", 3 * 10 * 40),
        ("windows", 10 * 5),
        ("left", 3 * 10 * 5),
        ("right", 3 * 5 * 40),
        ("columns", 40),
    ],
)
def test_each_term_of_products_counts_its_units(term: str, units: float) -> None:
    assert TERMS[term](PRODUCTS) == pytest.approx(units)
    assert additive(PRODUCTS, **{term: 1e-9}) == pytest.approx(units * 1e-9)


def test_a_single_channel_fills_a_block() -> None:
    assert TERMS["blocked_flops"]({"flops": 700.0, "n": 1.0}) == 700 * 16**2


def test_only_windows_beyond_3_by_3_are_wide() -> None:
    assert TERMS["wide_flops"]({"flops": 700.0, "k": 4.0}) == 0
    assert TERMS["wide_flops"]({"flops": 700.0, "k": 9.0}) == 0
    assert TERMS["wide_flops"]({"flops": 700.0, "k": 10.0}) == 700


def test_a_sort_takes_a_step_for_each_doubling() -> None:
    assert TERMS["sorted_lookups"]({"lookups": 1024.0}) == 1024 * 10
    assert TERMS["sorted_lookups"]({"lookups": 1.0}) == 1  # one lookup is touched all the same


def test_a_variant_without_terms_of_its_own_has_those_of_its_class() -> None:
    assert term_names("gemm", "nt") == term_names("gemm", "tn")
    assert "tiled_flops" in term_names("gemm", "nt")
    assert "wide_flops" in term_names("convolution", "forward_depthwise")
    assert "wide_flops" not in term_names("convolution", "forward")


def test_terms_of_a_class_are_those_of_all_its_variants() -> None:
    assert tuple(list_terms("rowwise")) == term_names("rowwise", "softmax")
    variants = ["forward", "forward_grouped", "forward_depthwise"]
    of_variants = {name for variant in variants for name in term_names("convolution", variant)}
    assert set(list_terms("convolution")) == of_variants
    assert list_terms("unheard-of") == []


def test_without_a_fit_a_context_adds_nothing() -> None:
    sizes = {"hot": 1e-3, "cold": 2e-4, "page_walks": 50.0}
    assert in_context(sizes) == pytest.approx(1.2e-3)
    fitted = in_context(sizes, scale=1.1, cold_scale=0.5, launch=1e-6, page_walks=1e-7)
    assert fitted == pytest.approx(1.1e-3 + 1e-4 + 1e-6 + 5e-6)
