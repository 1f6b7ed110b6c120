"""Elastic DiLoCo: replica groups are separate jobs that may start, end and fall behind while the run goes on."""
