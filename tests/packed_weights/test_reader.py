"""Test the checksum of a checkpoint's weights, by which ranks compare what they load."""

import torch

from megazpp.packed_weights.reader import sum_of_bits, wrapped


def test_tensor_checksum_is_the_sum_of_its_boxes_and_sees_positions():
    """Ranks read a tensor in boxes of any shape. Swapped elements, or another tensor's name, must change the sum."""
    whole = torch.randn(3, 4)
    total = sum_of_bits("x", whole, (0, 0), whole.shape)
    boxes = [(0, 0, whole[:1]), (1, 0, whole[1:, :3]), (1, 3, whole[1:, 3:])]
    assert wrapped(sum(sum_of_bits("x", box, place, whole.shape) for *place, box in boxes)) == total
    swapped = whole.clone()
    swapped[0, 1], swapped[1, 0] = whole[1, 0], whole[0, 1]
    assert sum_of_bits("x", swapped, (0, 0), whole.shape) != total != sum_of_bits("y", whole, (0, 0), whole.shape)
