"""The format of lossless deltas of 16-bit weights, which C (native.c) and Triton write and read.

Sender and receiver hold the same `old` weights. The changes of each block of 256 elements are encoded as the shortest
of three bodies, each padded to an even number of bytes:

    body     kind       bytes                                                encodes
    sparse   n <= 63    c | n positions | remainders | quotients             z - 1 of the n elements that have changed
    dense    c >= 64    remainders | quotients                               z of all elements
    raw      255        2 per element                                        the new bits themselves

    z            zigzag of order(new) - order(old) modulo 2^16
    order        bits ^ ((bits >> 15) & 0x7FFF), which numbers 16-bit floats by increasing value; -0.0 becomes -1
    k            max(c - exponent of old, 0), at most 15: the Rice parameter of an element. AdamW changes all weights
                 by about the learning rate, so small weights change by more units in the last place. The receiver
                 computes k from c and the old weight
    remainders   the low k bits of each value, concatenated
    quotients    value >> k in unary: that many zeros, then a one
    c            exponent at which the mean z of the block is 0.8 to 1.6, if the z of a weight with the old exponent e
                 counts as z / 2^(c - e); limited to 64..254

Letters in shapes: S: number of weights; B: number of blocks of 256 weights; C: bytes of all bodies together. Bits are
numbered from the lowest bit of a byte.

PULSE (arXiv 2602.03839) observed that few 16-bit weights change in a step. The encoding is a Rice code with a parameter
that depends on the element's old exponent.
"""

from __future__ import annotations

import torch

BLOCK = 256  # number of weights per delta block; their changes are encoded together
# Kinds of a block's body: 0 to MOST_POSITIONS for a sparse body (the number of changed weights), DENSE to RAW - 1 for a
# dense body (the exponent c), and RAW.
MOST_POSITIONS, DENSE, RAW = 63, 64, 255
MOST_QUOTIENTS = 1024  # maximum bits of a body's unary quotients; a block that needs more is sent as a raw body
# For each dtype, the shift and mask that extract a weight's exponent, and an offset that is added to the exponent. The
# offset moves fp16's exponents into the range of c, DENSE to RAW - 1, because a dense block stores c as its kind.
EXPONENTS = {torch.bfloat16: (7, 0xFF, 0), torch.float16: (10, 0x1F, 96)}
