"""Floor 2: layers split over the tensor-parallel axis."""
