"""Options check themselves."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from zeroshard.config import ZeroConfig
from zeroshard.errors import ConfigError
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import WholeParams
from zeroshard.layout.spec import ParamSpec


class Plain:
    """A partitioner whose repr holds its address."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return WholeParams().extend(layout, specs)


@dataclass(frozen=True)
class Tuned(Plain):
    width: int


def test_the_defaults_are_torchs_contract() -> None:
    config = ZeroConfig()
    assert (config.stage, config.partition, config.master_dtype) == (None, None, None)
    assert (config.allow_mixed_dtypes, config.overlap_param_gather) == (False, False)


def test_options_do_not_change_later() -> None:
    with pytest.raises(FrozenInstanceError):
        ZeroConfig().allow_mixed_dtypes = True  # type: ignore[misc]


@pytest.mark.parametrize("partition", ["whole", WholeParams, 3])
def test_only_a_partitioner_is_one(partition: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(partition=...\) takes a partitioner such as FlatShards\(\)"):
        ZeroConfig(partition=partition)


@pytest.mark.parametrize("mixed", [None, 1, "yes"])
def test_flags_are_true_or_false(mixed: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(allow_mixed_dtypes=...\) takes True or False"):
        ZeroConfig(allow_mixed_dtypes=mixed)


def test_descriptions_are_equal_for_equal_options() -> None:
    assert ZeroConfig(partition=Plain()).describe() == ZeroConfig(partition=Plain()).describe()
    assert ZeroConfig(partition=Tuned(2)).describe() == ZeroConfig(partition=Tuned(2)).describe()


def test_descriptions_tell_options_apart() -> None:
    options = [
        ZeroConfig(),
        ZeroConfig(allow_mixed_dtypes=True),
        ZeroConfig(partition=Plain()),
        ZeroConfig(partition=Tuned(2)),
    ]
    options.append(ZeroConfig(partition=Tuned(3)))
    assert len({option.describe() for option in options}) == len(options)
