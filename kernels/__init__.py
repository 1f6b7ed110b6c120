"""Functions on the tensors of one process, without communication, imported as `megazpp.kernels`.

`megazpp/kernels` is a symbolic link to this folder, because the import name `kernels` belongs to Hugging Face's
package.
"""
