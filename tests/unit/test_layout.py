"""A layout refuses to contradict itself, and answers who owns what."""

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
    spec(2, (2,), stride=(3,)),  # 2 elements over 4 places
    spec(3, (0, 5), dtype=torch.float64),
    spec(4, (3,), dtype=torch.float64),
)
ROOMS = (BucketSlot(0, Span(0, 4)), BucketSlot(1, Span(4, 10)), BucketSlot(2, Span(10, 14)))


def dealt(*spans: tuple[int, int, int], ranks: int = 2) -> WholeParamShards:
    return WholeParamShards({Rank(rank): Span(start, stop) for rank, start, stop in spans}, ranks)


def layout(device: str = "cpu") -> Layout:
    """Two ranks, five parameters; parameter 1 is divided, parameter 3 is empty.

    bucket 0   | shard of rank 0             | shard of rank 1            |
               | p0 p0 p0 p0 | p1 p1 p1 || p1 p1 p1 | p2 . . p2 |
    bucket 1   | p4 p4 p4 | p3               |
    """
    where = torch.device(device)
    params = tuple(replace(one, device=where) for one in PARAMS)
    cut = Bucket(0, torch.float32, where, 14, EqualShards(7, 2, 14), ROOMS)
    rooms = (BucketSlot(4, Span(0, 3)), BucketSlot(3, Span(3, 3)))
    whole = Bucket(1, torch.float64, where, 4, dealt((0, 0, 3), (1, 3, 4)), rooms)
    return Layout(2, params, (cut, whole))


def with_bucket(number: int, **changes: Any) -> Callable[[], Layout]:
    def make() -> Layout:
        good = layout()
        buckets = list(good.buckets)
        buckets[number] = replace(buckets[number], **changes)
        return replace(good, buckets=tuple(buckets))

    return make


def with_rooms(*rooms: tuple[int, int, int], bucket: int = 0) -> Callable[[], Layout]:
    return with_bucket(bucket, slots=tuple(BucketSlot(param, Span(start, stop)) for param, start, stop in rooms))


def with_params(*params: Any) -> Callable[[], Layout]:
    return lambda: replace(layout(), params=params)


BROKEN: dict[str, tuple[Callable[[], Layout], str]] = {
    "parameters out of order": (with_params(PARAMS[1], PARAMS[0], *PARAMS[2:]), "parameter 1 stands at place 0"),
    "a parameter too few": (with_params(*PARAMS[:4]), "no parameter 4"),
    "a parameter too many": (with_params(*PARAMS, spec(5)), r"parameter 5 has no slot"),
    "a parameter that ends early": (with_params(PARAMS[0], spec(1, (7,)), *PARAMS[2:]), "7 elements and a slot of 6"),
    "a parameter that ends late": (with_params(spec(0, (3,)), *PARAMS[1:]), "3 elements and a slot of 4"),
    "another parameter's dtype": (
        with_params(replace(PARAMS[0], dtype=torch.float16), *PARAMS[1:]),
        "float16 on cpu in a bucket of torch.float32",
    ),
    "another parameter's device": (
        with_params(replace(PARAMS[0], device=torch.device("cuda:1")), *PARAMS[1:]),
        "on cuda:1 in a bucket of torch.float32 on cpu",
    ),
    "buckets out of order": (lambda: replace(layout(), buckets=layout().buckets[::-1]), "bucket 1 stands at place 0"),
    "a bucket too few": (lambda: replace(layout(), buckets=layout().buckets[:1]), "parameter 3 has no slot"),
    "another number of ranks": (lambda: replace(layout(), world_size=3), "bucket 0 has 2 shards for 3 ranks"),
    "equal shards too short": (with_bucket(0, shards=EqualShards(6, 2, 14)), "end at 12 of 14 elements"),
    "equal shards that are clipped": (with_bucket(0, shards=EqualShards(7, 2, 13)), "of bucket 0 end at"),
    "a bucket of negative length": (with_bucket(0, numel=-1), "of -1 elements"),
    "shards out of order": (with_bucket(1, shards=dealt((1, 0, 3), (0, 3, 4))), "belong to ranks"),
    "a shard of no rank": (with_bucket(1, shards=dealt((0, 0, 3), (2, 3, 4))), "belong to ranks"),
    "a shard of rank -1": (with_bucket(1, shards=dealt((-1, 0, 3), (1, 3, 4))), "belong to ranks"),
    "shards that overlap": (with_bucket(1, shards=dealt((0, 0, 3), (1, 2, 4))), "one behind the other"),
    "shards with a gap": (with_bucket(1, shards=dealt((0, 0, 2), (1, 3, 4))), "one behind the other"),
    "a shard of negative length": (with_bucket(1, shards=dealt((0, 0, 5), (1, 5, 4))), "one behind the other"),
    "a shard that starts late": (with_bucket(1, shards=dealt((0, 1, 3), (1, 3, 4))), "one behind the other"),
    "a shard beyond the end": (with_bucket(1, numel=3), "one behind the other"),
    "a dealt parameter that is cut": (with_bucket(1, shards=dealt((0, 0, 2), (1, 2, 4))), "not fit one shard"),
    "a room of no parameter": (with_rooms((5, 0, 4)), "no parameter 5"),
    "a room of parameter -1": (with_rooms((-1, 0, 4)), "no parameter -1"),
    "rooms that overlap": (with_rooms((0, 0, 4), (1, 3, 9), (2, 10, 14)), "parameter 1 does not fit its place"),
    "rooms out of order": (with_rooms((1, 4, 10), (0, 0, 4), (2, 10, 14)), "parameter 0 does not fit its place"),
    "a room turned around": (with_rooms((0, 4, 0)), "4 elements and a slot of -4"),
    "a room that starts below 0": (with_rooms((0, -2, 2)), "parameter 0 does not fit its place"),
    "a room beyond the end": (with_rooms((0, 0, 4), (1, 4, 10), (2, 11, 15)), "parameter 2 does not fit its place"),
    "a room too small": (with_rooms((0, 0, 3)), "parameter 0 has 4 elements and a slot of 3"),
    "a room too large": (with_rooms((0, 0, 4), (1, 4, 11)), "parameter 1 has 6 elements and a slot of 7"),
    "no room for gaps": (with_rooms((0, 0, 4), (1, 4, 10), (2, 10, 12)), "parameter 2 has 4 elements and a slot of 2"),
    "a parameter placed twice": (with_rooms((0, 0, 4), (1, 4, 10), (0, 10, 14)), "parameter 0 has two slots"),
    "an empty parameter placed twice": (with_rooms((4, 0, 3), (3, 3, 3), (3, 3, 3), bucket=1), "has two slots"),
    "an empty parameter not placed": (with_rooms((4, 0, 3), bucket=1), "parameter 3 has no slot"),
}


