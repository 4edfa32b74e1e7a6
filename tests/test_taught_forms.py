"""What lessons teach is what predictions call: a closed form that is changed by 1 % moves one.

The forms are all public functions of `perfkit.models` that return numbers. A new one has to move
one of `PREDICTIONS`, or stand in `EXEMPT` with a reason.
"""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit import models
from perfkit.fitting import OverRanks, Pipelined, TwoBranch
from perfkit.models import embedding, roofline
from perfkit.models.distributions import Uniform, Zipf
from perfkit.models.optimizers import find_optimizer, list_optimizers
from perfkit.platform.kernels import find_stand_in
from perfkit.prediction.cost import size_rooflines
from perfkit.prediction.strategies import price_strategies
from perfkit.readers.index_arrays import count_indices
from perfkit.readers.measured_jitter import find_jitter, find_jitter_of_steps
from tests.fuzz.entries_numbers import FORMS as EXAMPLES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Form = Callable[..., Any]

#: Forms that no prediction calls, and why.
EXEMPT = {
    "collectives.alpha_beta": "what textbooks teach; predictions take it as `pipelined` with an "
    "exponent of 1",
    "partitions.compressed_time": "no workload compresses its gradients",
    "partitions.exposed_time": "pieces that are made and then sent; predictions know each message and "
    "the kernels beside it (`time_beside`)",
    "experts.share_tokens": "the busiest rank is compared with the mean of all, which grows as much",
    "kernels.at_usual_pace": "corrects what was measured on a disturbed machine",
    "distributions.count_frequent_rows": "says which rows a plan may copy; predictions take plans",
    "embedding.frequent_lookups": "HugeCTR's rule for such plans",
    "caches.rotating_misses": "kernels are measured with a few batches of indices in turn; every "
    "iteration of training draws fresh ones",
}
#: Another reading of a form that predictions call, which it calls itself.
READINGS = {
    "caches.lru_hit_rate": ("caches.lru_misses", (Zipf(1000, 1.0), 100.0), {}),
    "caches.cold_misses": ("caches.lru_misses", (Zipf(1000, 1.0), 500.0, 100.0), {}),
    "distributions.unique_rows": ("distributions.distinct_rows", (Uniform(1000), 500.0), {}),
    "collectives.bus_bandwidth": (
        "collectives.bus_factor",
        (8e9, 0.03),
        {"ranks": 8, "operation": "all_reduce"},
    ),
}
#: Sums over tensors that predictions record one by one, to place each in a memory level. The tests
#: at the end of this file hold both equal.
SUMS = {
    "roofline.optimizer_bytes",
    "roofline.attention_bytes",
    "embedding.fused_backward_bytes",
}
#: Public functions that return names or records, and no numbers.
NO_NUMBERS = {
    "checkpoints.find_checkpoint",
    "checkpoints.check_checkpoints",
    "checkpoints.ask_checkpoints",
    "checkpoints.recomputes",
    "distributions.join_buckets",
    "kernels.term_names",
    "kernels.list_terms",
    "optimizers.list_optimizers",
    "optimizers.find_optimizer",
    "optimizers.split_form",
    "collectives.find_collective",
    "partitions.find_schedules",
    "partitions.list_steps",
    "partitions.check_schedule",
    "partitions.count_held_in_v",
    "v_schedules.find_position",
    "v_schedules.find_place",
    "v_schedules.list_zb_v_steps",
    "v_schedules.list_dualpipe_v_steps",
}


def list_functions() -> dict[str, Form]:
    """Public functions of `perfkit.models` by module and name."""
    functions = {}
    for module in pkgutil.iter_modules(models.__path__):
        space = importlib.import_module(f"perfkit.models.{module.name}")
        for name, value in vars(space).items():
            if inspect.isclass(value) or not callable(value) or name.startswith("_"):
                continue
            if value.__module__ == space.__name__:
                functions[f"{module.name}.{name}"] = value
    return functions


FORMS = {name: form for name, form in list_functions().items() if name not in NO_NUMBERS}


# -- predictions ---------------------------------------------------------------------------------


def bert(**settings: Any) -> pk.Transformer:
    return pk.Transformer.bert("bert-base", **{"batch": 8, "sequence": 128, **settings})


