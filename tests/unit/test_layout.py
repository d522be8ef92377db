"""Layouts: validation, owners of parameters, and digests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles import spec
from zeroshard._types import Rank, Span
from zeroshard.errors import LayoutError
from zeroshard.layout.layout import Bucket, BucketSlot, EqualShards, Layout, Shards, WholeParamShards

CPU = torch.device("cpu")
PARAMS = (
    spec(0, (4,)),
    spec(1, (2, 3), trainable=False),
    spec(2, (2,), stride=(3,)),  # 2 elements in a storage of 4
    spec(3, (0, 5), dtype=torch.float64),
    spec(4, (3,), dtype=torch.float64),
)
SLOTS = (BucketSlot(0, Span(0, 4)), BucketSlot(1, Span(4, 10)), BucketSlot(2, Span(10, 14)))


def whole_param_shards(*spans: tuple[int, int, int], ranks: int = 2) -> WholeParamShards:
    return WholeParamShards({Rank(rank): Span(start, stop) for rank, start, stop in spans}, ranks)


def make_layout(device: str = "cpu") -> Layout:
    """Two ranks, five parameters; parameter 1 is sharded, parameter 3 is empty.

    bucket 0   | shard of rank 0             | shard of rank 1            |
               | p0 p0 p0 p0 | p1 p1 p1 || p1 p1 p1 | p2 . . p2 |
    bucket 1   | p4 p4 p4 | p3               |
    """
    torch_device = torch.device(device)
    params = tuple(replace(param_spec, device=torch_device) for param_spec in PARAMS)
    sharded = Bucket(0, torch.float32, torch_device, 14, EqualShards(7, 2, 14), SLOTS)
    slots = (BucketSlot(4, Span(0, 3)), BucketSlot(3, Span(3, 3)))
    whole = Bucket(1, torch.float64, torch_device, 4, whole_param_shards((0, 0, 3), (1, 3, 4)), slots)
    return Layout(2, params, (sharded, whole))


def with_bucket(index: int, **changes: Any) -> Callable[[], Layout]:
    def make() -> Layout:
        layout = make_layout()
        buckets = list(layout.buckets)
        buckets[index] = replace(buckets[index], **changes)
        return replace(layout, buckets=tuple(buckets))

    return make


def with_slots(*slots: tuple[int, int, int], bucket: int = 0) -> Callable[[], Layout]:
    return with_bucket(bucket, slots=tuple(BucketSlot(param, Span(start, stop)) for param, start, stop in slots))


def with_params(*params: Any) -> Callable[[], Layout]:
    return lambda: replace(make_layout(), params=params)


INVALID: dict[str, tuple[Callable[[], Layout], str]] = {
    "parameters out of order": (with_params(PARAMS[1], PARAMS[0], *PARAMS[2:]), "parameter 1 stands at place 0"),
    "missing parameter": (with_params(*PARAMS[:4]), "no parameter 4"),
    "extra parameter": (with_params(*PARAMS, spec(5)), r"parameter 5 has no slot"),
    "parameter longer than its slot": (
        with_params(PARAMS[0], spec(1, (7,)), *PARAMS[2:]),
        "7 elements and a slot of 6",
    ),
    "parameter shorter than its slot": (with_params(spec(0, (3,)), *PARAMS[1:]), "3 elements and a slot of 4"),
    "wrong dtype": (
        with_params(replace(PARAMS[0], dtype=torch.float16), *PARAMS[1:]),
        "float16 on cpu in a bucket of torch.float32",
    ),
    "wrong device": (
        with_params(replace(PARAMS[0], device=torch.device("cuda:1")), *PARAMS[1:]),
        "on cuda:1 in a bucket of torch.float32 on cpu",
    ),
    "buckets out of order": (
        lambda: replace(make_layout(), buckets=make_layout().buckets[::-1]),
        "bucket 1 stands at place 0",
    ),
    "missing bucket": (lambda: replace(make_layout(), buckets=make_layout().buckets[:1]), "parameter 3 has no slot"),
    "wrong world size": (lambda: replace(make_layout(), world_size=3), "bucket 0 has 2 shards for 3 ranks"),
    "equal shards too short": (with_bucket(0, shards=EqualShards(6, 2, 14)), "end at 12 of 14 elements"),
    "truncated equal shards": (with_bucket(0, shards=EqualShards(7, 2, 13)), "of bucket 0 end at"),
    "negative bucket length": (with_bucket(0, numel=-1), "of -1 elements"),
    "shards out of order": (with_bucket(1, shards=whole_param_shards((1, 0, 3), (0, 3, 4))), "belong to ranks"),
    "shard of unknown rank": (with_bucket(1, shards=whole_param_shards((0, 0, 3), (2, 3, 4))), "belong to ranks"),
    "shard of rank -1": (with_bucket(1, shards=whole_param_shards((-1, 0, 3), (1, 3, 4))), "belong to ranks"),
    "overlapping shards": (with_bucket(1, shards=whole_param_shards((0, 0, 3), (1, 2, 4))), "one behind the other"),
    "gap between shards": (with_bucket(1, shards=whole_param_shards((0, 0, 2), (1, 3, 4))), "one behind the other"),
    "negative shard length": (with_bucket(1, shards=whole_param_shards((0, 0, 5), (1, 5, 4))), "one behind the other"),
    "first shard starts late": (
        with_bucket(1, shards=whole_param_shards((0, 1, 3), (1, 3, 4))),
        "one behind the other",
    ),
    "shard past the end": (with_bucket(1, numel=3), "one behind the other"),
    "split whole parameter": (with_bucket(1, shards=whole_param_shards((0, 0, 2), (1, 2, 4))), "not fit one shard"),
    "slot of unknown parameter": (with_slots((5, 0, 4)), "no parameter 5"),
    "slot of parameter -1": (with_slots((-1, 0, 4)), "no parameter -1"),
    "overlapping slots": (with_slots((0, 0, 4), (1, 3, 9), (2, 10, 14)), "parameter 1 does not fit its place"),
    "slots out of order": (with_slots((1, 4, 10), (0, 0, 4), (2, 10, 14)), "parameter 0 does not fit its place"),
    "reversed slot": (with_slots((0, 4, 0)), "4 elements and a slot of -4"),
    "negative slot start": (with_slots((0, -2, 2)), "parameter 0 does not fit its place"),
    "slot past the end": (with_slots((0, 0, 4), (1, 4, 10), (2, 11, 15)), "parameter 2 does not fit its place"),
    "slot too small": (with_slots((0, 0, 3)), "parameter 0 has 4 elements and a slot of 3"),
    "slot too large": (with_slots((0, 0, 4), (1, 4, 11)), "parameter 1 has 6 elements and a slot of 7"),
    "slot without space for gaps": (
        with_slots((0, 0, 4), (1, 4, 10), (2, 10, 12)),
        "parameter 2 has 4 elements and a slot of 2",
    ),
    "two slots for a parameter": (with_slots((0, 0, 4), (1, 4, 10), (0, 10, 14)), "parameter 0 has two slots"),
    "two slots for an empty parameter": (with_slots((4, 0, 3), (3, 3, 3), (3, 3, 3), bucket=1), "has two slots"),
    "no slot for an empty parameter": (with_slots((4, 0, 3), bucket=1), "parameter 3 has no slot"),
}


@pytest.mark.parametrize(("make", "message"), INVALID.values(), ids=INVALID)
def test_inconsistent_layout_is_rejected(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_owners_and_buckets_of_params() -> None:
    layout = make_layout()
    assert layout.params_owned_by(Rank(0)) == (0, 1, 4)
    assert layout.params_owned_by(Rank(1)) == (1, 2, 3)
    assert [layout.owner_of(param) for param in (0, 2, 3, 4)] == [0, 1, 1, 0]
    assert [layout.bucket_of(param) for param in range(5)] == [0, 0, 0, 1, 1]


def test_sharded_param_has_no_single_owner() -> None:
    with pytest.raises(ValueError, match="unpack"):
        make_layout().owner_of(1)


def test_numel_per_rank_ignores_gaps() -> None:
    assert make_layout().numel_per_rank(trainable=True) == [7, 2]
    assert make_layout().numel_per_rank(trainable=False) == [3, 3]


def test_param_shards_are_in_element_order() -> None:
    param_shards = make_layout().param_shards(1)
    assert [(param_shard.in_param, param_shard.in_bucket, param_shard.owner) for param_shard in param_shards] == [
        ((0, 3), (4, 7), 0),
        ((3, 6), (7, 10), 1),
    ]
    assert [len(make_layout().param_shards(index)) for index in range(5)] == [1, 2, 1, 1, 1]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(SIZES, st.integers(1, 7), st.integers(0, 3))
def test_param_shard_queries_agree(sizes: list[int], ranks: int, padding: int) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    slots = tuple(BucketSlot(i, Span(end - size, end)) for i, (end, size) in enumerate(zip(ends, sizes, strict=True)))
    length = -(-ends[-1] // ranks) + padding
    bucket = Bucket(0, torch.float32, CPU, length * ranks, EqualShards(length, ranks, length * ranks), slots)
    layout = Layout(ranks, tuple(spec(i, (size,)) for i, size in enumerate(sizes)), (bucket,))
    all_shards = list(bucket.param_shards)
    assert sorted(
        param_shard for rank in range(ranks) for param_shard in bucket.param_shards_of_rank(Rank(rank))
    ) == sorted(all_shards)
    assert [param_shard for index in range(len(sizes)) for param_shard in layout.param_shards(index)] == all_shards
    found = [layout.param_shard(index, Rank(rank)) for index in range(len(sizes)) for rank in range(ranks)]
    assert [param_shard for param_shard in found if param_shard is not None] == all_shards
    for index, size in enumerate(sizes):
        param_shards = layout.param_shards(index)
        assert [element for param_shard in param_shards for element in range(*param_shard.in_param)] == list(
            range(size)
        )
        assert size == 0 or all(param_shard.in_param.length for param_shard in param_shards)
        assert size > 0 or len(param_shards) == 1


def test_empty_layout() -> None:
    empty = Layout.empty(3)
    assert (empty.params, empty.buckets, empty.params_owned_by(Rank(2)), empty.numel_per_rank(trainable=True)) == (
        (),
        (),
        (),
        [0] * 3,
    )


# ---- shards


@pytest.mark.parametrize("shards", [EqualShards(3, 4, 12), whole_param_shards((1, 0, 5), (3, 5, 12), ranks=4)])
def test_owner_at_matches_shards(shards: Shards) -> None:
    spans = list(shards)
    assert len(shards) == len(spans) == 4
    assert [spans[shards.owner_at(offset)].contains(Span(offset, offset + 1)) for offset in range(12)] == [True] * 12
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert shards[1:3] == spans[1:3]
    with pytest.raises(IndexError):
        shards[4]


@pytest.mark.parametrize("shards", [EqualShards(3, 4, 12), whole_param_shards((1, 0, 5), (3, 5, 12), ranks=4)])
@pytest.mark.parametrize("stop", [0, 4, 7, 12])
def test_truncate(shards: Shards, stop: int) -> None:
    assert list(shards.truncate(stop)) == [Span(min(a, stop), min(b, stop)) for a, b in shards]


def test_empty_shards() -> None:
    assert list(whole_param_shards(ranks=2)) == list(EqualShards(0, 2, 0)) == [Span(0, 0)] * 2
    assert whole_param_shards(ranks=2).owner_at(0) == EqualShards(0, 2, 0).owner_at(0) == 0


# ---- digests


def test_digest_ignores_device_index() -> None:
    assert make_layout("cuda:0").digest == make_layout("cuda:3").digest
    assert make_layout("cuda:0").digest != make_layout("cpu").digest


def make_with_owners(first: int, second: int) -> Layout:
    """Two parameters in one bucket, owned by these ranks."""
    slots = (BucketSlot(0, Span(0, 4)), BucketSlot(1, Span(4, 8)))
    bucket = Bucket(0, torch.float32, CPU, 8, whole_param_shards((first, 0, 4), (second, 4, 8), ranks=3), slots)
    return Layout(3, (spec(0), spec(1)), (bucket,))


def make_with_offset(start: int) -> Layout:
    """Parameter 2 starts here, in a shard with space left."""
    slots = (*SLOTS[:2], BucketSlot(2, Span(start, start + 4)))
    return with_bucket(0, numel=16, shards=EqualShards(8, 2, 16), slots=slots)()


def make_with_order(first: int, second: int) -> Layout:
    """Two parameters of equal size in this order."""
    slots = (BucketSlot(first, Span(0, 4)), BucketSlot(second, Span(4, 8)))
    return Layout(2, (spec(0), spec(1)), (Bucket(0, torch.float32, CPU, 8, EqualShards(4, 2, 8), slots),))


def make_with_dtype(dtype: torch.dtype) -> Layout:
    params = tuple(replace(param_spec, dtype=dtype) for param_spec in PARAMS)
    return Layout(2, params, tuple(replace(bucket, dtype=dtype) for bucket in make_layout().buckets))


def make_with_shard_length(length: int) -> Layout:
    """One parameter, sharded at this length."""
    shards = EqualShards(length, 4, 12)
    return Layout(4, (spec(0, (8,)),), (Bucket(0, torch.float32, CPU, 12, shards, (BucketSlot(0, Span(0, 8)),)),))


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        (make_with_owners(0, 1), make_with_owners(0, 2)),
        (make_with_offset(10), make_with_offset(12)),
        (make_with_order(0, 1), make_with_order(1, 0)),
        (make_with_dtype(torch.float16), make_with_dtype(torch.bfloat16)),
        (make_with_shard_length(3), make_with_shard_length(4)),
        (with_bucket(0, numel=14)(), with_bucket(0, numel=16, shards=EqualShards(8, 2, 16))()),
        (Layout.empty(1), Layout.empty(2)),
    ],
    ids=["owner", "offset", "order", "dtype", "shard length", "bucket length", "world size"],
)
def test_different_layouts_have_different_digests(layout: Layout, other: Layout) -> None:
    assert layout.digest != other.digest
    assert layout.digest == replace(layout).digest


def test_digest_ignores_names() -> None:
    """Names are compared one by one elsewhere; the digest covers positions only."""
    named = tuple(replace(param_spec, name=f"layer.{param_spec.index}") for param_spec in PARAMS)
    assert with_params(*named)().digest == make_layout().digest