@pytest.mark.parametrize(("make", "message"), BROKEN.values(), ids=BROKEN)
def test_a_contradiction_is_refused(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_who_owns_what() -> None:
    made = layout()
    assert made.params_owned_by(Rank(0)) == (0, 1, 4)
    assert made.params_owned_by(Rank(1)) == (1, 2, 3)
    assert [made.owner_of(param) for param in (0, 2, 3, 4)] == [0, 1, 1, 0]
    assert [made.bucket_of(param) for param in range(5)] == [0, 0, 0, 1, 1]


def test_a_divided_parameter_has_no_one_owner() -> None:
    with pytest.raises(ValueError, match="unpack"):
        layout().owner_of(1)


def test_loads_count_elements_and_not_gaps() -> None:
    assert layout().numel_per_rank(trainable=True) == [7, 2]
    assert layout().numel_per_rank(trainable=False) == [3, 3]


def test_pieces_of_a_parameter_are_in_the_order_of_its_elements() -> None:
    pieces = layout().param_shards(1)
    assert [(it.in_param, it.in_bucket, it.owner) for it in pieces] == [((0, 3), (4, 7), 0), ((3, 6), (7, 10), 1)]
    assert [len(layout().param_shards(index)) for index in range(5)] == [1, 2, 1, 1, 1]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(SIZES, st.integers(1, 7), st.integers(0, 3))
def test_all_ways_to_ask_for_pieces_agree(sizes: list[int], ranks: int, padding: int) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    rooms = tuple(BucketSlot(i, Span(end - size, end)) for i, (end, size) in enumerate(zip(ends, sizes, strict=True)))
    length = -(-ends[-1] // ranks) + padding
    bucket = Bucket(0, torch.float32, CPU, length * ranks, EqualShards(length, ranks, length * ranks), rooms)
    made = Layout(ranks, tuple(spec(i, (size,)) for i, size in enumerate(sizes)), (bucket,))
    everyones = list(bucket.param_shards)
    assert sorted(piece for rank in range(ranks) for piece in bucket.param_shards_of_rank(Rank(rank))) == sorted(
        everyones
    )
    assert [piece for index in range(len(sizes)) for piece in made.param_shards(index)] == everyones
    found = [made.param_shard(index, Rank(rank)) for index in range(len(sizes)) for rank in range(ranks)]
    assert [piece for piece in found if piece is not None] == everyones
    for index, size in enumerate(sizes):
        pieces = made.param_shards(index)
        assert [it for piece in pieces for it in range(*piece.in_param)] == list(range(size))
        assert size == 0 or all(piece.in_param.length for piece in pieces)
        assert size > 0 or len(pieces) == 1


def test_the_empty_layout() -> None:
    empty = Layout.empty(3)
    assert (empty.params, empty.buckets, empty.params_owned_by(Rank(2)), empty.numel_per_rank(trainable=True)) == (
        (),
        (),
        (),
        [0] * 3,
    )


# ---- shards


@pytest.mark.parametrize("shards", [EqualShards(3, 4, 12), dealt((1, 0, 5), (3, 5, 12), ranks=4)])
def test_every_place_lies_in_the_shard_of_its_holder(shards: Shards) -> None:
    spans = list(shards)
    assert len(shards) == len(spans) == 4
    assert [spans[shards.owner_at(place)].contains(Span(place, place + 1)) for place in range(12)] == [True] * 12
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert shards[1:3] == spans[1:3]
    with pytest.raises(IndexError):
        shards[4]


@pytest.mark.parametrize("shards", [EqualShards(3, 4, 12), dealt((1, 0, 5), (3, 5, 12), ranks=4)])
@pytest.mark.parametrize("stop", [0, 4, 7, 12])
def test_shards_of_a_bucket_that_ends_earlier(shards: Shards, stop: int) -> None:
    assert list(shards.truncate(stop)) == [Span(min(a, stop), min(b, stop)) for a, b in shards]


def test_shards_of_nothing() -> None:
    assert list(dealt(ranks=2)) == list(EqualShards(0, 2, 0)) == [Span(0, 0)] * 2
    assert dealt(ranks=2).owner_at(0) == EqualShards(0, 2, 0).owner_at(0) == 0


# ---- digests


def test_the_digest_does_not_depend_on_device_numbers() -> None:
    assert layout("cuda:0").digest == layout("cuda:3").digest
    assert layout("cuda:0").digest != layout("cpu").digest


def owned(first: int, second: int) -> Layout:
    """Two parameters in one bucket belong to these ranks."""
    rooms = (BucketSlot(0, Span(0, 4)), BucketSlot(1, Span(4, 8)))
    bucket = Bucket(0, torch.float32, CPU, 8, dealt((first, 0, 4), (second, 4, 8), ranks=3), rooms)
    return Layout(3, (spec(0), spec(1)), (bucket,))


def placed(start: int) -> Layout:
    """Parameter 2 lies here, in a shard with room to spare."""
    rooms = (*ROOMS[:2], BucketSlot(2, Span(start, start + 4)))
    return with_bucket(0, numel=16, shards=EqualShards(8, 2, 16), slots=rooms)()


def ordered(first: int, second: int) -> Layout:
    """Two parameters of one size change places."""
    rooms = (BucketSlot(first, Span(0, 4)), BucketSlot(second, Span(4, 8)))
    return Layout(2, (spec(0), spec(1)), (Bucket(0, torch.float32, CPU, 8, EqualShards(4, 2, 8), rooms),))


def typed(dtype: torch.dtype) -> Layout:
    params = tuple(replace(one, dtype=dtype) for one in PARAMS)
    return Layout(2, params, tuple(replace(bucket, dtype=dtype) for bucket in layout().buckets))


def cut(at: int) -> Layout:
    """One parameter, cut in another place."""
    shards = EqualShards(at, 4, 12)
    return Layout(4, (spec(0, (8,)),), (Bucket(0, torch.float32, CPU, 12, shards, (BucketSlot(0, Span(0, 8)),)),))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (owned(0, 1), owned(0, 2)),
        (placed(10), placed(12)),
        (ordered(0, 1), ordered(1, 0)),
        (typed(torch.float16), typed(torch.bfloat16)),
        (cut(3), cut(4)),
        (with_bucket(0, numel=14)(), with_bucket(0, numel=16, shards=EqualShards(8, 2, 16))()),
        (Layout.empty(1), Layout.empty(2)),
    ],
    ids=["owner", "place", "order", "dtype", "cut", "room", "ranks"],
)
def test_the_digest_tells_layouts_apart(one: Layout, other: Layout) -> None:
    assert one.digest != other.digest
    assert one.digest == replace(one).digest


def test_the_digest_does_not_look_at_names() -> None:
    """Names are compared one by one, in words; the digest speaks of places."""
    named = tuple(replace(one, name=f"layer.{one.index}") for one in PARAMS)
    assert with_params(*named)().digest == layout().digest