def dlrm(**settings: Any) -> pk.DLRM:
    given = {"batch": 2048, "rows": [1000, 100_000], "dim": 64, "pooling": 20, "exponent": 1.05}
    return pk.DLRM(**{**given, **settings})


def answer(prediction: pk.Prediction) -> list[float]:
    """Times of an iteration and of its kernels, which a host may hide, and memory of a rank."""
    kernels = sum(part.time for part in prediction.causes.kernels)
    return [prediction.time, kernels, prediction.memory().total]


def language_model_on_gpus() -> list[float]:
    return answer(pk.predict(bert(dtype="bf16"), "h100-sxm-8", ranks=8))


def language_model_at_capped_power() -> list[float]:
    capped = pk.load_platform("h100-sxm-8").with_power(500)
    return answer(pk.predict(bert(dtype="bf16"), capped))


def fused_attention_on_gpus() -> list[float]:
    model = pk.Transformer.gpt2("gpt2", batch=8, sequence=128, dtype="bf16", attention="fused")
    windowed = replace(model, window=64)
    return answer(pk.predict(model, "h100-sxm-8")) + answer(pk.predict(windowed, "h100-sxm-8"))


def language_model_on_a_processor() -> list[float]:
    return answer(pk.predict(bert(), "zen5-2"))


def recommendation_on_a_processor() -> list[float]:
    return answer(pk.predict(dlrm(rows=[10_000, 5_000_000]), "zen5-2"))


def recommendation_on_gpus() -> list[float]:
    model = dlrm(embedding="exact", optimizer="adagrad", sparse=False)
    return answer(pk.predict(model, "h100-sxm-8", ranks=8))


def recommendation_on_one_gpu() -> list[float]:
    return answer(pk.predict(dlrm(embedding="fused"), "h100-sxm-8"))


def recommendation_beyond_the_gpu() -> list[float]:
    model = dlrm(embedding="exact", rows=[100_000] * 2, kernel=["uvm", "uvm_caching"])
    return answer(pk.predict(model, "h100-sxm-8"))


def ranks_on_nodes() -> list[float]:
    platform = pk.load_platform("h100-sxm-8x8")
    pairs = [("all_reduce", None), ("all_to_all", None), ("all_to_all", "two_level")]
    pairs += [("all_gather", None), ("all_reduce", "tree"), ("all_reduce", "two_level")]
    times = [platform.collective(o, 1e8, ranks=64, algorithm=a).time for o, a in pairs]
    return [*times, platform.collective("all_reduce", 1e6, ranks=64).time]


def ranks_of_a_datasheet() -> list[float]:
    """Collectives inside a node that nobody measured: forms of textbooks."""
    platform = pk.Platform.from_datasheet(
        "made up", ranks=8, flops={"bf16": 1e15}, memory=(8e10, 3e12), link=4.5e11
    )
    names = ("ring", "tree", "in_network")
    return [platform.collective("all_reduce", 1e8, ranks=8, algorithm=a).time for a in names]


def curves_of_files() -> list[float]:
    """Collectives by each form that a platform file may have."""
    two = {"alpha1": 1e-5, "beta1": 1e-9, "alpha2": 1e-4, "beta2": 1e-11}
    over = {"alpha0": 1e-5, "alpha1": 1e-6, "beta0": 1e-12, "beta1": 1e-11}
    line = {"alpha": 1e-5, "beta": 1e-11}
    curves = [Pipelined.build(line), OverRanks.build(over), TwoBranch.build(two)]
    platform = pk.load_platform("h100-sxm-8")
    times = []
    for curve in curves:
        count = "any" if isinstance(curve, OverRanks) else "8"
        known = replace(platform, collectives={f"all_reduce.{count}": curve})
        times.append(pk.predict(bert(), known, ranks=8).time)
    return times


def strategies() -> list[float]:
    model = pk.Transformer.preset("gpt3-175b", batch=256, attention="eager")
    chosen = pk.Strategy(tp=8, pp=8, dp=1, schedule="interleaved", chunks=2, checkpoint="selective")
    sharded = pk.Strategy(tp=8, pp=1, dp=8, zero=3, tiled=True)
    platform = pk.load_platform("h100-sxm-8x8")
    found = price_strategies(model, platform, pk.Strategy.stack([chosen, sharded]))
    return [*found["time"].tolist(), *found["needs"].tolist()]


