import pytest
import torch

from weight_sync.snapshot import Snapshot


def model(scale: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("w", torch.arange(6, dtype=torch.float32).view(2, 3) * scale),
        ("b", torch.full((4,), scale, dtype=torch.bfloat16)),
        ("v", torch.full((2,), -scale)),
    ]


def unpack(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """What a receiver does: slices of the flat bytes, seen as each tensor's dtype and shape."""
    tensors = {}
    for bucket, flat in snapshot.buckets():
        start = 0
        for spec in bucket.tensors:
            part = flat[start : start + spec.num_bytes]
            tensors[spec.name] = part.view(getattr(torch, spec.dtype)).view(spec.shape).clone()
            start += spec.num_bytes
    return tensors


@pytest.mark.parametrize("bucket_bytes", [1, 24, 10_000])
def test_what_a_receiver_unpacks_is_bit_for_bit_what_was_captured(bucket_bytes: int) -> None:
    snapshot = Snapshot(bucket_bytes, should_pin=False)
    for scale in (1.0, 3.3, -7.1):
        snapshot.capture(model(scale))
        received = unpack(snapshot)
        assert list(received) == ["w", "b", "v"]
        for name, tensor in model(scale):
            assert torch.equal(received[name], tensor), name
    assert snapshot.num_bytes == 6 * 4 + 4 * 2 + 2 * 4


def test_a_capture_does_not_follow_later_changes_of_the_source() -> None:
    tensors = model(2.0)
    snapshot = Snapshot(1000, should_pin=False)
    snapshot.capture(tensors)
    tensors[0][1].zero_()
    assert unpack(snapshot)["w"][1, 2] == 10.0


def test_buffers_are_used_again_by_the_next_capture() -> None:
    snapshot = Snapshot(1000, should_pin=False)
    snapshot.capture(model(1.0))
    before = [flat.data_ptr() for _, flat in snapshot.buckets()]
    snapshot.capture(model(2.0))
    assert [flat.data_ptr() for _, flat in snapshot.buckets()] == before


def test_a_model_that_changes_its_tensors_is_refused() -> None:
    snapshot = Snapshot(1000, should_pin=False)
    snapshot.capture(model(1.0))
    with pytest.raises(ValueError, match="tensor 1 of the model"):
        snapshot.capture([model(1.0)[0], ("other", torch.zeros(3))])
    with pytest.raises(ValueError, match="2 tensors given, 3 expected"):
        snapshot.capture(model(1.0)[:2])
