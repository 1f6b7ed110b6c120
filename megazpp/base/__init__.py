"""Flags and their checks, the outer frame of every program, files and errors."""
