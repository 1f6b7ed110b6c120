"""Layers that are split over the tensor-parallel axis."""
