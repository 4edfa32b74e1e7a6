"""Closed forms: pure functions of numbers and arrays in base units, without state, files or
knowledge of a platform.

Each has its formula and source in its docstring and in docs/formulas.md; lessons teach the ones
that predictions call.

Reading order: `roofline` (kernels bound by compute or memory), `kernels` (sums of terms of CPUs),
`embedding` and `caches` (lookups of skewed rows; `distributions` and `skew` say how skewed),
`collectives` (inside a node) and `hierarchy` (across nodes), which `algorithms` joins in one table,
`experts` (tokens that go to ranks), `optimizers` (one record for each), `offload` (updates of the
host), `partitions` (schedules of pipelines), `failures` (checkpoints and restarts of a long run).
"""

from perfkit.models import (
    caches,
    collectives,
    distributions,
    embedding,
    experts,
    failures,
    hierarchy,
    kernels,
    offload,
    optimizers,
    partitions,
    roofline,
    skew,
)

__all__ = [
    "caches",
    "collectives",
    "distributions",
    "embedding",
    "experts",
    "failures",
    "hierarchy",
    "kernels",
    "offload",
    "optimizers",
    "partitions",
    "roofline",
    "skew",
]
