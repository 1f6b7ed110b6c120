"""Pure tensor functions that never learn that ranks exist, imported as `megazpp.kernels`.

`megazpp/kernels` is a symbolic link to this folder. The import name `kernels` belongs to Hugging Face's package.
"""