def hidden_messages() -> list[float]:
    """Messages of tensor parallelism that take longer than the products beside them."""
    model = bert(dtype="bf16", batch=64, sequence=512)
    chosen = pk.Strategy(tp=4, dp=2, micro_batch=8, tiled=True)
    platform = pk.load_platform("l40s-8")
    return price_strategies(model, platform, pk.Strategy.stack([chosen]))["time"].tolist()


def single_kernels() -> list[float]:
    platform = pk.load_platform("h100-sxm-8")
    lookup = platform.lookup(dlrm().tables, batch=2048)
    by_bytes = pk.load_platform("v100-locked-1").lookup(dlrm().tables, batch=2048)
    product = platform.gemm(64, 64, 64, dtype="bf16")
    return [product.time, lookup.time, by_bytes.time]


def recorded_lookups() -> list[float]:
    """A batch of indices, by its histogram and by the law that is fitted to it."""
    rows = np.random.default_rng(0).zipf(1.2, 40_000)
    [found] = count_indices(rows[rows < 1_000_000], rows=1_000_000)
    times = []
    for law in ("histogram", "zipf"):
        table = found.to_table(64, law=law)
        platform = pk.load_platform("zen5-2")
        times.append(platform.lookup([table], batch=40_000).time)
    return times


def tokens_to_experts() -> list[float]:
    model = pk.Transformer.gpt2(
        "gpt2",
        layers=2,
        batch=16,
        sequence=128,
        dtype="bf16",
        mixed=True,
        experts=16,
        top_k=2,
        imbalance=1.0,
    )
    strategy = pk.Strategy(dp=16, ep=16, zero=1, dispatch="once")
    columns = price_strategies(
        model, pk.load_platform("h100-sxm-8x2"), pk.Strategy.stack([strategy])
    )
    return [float(columns[name][0]) for name in ("time", "experts", "work")]


def states_on_the_host() -> list[float]:
    """The host updates what replicas share."""
    strategy = pk.Strategy(dp=8, zero=1, offload="optimizer")
    model = bert(dtype="bf16", mixed=True, batch=64)
    columns = price_strategies(model, pk.load_platform("h100-sxm-8"), pk.Strategy.stack([strategy]))
    return [float(columns[name][0]) for name in ("time", "needs")]


def run_with_failures() -> list[float]:
    r = pk.predict(bert(dtype="bf16"), "h100-sxm-8", ranks=8)
    run = r.cost(2.0, iterations=1e7, mtbf=1e6, checkpoint=60.0, restart=300.0, jitter=0.02)
    return [run.hours, run.interval, run.hours_for(0.9), run.chance(run.hours)]


def ranks_that_vary() -> list[float]:
    """Ranks of a trace, and steps of a log."""
    times = {0: [1.0, 1.1, 1.0], 1: [1.05, 1.0, 1.2]}
    of_trace = find_jitter("a trace", times, 1.05)
    of_log = find_jitter_of_steps("a log", [1.0, 1.1, 1.05], [1, 1, 1], 8)
    r = pk.predict(bert(dtype="bf16"), "h100-sxm-8", ranks=8)
    costs = [r.cost(2.0, iterations=1e7, jitter=jitter) for jitter in (of_trace, of_log)]
    return [cost["hours"] for cost in costs]


def steps_that_wait() -> list[float]:
    """A recurrent layer, which a GPU computes step by step."""
    machine = pk.load_platform("h100-sxm-8")
    fit = find_stand_in(machine.kernels, "recurrent", variant="forward.standard", dtype="fp32")
    assert fit is not None
    numbers = {"flops": 1e9, "nbytes": 1e6, "m": 32, "n": 2048, "k": 512, "rows": 100}
    sizes = {name: np.array([float(number)]) for name, number in numbers.items()}
    sizes |= {"peak": np.array([6e13]), "bandwidth": np.array([3e12])}
    return [float(fit.time(sizes)[0])]


