"""Low-rank adapters (LoRA): the products of a Transformer layer on which they are put."""

from collections.abc import Sequence
from typing import Any

from perfkit.ground.units import check_choice, check_type, show

#: Products of attention and of the MLP of a layer, by the names that Hugging Face's PEFT and
#: torchtune use. Models with one product for queries, keys and values take the first three together.
ATTENTION_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
#: Names of several products: those of attention, of the MLP, and all of a layer.
GROUPS = {
    "attention": ATTENTION_PRODUCTS,
    "mlp": MLP_PRODUCTS,
    "all-linear": (*ATTENTION_PRODUCTS, *MLP_PRODUCTS),
}
#: Queries, keys and values in one product.
JOINED = "qkv_proj"


def check_modules(modules: Any) -> str | tuple[str, ...]:
    """Check the names of the products that get adapters.

    Parameters
    ----------
    modules : str or sequence of str
        A key of `GROUPS`, or names of products.

    Returns
    -------
    modules : str or tuple of str
        The same.

    Raises
    ------
    ValueError
        For an unknown name, for one that comes twice, and for none.
    """
    if isinstance(modules, str) and "," in modules:
        names = tuple(name.strip() for name in modules.split(","))
        raise ValueError(f"lora_modules is {show(modules)}, one text; give a list, {[*names]}")
    if isinstance(modules, str):
        return check_choice("lora_modules", modules, (*GROUPS, *GROUPS["all-linear"]))
    check_type("lora_modules", modules, Sequence)
    names = tuple(modules)
    for name in names:
        check_choice("lora_modules", name, GROUPS["all-linear"])
    if not names:
        raise ValueError(
            "lora_modules is empty; name products such as 'q_proj', or take 'all-linear'"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"lora_modules is {names}; name each product once")
    return names


def list_adapted(modules: str | Sequence[str], *, gated: bool, joins_qkv: bool) -> tuple[str, ...]:
    """List the products of a layer that get adapters.

    Parameters
    ----------
    modules : str or sequence of str
        What `check_modules` returns.
    gated : bool
        Whether the MLP has a product for a gate.
    joins_qkv : bool
        Whether queries, keys and values come from one product, which gets one adapter.

    Returns
    -------
    names : tuple of str
        Of `ATTENTION_PRODUCTS` and `MLP_PRODUCTS`, with `JOINED` in place of the first three if
        these are one product.

    Raises
    ------
    ValueError
        For a product that the model does not have, and for a part of one that is joined.

    Examples
    --------
    >>> list_adapted("attention", gated=True, joins_qkv=False)
    ('q_proj', 'k_proj', 'v_proj', 'o_proj')
    >>> list_adapted("attention", gated=True, joins_qkv=True)
    ('qkv_proj', 'o_proj')
    """
    if isinstance(modules, str) and modules in GROUPS:
        names = [name for name in GROUPS[modules] if gated or name != "gate_proj"]
    else:
        names = [modules] if isinstance(modules, str) else [*modules]
    if "gate_proj" in names and not gated:
        raise ValueError(
            "lora_modules has 'gate_proj' and gated is False; leave it out, or take gated=True"
        )
    if not joins_qkv:
        return tuple(names)
    parts = [name for name in names if name in ATTENTION_PRODUCTS[:3]]
    if not parts:
        return tuple(names)
    if len(parts) < 3:
        raise ValueError(
            f"lora_modules has {parts[0]!r}, and queries, keys and values of this model are one "
            "product; name q_proj, k_proj and v_proj, or none of them"
        )
    return (JOINED, *[name for name in names if name not in parts])
