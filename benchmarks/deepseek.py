"""DeepSeek-V3: published speeds beside predictions, one fact after the other.

    python -m benchmarks.deepseek

Its own training on 2,048 H800 (arXiv:2412.19437, tables 1 and section 3: 180 thousand H800 hours for
a trillion tokens; 16 stages, 64 ranks that share experts on 8 nodes, ZeRO 1, fp8 with scales of
blocks, sequences of 4096, 15,360 in a batch), whose schedule, DualPipe, hides the exchange of
tokens, and NVIDIA's NeMo AutoModel on 256 and 1,024 H100 in bf16 (docs/performance-summary.mdx at
2861c41). Nothing was fitted to them. The last column leaves out the time in which tokens are
exchanged and nothing hides it: what is left is the least that a schedule that hides all of it can
reach.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: NVLink of an H800, one way [B/s].
_NVLINK = 2e11
#: Tokens of a GPU of DeepSeek's training: a trillion in 180 thousand hours [1/s].
_TOKENS = 1e12 / (180e3 * 3600.0)
#: Tokens of a sequence in all rows [-].
_SEQUENCE = 4096


class Case(NamedTuple):
    """A training that was published.

    Parameters
    ----------
    name : str
        What it is, or what is stated of it beside the row before.
    model : Transformer
        The model.
    platform : Platform
        Where.
    strategy : Strategy
        How.
    stack : str
        The software.
    tokens : float
        Published tokens of a GPU [1/s].
    """

    name: str
    model: Transformer
    platform: Platform
    strategy: Strategy
    stack: str
    tokens: float


def list_cases() -> list[Case]:
    """DeepSeek's own training, with more and more of its facts, and those of AutoModel."""
    sizes: dict[str, Any] = {"sequence": _SEQUENCE, "mixed": True, "fused": True}
    model = Transformer.preset(
        "deepseek-v3",
        batch=15360,
        dtype="fp8",
        fp8_recipe="blockwise",
        attention="flash3",
        mtp_layers=1,
        fused_permutation=True,
        **sizes,
    )
    free = replace(model, expert_groups=0, top_groups=0)
    h800 = load_platform("h100-sxm-8").with_link("intra", bandwidth=_NVLINK).with_nodes(256)
    plain = Strategy(pp=16, dp=128, ep=64, zero=1)
    once = replace(plain, dispatch="once")
    even = replace(once, last_layers=1)
    cases = []
    for name, routed, strategy in (
        ("2,048 H800: a copy of a token for each expert", free, plain),
        ("... a token once to a node", free, once),
        ("... to four nodes at most", model, once),
        ("... one layer beside head and further token", model, even),
        ("... weight gradients wait (zero bubble)", model, replace(even, schedule="zero_bubble")),
    ):
        cases.append(Case(name, routed, h800, strategy, "megatron-te", _TOKENS))
    # its balanced gate (`FakeBalancedGate`) gives each token eight experts that follow one another,
    # which lie on two ranks of one node: one of 32 groups. 61 layers lie in 16 chunks, whose first
    # holds the dense layers, instead of 32
    half = Transformer.preset("deepseek-v3", batch=512, dtype="bf16", attention="flash3", **sizes)
    half = replace(half, expert_groups=32, top_groups=1)
    for nodes, batch, tokens in ((32, 512, 1002.0), (128, 8192, 865.0)):
        strategy = Strategy(
            pp=4,
            dp=2 * nodes,
            ep=64,
            zero=2,  # FSDP2 with reshard_after_forward false
            checkpoint="full",
            dispatch="once",
            schedule="interleaved",
            chunks=4,
        )
        platform = load_platform("h100-sxm-8").with_nodes(nodes)
        name = f"AutoModel, {8 * nodes:,} H100"
        cases.append(Case(name, replace(half, batch=batch), platform, strategy, "fsdp", tokens))
    return cases


def compare_case(case: Case) -> dict[str, Any]:
    """A training beside its prediction: tokens of a GPU in a second, and parts of a step [s]."""
    with keep_quiet():
        columns = price_strategies(
            case.model, case.platform, Strategy.stack([case.strategy]), stack=case.stack
        )
    step = {name: float(values[0]) for name, values in columns.items()}
    tokens = case.model.batch * _SEQUENCE / case.platform.network.ranks
    return {
        "name": case.name,
        "measured": case.tokens,
        "predicted": tokens / step["time"],
        "error": tokens / step["time"] / case.tokens - 1.0,
        "step": step["time"],
        "work": step["work"],
        "experts": step["experts"],
        "bubble": step["bubble"],
        "hidden": tokens / (step["time"] - step["experts"]),
    }


_ROWS = {
    "training": "{name}",
    "published [tokens/s]": "{measured:,.0f}",
    "predicted": "{predicted:,.0f}",
    "error": "{error:+.0%}",
    "step [s]": "{step:.1f}",
    "work": "{work:.1f}",
    "exchange": "{experts:.1f}",
    "bubble": "{bubble:.1f}",
    "without exchange [tokens/s]": "{hidden:,.0f}",
}


@command({})
def main(given: Any) -> None:
    """DeepSeek-V3, published and predicted."""
    print(lay_out([compare_case(case) for case in list_cases()], _ROWS))