PREDICTIONS: list[Callable[[], list[float]]] = [
    steps_that_wait,
    language_model_on_gpus,
    language_model_at_capped_power,
    language_model_on_a_processor,
    fused_attention_on_gpus,
    recommendation_on_gpus,
    recommendation_on_one_gpu,
    recommendation_on_a_processor,
    recommendation_beyond_the_gpu,
    ranks_on_nodes,
    ranks_of_a_datasheet,
    curves_of_files,
    strategies,
    single_kernels,
    recorded_lookups,
    hidden_messages,
    tokens_to_experts,
    states_on_the_host,
    run_with_failures,
    ranks_that_vary,
]


# -- changes -------------------------------------------------------------------------------------


def grow(value: Any) -> Any:
    """A result of a form, with each number 1 % larger."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float, np.number)):
        return 1.01 * value
    if isinstance(value, np.ndarray):
        return 1.01 * value if value.dtype.kind == "f" else value
    if isinstance(value, tuple):
        grown = [grow(entry) for entry in value]
        return type(value)(*grown) if hasattr(value, "_fields") else tuple(grown)
    if is_dataclass(value):
        numbers = {field.name: grow(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **numbers)
    return 1.01 * value  # an open size of a workload


def list_modules() -> list[ModuleType]:
    """Modules of perfkit that are imported."""
    return [module for name, module in [*sys.modules.items()] if name.startswith("perfkit")]


def forget() -> None:
    """Empty all caches of perfkit, those of platforms among them."""
    for module in list_modules():
        members = [*vars(module).values()]
        for kind in filter(inspect.isclass, vars(module).values()):
            members += vars(kind).values()
        for member in members:
            if hasattr(type(member), "cache_clear"):
                member.cache_clear()


def swap_everywhere(patch: pytest.MonkeyPatch, form: Form, other: Form) -> None:
    """Let the library call another function in place of a form, wherever it has it."""

    def swap_in_records(register: dict[Any, Any]) -> None:
        for name, record in [*register.items()]:
            if is_dataclass(record) and not isinstance(record, type):
                named = {
                    field.name: other
                    for field in fields(record)
                    if getattr(record, field.name, None) is form
                }
                if named:
                    patch.setitem(register, name, replace(record, **named))

    for module in list_modules():
        for key, value in [*vars(module).items()]:
            if value is form:
                patch.setattr(module, key, other)
            elif isinstance(value, dict):
                swap_in_records(value)


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Form], None]]:
    """Changes a form wherever the library has it."""

    def grow_everywhere(form: Form) -> None:
        @functools.wraps(form)
        def grown(*arguments: Any, **keywords: Any) -> Any:
            return grow(form(*arguments, **keywords))

        swap_everywhere(monkeypatch, form, grown)
        forget()

    yield grow_everywhere
    monkeypatch.undo()
    forget()


@functools.cache
def unchanged(prediction: Callable[[], list[float]]) -> list[float]:
    forget()
    return prediction()


@functools.cache
def find_callers() -> dict[str, list[Callable[[], list[float]]]]:
    """The predictions that call each form."""
    called = set[str]()

    def note_calls(name: str, form: Form) -> Form:
        @functools.wraps(form)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            called.add(name)
            return form(*arguments, **keywords)

        return noted

    callers: dict[str, list[Callable[[], list[float]]]] = {name: [] for name in FORMS}
    for prediction in PREDICTIONS:  # all that it imports has the forms themselves
        unchanged(prediction)
    with pytest.MonkeyPatch.context() as patch:
        for name, form in FORMS.items():
            swap_everywhere(patch, form, note_calls(name, form))
        for prediction in PREDICTIONS:
            called.clear()
            forget()
            prediction()
            for name in called:
                callers[name].append(prediction)
    forget()
    return callers


@pytest.mark.parametrize("name", FORMS)
def test_a_taught_form_moves_a_prediction(name: str, change: Callable[[Form], None]) -> None:
    callers = find_callers()[name]
    before = [unchanged(prediction) for prediction in callers]
    change(FORMS[name])
    moved = []
    for prediction, known in zip(callers, before, strict=True):
        if not np.allclose(prediction(), known, rtol=1e-9, atol=0.0):
            moved.append(prediction.__name__)
            break
    if name in {*EXEMPT, *READINGS, *SUMS}:
        assert not moved, f"{name} moves {moved[0]}: it is exempt no more"
    else:
        assert moved, f"no prediction calls {name}: let one, or say in EXEMPT why not"


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_calls_the_form_of_predictions(name: str, change: Callable[[Form], None]) -> None:
    called, arguments, keywords = READINGS[name]
    before = FORMS[name](*arguments, **keywords)
    change(FORMS[called])
    assert FORMS[name](*arguments, **keywords) != pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_stands_on_the_page_of_formulas(name: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "formulas.md").read_text(encoding="utf-8")
    assert f"`perfkit.models.{name}`" in page, (
        f"docs/formulas.md has no row with perfkit.models.{name}"
    )


def test_every_closed_form_has_an_example_for_the_fuzzers() -> None:
    closed = {name for name, form in FORMS.items() if hasattr(form, "__wrapped__")}
    examples = {call.function for call in EXAMPLES}
    lacking = [name for name in sorted(closed) if FORMS[name] not in examples]
    assert len(closed) > 30 and not lacking, f"tests/fuzz/entries_numbers.py calls no {lacking}"


def test_every_name_is_that_of_a_function() -> None:
    assert {*EXEMPT, *READINGS, *SUMS} <= {*FORMS}
    assert {*list_functions()} >= NO_NUMBERS


# -- sums of recorded tensors --------------------------------------------------------------------

#: Optimizers, each with and, where it has such a kernel, in its fused form.
UPDATES = [(name, False) for name in list_optimizers(dense=True, by_shape=False)]
UPDATES += [(name, True) for name, _ in UPDATES if "fused" in find_optimizer(name).forms]


@pytest.mark.parametrize(("optimizer", "fused"), UPDATES)
def test_recorded_updates_move_what_is_taught(optimizer: str, fused: bool) -> None:
    graph = bert(optimizer=optimizer, fused=fused).graphs(1, accelerator=True)[0]
    updates = np.array([label.phase == "update" for label in graph.labels])
    name = f"{optimizer}_fused" if fused else optimizer
    taught = roofline.optimizer_bytes(name, graph.parameters)
    # the step counters of the weights are 4 B each, and not taught
    assert graph.traffic[updates].sum() == pytest.approx(taught, rel=1e-4)


def test_recorded_products_and_attention_move_what_is_taught() -> None:
    batch = 8
    heads = 12
    sequence = 128
    head_dim = 64
    graph = bert(dtype="bf16", attention="fused").graphs(1, accelerator=True)[0]
    products = graph.kernels["gemm", "nn"]
    m = graph.column("m")[products]
    n = graph.column("n")[products]
    k = graph.column("k")[products]
    taught = roofline.gemm_bytes(m, n, k, itemsize=2)
    assert graph.traffic[products] == pytest.approx(taught, rel=1e-12)
    forward = graph.kernels["attention", "forward"]
    sizes = {"kv_heads": heads, "itemsize": 2}
    attention = roofline.attention_bytes(batch, heads, sequence, head_dim, **sizes)
    row_sums = 2.0 * batch * heads * sequence  # a number for each row of scores, and not taught
    assert graph.traffic[forward] == pytest.approx(attention + row_sums, rel=1e-12)


def test_recorded_lookups_move_what_is_taught() -> None:
    batch = 2048
    pooling = 20
    dim = 64
    graph = dlrm(rows=[100_000], embedding="fused").graphs(1, accelerator=True)[0]
    platform = pk.load_platform("h100-sxm-8")
    nbytes = size_rooflines(graph, platform).nbytes
    sizes = {"itemsize": 4, "granularity": 32}
    [forward] = graph.kernels["embedding_forward", "fused"]
    taught = embedding.forward_bytes(batch, batch * pooling, dim, **sizes)
    assert nbytes[forward] == pytest.approx(taught, rel=1e-12)
    [backward] = graph.kernels["embedding_backward", "fused"]
    taught = embedding.fused_backward_bytes(batch, batch * pooling, dim, **sizes)
    indices = 8.0 * batch * pooling + 8.0 * batch  # indices and offsets, and not taught
    assert nbytes[backward] == pytest.approx(taught + indices, rel=1e-12)
