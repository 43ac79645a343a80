import pytest

from weight_sync.buckets import plan_buckets
from weight_sync.types import TensorSpec


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def names(tensors: list[TensorSpec], bucket_bytes: int) -> list[list[str]]:
    return [[t.name for t in b.tensors] for b in plan_buckets(tensors, bucket_bytes)]


def test_buckets_hold_at_most_the_given_bytes_in_the_given_order() -> None:
    tensors = [spec("a", 2), spec("b", 2), spec("c", 1)]
    assert names(tensors, 16) == [["a", "b"], ["c"]]
    assert [b.num_bytes for b in plan_buckets(tensors, 16)] == [16, 4]


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    assert names([spec("a", 1), spec("huge", 100), spec("b", 1)], 16) == [["a"], ["huge"], ["b"]]


def test_a_bucket_has_one_dtype_so_that_every_slice_is_aligned() -> None:
    tensors = [spec("a", 1, dtype="bfloat16"), spec("b", 1), spec("c", 1)]
    assert names(tensors, 1000) == [["a"], ["b", "c"]]


def test_a_bucket_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_sync\.bucket_bytes=0"):
        plan_buckets([], 0)
