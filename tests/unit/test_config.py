"""Validation and description of ZeroConfig."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from zeroshard.config import ZeroConfig
from zeroshard.errors import ConfigError
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import WholeParams
from zeroshard.layout.spec import ParamSpec


class PartitionerWithDefaultRepr:
    """A partitioner whose repr contains its address."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return WholeParams().extend(layout, specs)


@dataclass(frozen=True)
class PartitionerWithOptions(PartitionerWithDefaultRepr):
    width: int


def test_defaults() -> None:
    config = ZeroConfig()
    assert (config.stage, config.partition, config.master_dtype) == (None, None, None)
    assert (config.allow_mixed_dtypes, config.overlap_param_gather) == (False, False)


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ZeroConfig().allow_mixed_dtypes = True  # type: ignore[misc]


@pytest.mark.parametrize("partition", ["whole", WholeParams, 3])
def test_partition_must_be_a_partitioner(partition: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(partition=...\) to be a partitioner such as FlatShards\(\)"):
        ZeroConfig(partition=partition)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_flags_must_be_bool(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(allow_mixed_dtypes=...\) to be True or False"):
        ZeroConfig(allow_mixed_dtypes=value)


def test_equal_options_have_equal_descriptions() -> None:
    assert (
        ZeroConfig(partition=PartitionerWithDefaultRepr())._describe()
        == ZeroConfig(partition=PartitionerWithDefaultRepr())._describe()
    )
    assert (
        ZeroConfig(partition=PartitionerWithOptions(2))._describe()
        == ZeroConfig(partition=PartitionerWithOptions(2))._describe()
    )


def test_different_options_have_different_descriptions() -> None:
    configs = [
        ZeroConfig(),
        ZeroConfig(allow_mixed_dtypes=True),
        ZeroConfig(partition=PartitionerWithDefaultRepr()),
        ZeroConfig(partition=PartitionerWithOptions(2)),
    ]
    configs.append(ZeroConfig(partition=PartitionerWithOptions(3)))
    assert len({config._describe() for config in configs}) == len(configs)
