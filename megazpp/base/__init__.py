"""Layers that everything imports: flags and their parser, command lines of programs, files and errors."""
