"""The lowest layer, which all others import: flags, command lines, launcher detection, files, and errors."""
