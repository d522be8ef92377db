"""A layout refuses to contradict itself, and answers who owns what."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.specs import spec
from zeroshard.errors import LayoutError
from zeroshard.layout.layout import Bucket, Layout, Piece
from zeroshard.units import Rank, Span

CPU = torch.device("cpu")
PARAMS = (
    spec(0, (4,)),
    spec(1, (2, 3), trainable=False),
    spec(2, (2,), stride=(3,)),  # 2 elements over 4 places
    spec(3, (0, 5), dtype=torch.float64),
)


def piece(param: int, in_param: tuple[int, int], bucket: int, in_bucket: tuple[int, int], owner: int) -> Piece:
    return Piece(param, Span(*in_param), bucket, Span(*in_bucket), Rank(owner))


def layout(device: str = "cpu") -> Layout:
    """Two ranks, four parameters; parameter 1 is divided, parameter 3 is empty.

    bucket 0   | shard of rank 0 | shard of rank 1      |
               | p0 p0 p0 p0 | p1 p1 p1 || p1 p1 p1 | p2 . . p2 |
    """
    where = torch.device(device)
    params = tuple(replace(one, device=where) for one in PARAMS)
    pieces = (
        piece(0, (0, 4), 0, (0, 4), 0),
        piece(1, (0, 3), 0, (4, 7), 0),
        piece(1, (3, 6), 0, (7, 10), 1),
        piece(2, (0, 4), 0, (10, 14), 1),
    )
    full = Bucket(0, torch.float32, where, 14, (Span(0, 7), Span(7, 14)), pieces)
    empty = Bucket(1, torch.float64, where, 0, (Span(0, 0), Span(0, 0)), (piece(3, (0, 0), 1, (0, 0), 1),))
    return Layout(2, params, (full, empty))


def with_bucket(number: int, **changes: Any) -> Callable[[], Layout]:
    def make() -> Layout:
        good = layout()
        buckets = list(good.buckets)
        buckets[number] = replace(buckets[number], **changes)
        return replace(good, buckets=tuple(buckets))

    return make


def with_piece(number: int, **changes: Any) -> Callable[[], Layout]:
    pieces = list(layout().buckets[0].pieces)
    pieces[number] = pieces[number]._replace(**changes)
    return with_bucket(0, pieces=tuple(pieces))


def with_params(*params: Any) -> Callable[[], Layout]:
    return lambda: replace(layout(), params=params)


PIECES = layout().buckets[0].pieces
EMPTY = layout().buckets[1].pieces[0]

BROKEN: dict[str, tuple[Callable[[], Layout], str]] = {
    "parameters out of order": (with_params(PARAMS[1], PARAMS[0], *PARAMS[2:]), "parameter 1 stands at place 0"),
    "a parameter too few": (with_params(*PARAMS[:3]), "no parameter 3"),
    "a parameter too many": (with_params(*PARAMS, spec(4)), "parameter 4 is not covered from element 0"),
    "a parameter that ends early": (with_params(PARAMS[0], spec(1, (7,)), *PARAMS[2:]), "not covered from element 6"),
    "a parameter that ends late": (with_params(spec(0, (3,)), *PARAMS[1:]), "parameter 0 is not covered"),
    "another parameter's dtype": (
        with_params(replace(PARAMS[0], dtype=torch.float16), *PARAMS[1:]),
        "float16 on cpu in a bucket of torch.float32",
    ),
    "another parameter's device": (
        with_params(replace(PARAMS[0], device=torch.device("cuda:1")), *PARAMS[1:]),
        "on cuda:1 in a bucket of torch.float32 on cpu",
    ),
    "buckets out of order": (lambda: replace(layout(), buckets=layout().buckets[::-1]), "bucket 1 stands at place 0"),
    "a bucket too few": (lambda: replace(layout(), buckets=layout().buckets[:1]), "parameter 3 is not covered"),
    "a shard too few": (with_bucket(0, shards=(Span(0, 14),)), "bucket 0 has 1 shards for 2 ranks"),
    "another number of ranks": (lambda: replace(layout(), world_size=3), "bucket 0 has 2 shards for 3 ranks"),
    "shards out of order": (with_bucket(0, shards=(Span(7, 14), Span(0, 7))), "shards of bucket 0 are out of order"),
    "shards that overlap": (with_bucket(0, shards=(Span(0, 8), Span(7, 14))), "out of order"),
    "a shard of negative length": (with_bucket(0, shards=(Span(0, 15), Span(15, 14))), "out of order"),
    "a shard that starts below 0": (with_bucket(0, shards=(Span(-1, 7), Span(7, 14))), "out of order"),
    "a shard beyond the end": (with_bucket(0, numel=13), "out of order"),
    "a piece of no parameter": (with_piece(0, param=4), "no parameter 4"),
    "a piece of parameter -1": (with_piece(3, param=-1), "no parameter -1"),
    "a piece of no rank": (with_piece(3, owner=Rank(2)), "no rank 2"),
    "a piece of rank -1": (with_piece(3, owner=Rank(-1)), "no rank -1"),
    "a piece of another bucket": (with_piece(0, bucket=1), "listed in bucket 0 and meant for 1"),
    "a piece in another's shard": (with_piece(0, owner=Rank(1)), "parameter 0 does not fit its place"),
    "pieces that overlap in memory": (with_piece(1, in_bucket=Span(3, 6)), "parameter 1 does not fit its place"),
    "pieces out of order": (with_bucket(0, pieces=(PIECES[1], PIECES[0], *PIECES[2:])), "does not fit its place"),
    "a piece turned around": (with_piece(1, in_bucket=Span(7, 4)), "parameter 1 does not fit its place"),
    "a place too small": (with_piece(0, in_bucket=Span(0, 3)), "parameter 0 has a place of the wrong size"),
    "a place too small for a part": (with_piece(2, in_bucket=Span(7, 9)), "parameter 1 has a place of the wrong size"),
    "a place too large": (
        with_bucket(
            0, numel=15, shards=(Span(0, 7), Span(7, 15)), pieces=(*PIECES[:3], piece(2, (0, 2), 0, (10, 15), 1))
        ),
        "parameter 2 has a place of the wrong size",
    ),
    "no room for gaps": (with_piece(3, in_bucket=Span(10, 12)), "parameter 2 has a place of the wrong size"),
    "a gap in a parameter": (with_piece(2, in_param=Span(4, 6)), "gap or an overlap at element 3"),
    "an overlap in a parameter": (with_piece(2, in_param=Span(2, 5)), "gap or an overlap at element 3"),
    "a parameter placed twice": (
        with_bucket(0, pieces=(*PIECES[:3], piece(0, (0, 4), 0, (10, 14), 1))),
        "parameter 0 has a gap or an overlap",
    ),
    "an empty parameter placed twice": (with_bucket(1, pieces=(EMPTY, EMPTY)), "parameter 3 has an empty piece"),
    "an empty piece beside others": (
        with_bucket(0, pieces=(*PIECES[:2], piece(1, (3, 3), 0, (7, 7), 1), *PIECES[2:])),
        "parameter 1 has an empty piece",
    ),
    "an empty parameter not placed": (with_bucket(1, pieces=()), "parameter 3 is not covered"),
}


@pytest.mark.parametrize(("make", "message"), BROKEN.values(), ids=BROKEN)
def test_a_contradiction_is_refused(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_who_owns_what() -> None:
    made = layout()
    assert made.owned_by(Rank(0)) == (0, 1)
    assert made.owned_by(Rank(1)) == (1, 2, 3)
    assert [made.owner_of(param) for param in (0, 2, 3)] == [0, 1, 1]


def test_a_divided_parameter_has_no_one_owner() -> None:
    with pytest.raises(ValueError, match="unpack"):
        layout().owner_of(1)


def test_loads_count_elements_and_not_gaps() -> None:
    assert layout().loads(trainable=True) == [4, 2]
    assert layout().loads(trainable=False) == [3, 3]


def test_pieces_of_a_parameter_are_in_the_order_of_its_elements() -> None:
    """Also where a later part of it lies in an earlier bucket."""
    params = (spec(0, (5,)),)
    late = Bucket(0, torch.float32, CPU, 2, (Span(0, 2),), (piece(0, (3, 5), 0, (0, 2), 0),))
    early = Bucket(1, torch.float32, CPU, 3, (Span(0, 3),), (piece(0, (0, 3), 1, (0, 3), 0),))
    made = Layout(1, params, (late, early))
    assert [one.in_param for one in made.pieces_by_param[0]] == [(0, 3), (3, 5)]
    assert [len(pieces) for pieces in layout().pieces_by_param] == [1, 2, 1, 1]


def test_shards_may_leave_room_between_them() -> None:
    shards = (Span(0, 7), Span(7, 14))
    assert with_bucket(0, numel=16, shards=shards)().buckets[0].numel == 16


def test_the_empty_layout() -> None:
    empty = Layout.empty(3)
    assert (empty.params, empty.buckets, empty.owned_by(Rank(2)), empty.loads(trainable=True)) == ((), (), (), [0] * 3)


def test_the_digest_does_not_depend_on_device_numbers() -> None:
    assert layout("cuda:0").digest == layout("cuda:3").digest
    assert layout("cuda:0").digest != layout("cpu").digest


def owned(owner: int) -> Layout:
    """The empty parameter belongs to this rank."""
    return with_bucket(1, pieces=(EMPTY._replace(owner=Rank(owner)),))()


def placed(start: int) -> Layout:
    """Parameter 2 lies here, in a shard with room to spare."""
    pieces = (*PIECES[:3], PIECES[3]._replace(in_bucket=Span(start, start + 4)))
    return with_bucket(0, numel=16, shards=(Span(0, 7), Span(7, 16)), pieces=pieces)()


def ordered(first: int, second: int) -> Layout:
    """Two parameters of one size change places."""
    pieces = (piece(first, (0, 4), 0, (0, 4), 0), piece(second, (0, 4), 0, (4, 8), 1))
    return Layout(2, (spec(0), spec(1)), (Bucket(0, torch.float32, CPU, 8, (Span(0, 4), Span(4, 8)), pieces),))


def typed(dtype: torch.dtype) -> Layout:
    params = tuple(replace(one, dtype=dtype) for one in PARAMS)
    return Layout(2, params, tuple(replace(bucket, dtype=dtype) for bucket in layout().buckets))


def cut(at: int) -> Layout:
    """One parameter in two pieces, in two buckets of fixed size."""
    first = Bucket(0, torch.float32, CPU, 4, (Span(0, 4),), (piece(0, (0, at), 0, (0, at), 0),))
    second = Bucket(1, torch.float32, CPU, 4, (Span(0, 4),), (piece(0, (at, 4), 1, (0, 4 - at), 0),))
    return Layout(1, (spec(0),), (first, second))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (owned(0), owned(1)),
        (placed(10), placed(12)),
        (ordered(0, 1), ordered(1, 0)),
        (typed(torch.float16), typed(torch.bfloat16)),
        (cut(1), cut(3)),
        (with_bucket(0, numel=14)(), with_bucket(0, numel=15)()),
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
