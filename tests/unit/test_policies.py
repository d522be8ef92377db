"""Validation, equality and descriptions of ZeroConfig and its policies."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace
from inspect import signature
from typing import Any

import pytest
import torch

from zeroshard import ConfigError, ConsistencyCheck, NonFiniteGrads, ZeroConfig
from zeroshard.config import MasterWeightPolicy, ReducePolicy, reject_config_options, sum_dtype


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, "bfloat16", float, 16])
def test_reduce_dtype_must_be_floating_point(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected ZeroConfig\(reduce_dtype=\.\.\.\) to be a floating-point dtype"):
        ZeroConfig(reduce_dtype=dtype)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_deterministic_reduce_must_be_bool(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected ZeroConfig\(deterministic_reduce=\.\.\.\) to be True or False"):
        ZeroConfig(deterministic_reduce=value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex128, "float32", 32])
def test_master_dtype_must_be_floating_point(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected ZeroConfig\(master_dtype=\.\.\.\) to be a floating-point dtype"):
        ZeroConfig(master_dtype=dtype)


@pytest.mark.parametrize("stage", [0, 3, True, 1.0, "2", torch.float32])
def test_stage_must_be_1_or_2(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected ZeroConfig\(stage=\.\.\.\) to be 1, 2 or None") as raised:
        ZeroConfig(stage=stage)
    assert ("fully_shard" in str(raised.value)) == (stage == 3)


@pytest.mark.parametrize(
    ("requested", "grad_dtype", "wire_dtype"),
    [
        (None, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float32),
        (torch.bfloat16, torch.complex64, torch.complex64),
    ],
)
def test_reduce_dtype_never_widens_gradients(
    requested: torch.dtype | None, grad_dtype: torch.dtype, wire_dtype: torch.dtype
) -> None:
    assert ReducePolicy(requested).wire_dtype(grad_dtype) == wire_dtype


def test_master_weights_cover_less_precise_dtypes() -> None:
    covered = [torch.bfloat16, torch.float16]
    for dtype in (*covered, torch.float32, torch.float64, torch.complex64, torch.int8):
        assert MasterWeightPolicy().covers(dtype) == (dtype in covered)
    assert MasterWeightPolicy(torch.float64).covers(torch.float32)


def test_sums_use_at_least_float32() -> None:
    assert [sum_dtype(dtype) for dtype in (torch.bfloat16, torch.float16)] == [torch.float32] * 2
    for dtype in (torch.float32, torch.float64, torch.complex64):
        assert sum_dtype(dtype) == dtype


def test_policies_are_immutable_values() -> None:
    """Policies compare and hash by value, and are frozen."""
    for value in (ReducePolicy(torch.bfloat16), MasterWeightPolicy()):
        assert value == type(value)(**vars(value))
        assert hash(value) == hash(type(value)(**vars(value)))
        with pytest.raises(FrozenInstanceError):
            value.dtype = torch.float64  # type: ignore[misc]
    assert ReducePolicy() != ReducePolicy(fixed_order=True)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": "shard"},
        {"reduce_dtype": "bfloat16"},
        {"deterministic_reduce": 1},
        {"master_dtype": MasterWeightPolicy},
        {"overlap_param_gather": 1},
        {"broadcast_buffers": None},
        {"consistency_check": 100},
        {"nonfinite": "skip"},
    ],
)
def test_config_rejects_values_of_wrong_type(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=rf"ZeroConfig\({name}=\.\.\.\) .* {re.escape(repr(value))}$"):
        ZeroConfig(**options)


def test_equal_configs_have_equal_descriptions() -> None:
    options: dict[str, Any] = {"reduce_dtype": torch.bfloat16, "master_dtype": torch.float32, "stage": 1}
    assert ZeroConfig(**options)._describe() == ZeroConfig(**options)._describe()
    changes: list[dict[str, Any]] = [
        {"reduce_dtype": torch.float16},
        {"master_dtype": torch.float64},
        {"stage": 2},
        {"stage": None},
        {"deterministic_reduce": True},
        {"overlap_param_gather": True},
    ]
    others = {ZeroConfig(**{**options, **change})._describe() for change in changes}
    assert len({ZeroConfig(**options)._describe(), *others}) == len(changes) + 1


def test_unknown_option_suggests_the_closest_name() -> None:
    message = "ZeroConfig() has no option 'overlap_param_gathr'. Did you mean 'overlap_param_gather'?"
    with pytest.raises(TypeError, match=re.escape(message)):
        ZeroConfig(overlap_param_gathr=True)  # type: ignore[call-arg]
    for name, suggestion in {"partitioner": "partition", "cpu_offload": "offload", "stages": "stage"}.items():
        with pytest.raises(TypeError, match=rf"no option '{name}'\. Did you mean '{suggestion}'"):
            ZeroConfig(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["zzz", "retention"])
def test_unknown_option_without_a_similar_name_lists_all(name: str) -> None:
    with pytest.raises(TypeError, match=rf"has no option '{name}'\. Its options are stage, partition, "):
        replace(ZeroConfig(), **{name: 1})  # type: ignore[arg-type]


def test_signature_lists_every_option() -> None:
    assert list(signature(ZeroConfig).parameters) == [field.name for field in fields(ZeroConfig)]


@pytest.mark.parametrize("every", [0, -1, 1.0, True, None, "100"])
def test_consistency_check_interval_must_be_positive_int(every: Any) -> None:
    with pytest.raises(ConfigError, match=r"ConsistencyCheck\(every=\.\.\.\) to be a positive number of steps"):
        ConsistencyCheck(every=every)


@pytest.mark.parametrize("action", ["Skip", "", None, True, ["skip"]])
def test_unknown_nonfinite_action_is_rejected(action: Any) -> None:
    with pytest.raises(ConfigError, match=r'NonFiniteGrads\(action=\.\.\.\) to be "skip", "raise" or "warn"'):
        NonFiniteGrads(action)


@pytest.mark.parametrize("limit", [0, -3, 2.0, True, "2"])
def test_max_consecutive_must_be_positive_int(limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"NonFiniteGrads\(max_consecutive=\.\.\.\) to be a positive number of steps"):
        NonFiniteGrads("skip", max_consecutive=limit)


@pytest.mark.parametrize("action", ["raise", "warn"])
def test_max_consecutive_requires_skip(action: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf'NonFiniteGrads\(max_consecutive=\.\.\.\) counts skipped steps: .*"skip", got {action!r}'
    ):
        NonFiniteGrads(action, max_consecutive=2)


def test_checks_are_off_by_default() -> None:
    assert (ZeroConfig().consistency_check, ZeroConfig().nonfinite) == (None, None)
    config = ZeroConfig(
        consistency_check=ConsistencyCheck(every=3), nonfinite=NonFiniteGrads("skip", max_consecutive=2)
    )
    assert {
        "ZeroConfig(consistency_check=ConsistencyCheck(every=3))",
        "ZeroConfig(nonfinite=NonFiniteGrads(action='skip', max_consecutive=2))",
    } <= set(config._describe())
    with pytest.raises(FrozenInstanceError):
        config.consistency_check.every = 2  # type: ignore[misc, union-attr]


@pytest.mark.parametrize("policy", [ConsistencyCheck(), NonFiniteGrads("raise")])
def test_policies_are_rejected_as_optimizer_options(policy: Any) -> None:
    with pytest.raises(ConfigError, match=r"^it=.* not an optimizer argument: pass config=ZeroConfig\(it="):
        reject_config_options(torch.optim.AdamW, {"it": policy})


def test_config_options_are_rejected_as_optimizer_options() -> None:
    advice = r"not an optimizer argument: pass config=ZeroConfig"
    with pytest.raises(ConfigError, match=rf"overlap_param_gather=True is .*, {advice}\(overlap_param_gather="):
        reject_config_options(torch.optim.AdamW, {"lr": 1e-3, "overlap_param_gather": True})
    with pytest.raises(ConfigError, match=rf"stage=1 is .*, {advice}\(stage="):
        reject_config_options(torch.optim.AdamW, {"stage": 1})
    with pytest.raises(ConfigError, match=rf"master_dtype=torch.float32 is .*, {advice}\(master_dtype="):
        reject_config_options(torch.optim.AdamW, {"master_dtype": torch.float32})


def test_optimizer_class_may_define_options_with_the_same_names() -> None:
    def make_optimizer(params: Any, offload: bool, **others: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=float(offload), **others)

    reject_config_options(make_optimizer, {"offload": True, "stage": 1})
