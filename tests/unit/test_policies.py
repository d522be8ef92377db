"""Validation, equality and descriptions of ZeroConfig and its policies."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace
from inspect import signature
from typing import Any

import pytest
import torch

from zeroshard import ConfigError, ConsistencyCheck, NonFiniteGrads, ZeroConfig
from zeroshard.config import MasterWeights, Reduce, ZeroStage1, ZeroStage2, reject_config_options, sum_dtype


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, "bfloat16", float, 16])
def test_reduce_dtype_must_be_floating_point(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(reduce_dtype=\.\.\.\) takes a floating-point dtype"):
        ZeroConfig(reduce_dtype=dtype)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_deterministic_reduce_must_be_bool(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(deterministic_reduce=\.\.\.\) takes True or False"):
        ZeroConfig(deterministic_reduce=value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex128, "float32", 32])
def test_master_dtype_must_be_floating_point(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(master_dtype=\.\.\.\) takes a floating-point dtype"):
        ZeroConfig(master_dtype=dtype)


@pytest.mark.parametrize("stage", [0, 3, True, 1.0, "2", torch.float32])
def test_stage_must_be_1_or_2(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\(stage=\.\.\.\) takes 1, 2 or None") as raised:
        ZeroConfig(stage=stage)
    assert ("fully_shard" in str(raised.value)) == (stage == 3)


@pytest.mark.parametrize(
    ("asked", "gradient", "wire"),
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
    asked: torch.dtype | None, gradient: torch.dtype, wire: torch.dtype
) -> None:
    assert Reduce(asked).wire_dtype(gradient) == wire


def test_master_weights_cover_less_precise_dtypes() -> None:
    covered = [torch.bfloat16, torch.float16]
    for dtype in (*covered, torch.float32, torch.float64, torch.complex64, torch.int8):
        assert MasterWeights().covers(dtype) == (dtype in covered)
    assert MasterWeights(torch.float64).covers(torch.float32)


def test_sums_use_at_least_float32() -> None:
    assert [sum_dtype(dtype) for dtype in (torch.bfloat16, torch.float16)] == [torch.float32] * 2
    for dtype in (torch.float32, torch.float64, torch.complex64):
        assert sum_dtype(dtype) == dtype


def test_policies_are_immutable_values() -> None:
    """Policies compare and hash by value, and are frozen."""
    for value in (ZeroStage2(), ZeroStage1(), Reduce(torch.bfloat16), MasterWeights()):
        assert value == type(value)(**vars(value))
        assert hash(value) == hash(type(value)(**vars(value)))
        with pytest.raises(FrozenInstanceError):
            value.dtype = torch.float64  # type: ignore[union-attr, misc]
    assert ZeroStage2.frees
    assert not ZeroStage1.frees
    assert Reduce() != Reduce(fixed_order=True)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": "shard"},
        {"reduce_dtype": "bfloat16"},
        {"deterministic_reduce": 1},
        {"master_dtype": MasterWeights},
        {"overlap_param_gather": 1},
        {"broadcast_buffers": None},
        {"consistency_check": 100},
        {"nonfinite": "skip"},
    ],
)
def test_config_rejects_values_of_wrong_type(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"ZeroConfig\({name}=\.\.\.\) takes"):
        ZeroConfig(**options)


def test_equal_configs_have_equal_descriptions() -> None:
    options: dict[str, Any] = {"reduce_dtype": torch.bfloat16, "master_dtype": torch.float32, "stage": 1}
    assert ZeroConfig(**options).describe() == ZeroConfig(**options).describe()
    changes: list[dict[str, Any]] = [
        {"reduce_dtype": torch.float16},
        {"master_dtype": torch.float64},
        {"stage": 2},
        {"stage": None},
        {"deterministic_reduce": True},
        {"overlap_param_gather": True},
    ]
    others = {ZeroConfig(**{**options, **change}).describe() for change in changes}
    assert len({ZeroConfig(**options).describe(), *others}) == len(changes) + 1


def test_unknown_option_suggests_the_closest_name() -> None:
    message = "ZeroConfig() has no option 'overlap_param_gathr'; did you mean 'overlap_param_gather'?"
    with pytest.raises(TypeError, match=re.escape(message)):
        ZeroConfig(overlap_param_gathr=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"has no option 'zzz'; its options are stage, partition, "):
        replace(ZeroConfig(), zzz=1)  # type: ignore[call-arg]


def test_signature_lists_every_option() -> None:
    assert list(signature(ZeroConfig).parameters) == [it.name for it in fields(ZeroConfig)]


@pytest.mark.parametrize("every", [0, -1, 1.0, True, None, "100"])
def test_consistency_check_interval_must_be_positive_int(every: Any) -> None:
    with pytest.raises(ConfigError, match=r"ConsistencyCheck\(every=\.\.\.\) takes a number of steps, 1 or more"):
        ConsistencyCheck(every=every)


@pytest.mark.parametrize("action", ["Skip", "", None, True, ["skip"]])
def test_unknown_nonfinite_action_is_rejected(action: Any) -> None:
    with pytest.raises(ConfigError, match=r'NonFiniteGrads\(\.\.\.\) takes "skip", "raise" or "warn"'):
        NonFiniteGrads(action)


@pytest.mark.parametrize("limit", [0, -3, 2.0, True, "2"])
def test_max_consecutive_must_be_positive_int(limit: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"NonFiniteGrads\(max_consecutive=\.\.\.\) takes a number of steps, 1 or more"
    ):
        NonFiniteGrads("skip", max_consecutive=limit)


@pytest.mark.parametrize("action", ["raise", "warn"])
def test_max_consecutive_requires_skip(action: Any) -> None:
    with pytest.raises(
        ConfigError, match=r'NonFiniteGrads\(max_consecutive=\.\.\.\) counts steps that are left out: .*"skip"'
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
    } <= set(config.describe())
    with pytest.raises(FrozenInstanceError):
        config.consistency_check.every = 2  # type: ignore[misc, union-attr]


@pytest.mark.parametrize("policy", [ConsistencyCheck(), NonFiniteGrads("raise")])
def test_policies_are_rejected_as_optimizer_options(policy: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"is not an option of an optimizer class: pass config=ZeroConfig\(it=\.\.\.\)"
    ):
        reject_config_options(torch.optim.AdamW, {"it": policy})


def test_config_options_are_rejected_as_optimizer_options() -> None:
    with pytest.raises(
        ConfigError, match=r"overlap_param_gather=True is not an option .* config=ZeroConfig\(overlap_param_gather="
    ):
        reject_config_options(torch.optim.AdamW, {"lr": 1e-3, "overlap_param_gather": True})
    with pytest.raises(ConfigError, match=r"stage=1 is not an option .* config=ZeroConfig\(stage="):
        reject_config_options(torch.optim.AdamW, {"stage": 1})
    with pytest.raises(ConfigError, match=r"master_dtype=torch.float32 is not .* config=ZeroConfig\(master_dtype="):
        reject_config_options(torch.optim.AdamW, {"master_dtype": torch.float32})


def test_optimizer_class_may_define_options_with_the_same_names() -> None:
    def makes(params: Any, offload: bool, **others: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=float(offload), **others)

    reject_config_options(makes, {"offload": True, "stage": 1})
