"""What TorchRec's configurations, constraints and modules have, for tests without TorchRec.

`make torchrec` compares their fields with those of TorchRec's own classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any


class DataType(Enum):
    """Number formats of tables, some of them."""

    FP32 = "FP32"
    FP16 = "FP16"
    INT8 = "INT8"
    INT4 = "INT4"

    def __str__(self) -> str:
        return self.value


class PoolingType(Enum):
    """How rows of a bag become one."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@dataclass
class EmbeddingConfig:
    """A table whose rows are not pooled."""

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Any = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        if self.init_fn is None:
            self.init_fn = partial(max, 0.0)

    def num_features(self) -> int:
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """A table whose rows are pooled."""

    pooling: PoolingType = PoolingType.SUM


@dataclass
class CacheParams:
    """Of a cache in device memory, some of its fields."""

    load_factor: float | None = None


@dataclass
class ParameterConstraints:
    """What people ask of TorchRec's planner."""

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [1.0])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: list[str] | None = None
    output_dtype: DataType | None = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False


class Module:
    """A module with others inside."""

    def __init__(self, **children: Any) -> None:
        self.children = children
        vars(self).update(children)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """This module and all inside with their paths, as torch gives them."""
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)


class EmbeddingBagCollection(Module):
    """Tables whose rows are pooled."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig], *, is_weighted: bool = False) -> None:
        super().__init__(embedding_bags=Module())
        self.tables = list(tables)
        self.has_weights = is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.tables

    def is_weighted(self) -> bool:
        return self.has_weights


class EmbeddingCollection(Module):
    """Tables whose rows are not pooled."""

    def __init__(self, tables: Sequence[EmbeddingConfig]) -> None:
        super().__init__()
        self.tables = list(tables)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self.tables


class ShardedEmbeddingBagCollection(Module):
    """A collection after `DistributedModelParallel`, which keeps its configurations."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig], *, is_weighted: bool = False) -> None:
        super().__init__(lookups=Module())
        self._embedding_bag_configs = list(tables)
        self._is_weighted = is_weighted


class FeatureProcessedEmbeddingBagCollection(Module):
    """A collection behind processors of its features."""

    def __init__(self, collection: Any) -> None:
        super().__init__(_embedding_bag_collection=collection)
