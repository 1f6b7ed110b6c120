/* Block quantization in C: each block is loaded, computed and stored while it is in the L1 cache.

The arithmetic equals reference.py, operation by operation. Compilers vectorize every loop over elements: the loops have
no calls and no branches, only conditional expressions. Where a NaN must determine the result, they compare floats as
integers. Compile with -ffp-contract=off and without -ffast-math, because contraction and fast math change rounding.

A, B: leading dims of data and messages; K: number of messages that are summed; n: elements of a row; M: bytes of a
message. Each struct has the fields of its counterpart in native.py, 8 bytes each.
*/

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAX_BLOCK_SIZE 2048
#define CHUNK 32 /* divides every block size: loops over size / CHUNK * CHUNK elements vectorize without a remainder */
#define INFINITE 0x7F800000u
#define NAN_BITS 0x7FC00000u
#define LOOP static __attribute__((noinline)) /* after inlining, gcc 12 loses `restrict` and does not vectorize */

enum dtype { FP32, BF16, FP16 };

/* A tensor of elements [A, B, n]; strides in bytes. */
struct data {
    char *start;
    int64_t stride_a, stride_b, dtype;
};

/* A tensor of messages [K, A, B, M]; strides in bytes. */
struct messages {
    char *start;
    int64_t stride_k, stride_a, stride_b;
};

struct shape {
    int64_t k, a, b;
};

/* A segment of a row: its first element, its number of elements, and the offsets in bytes of its integers (payload) and
scales in the message. scales is -1 for a segment of unquantized elements. */
struct range {
    int64_t start, size, payload, scales;
};

/* The table of segments and their format (range_table.py); dtype is the dtype of unquantized elements in a message. */
struct table {
    const struct range *ranges;
    int64_t num_ranges, bits, block_size, clip, dtype;
};

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x), rounded = bits + 0x7FFF + ((bits >> 16) & 1); /* round half to even */
    return (uint16_t)(((bits & 0x7FFFFFFF) > INFINITE ? NAN_BITS : rounded) >> 16);
}

static inline float from_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

static inline float from_fp16(uint16_t half) {
    uint32_t magnitude = half & 0x7FFFu;
    uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f); /* corrects the exponent bias */
    return float_of((uint32_t)(half & 0x8000u) << 16 | (magnitude >= 0x7C00 ? magnitude << 13 | INFINITE : finite));
}

/* Bits of floats: 2^-14, the smallest normal fp16, is 0x38800000. 65520, from which on floats round to infinity, is
0x477FF000. */
static inline uint16_t to_fp16(float x) {
    uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    /* A float near 1/2 has the same last bit as fp16 subnormals, so adding 1/2 rounds to a subnormal, half to even. */
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
    uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    uint32_t special = magnitude > INFINITE ? 0x7E00 : 0x7C00;
    return (uint16_t)(bits >> 16 & 0x8000u) | (uint16_t)(magnitude >= 0x477FF000 ? special : finite);
}

/* Load `width` elements of a block as fp32 into `values`, and fill `values` with zeros up to `size` elements. */
static inline void load(const char *restrict from, int64_t dtype, int width, int size, float *restrict values) {
    const uint16_t *halves = (const uint16_t *)from;
    if (dtype == FP32)
        memcpy(values, from, 4 * (size_t)width);
    else if (dtype == BF16)
        for (int i = 0; i < width; i++) values[i] = from_bf16(halves[i]);
    else
        for (int i = 0; i < width; i++) values[i] = from_fp16(halves[i]);
    for (int i = width; i < size; i++) values[i] = 0;
}

/* Compute values = x - base for `width` elements of a block, and fill `values` with zeros up to `size` elements. */
LOOP void subtract(
    const float *restrict x, const char *restrict base, int64_t dtype, int width, int size, float *restrict values
) {
    const float *floats = (const float *)base;
    const uint16_t *halves = (const uint16_t *)base;
    if (dtype == FP32)
        for (int i = 0; i < width; i++) values[i] = x[i] - floats[i];
    else if (dtype == BF16)
        for (int i = 0; i < width; i++) values[i] = x[i] - from_bf16(halves[i]);
    else
        for (int i = 0; i < width; i++) values[i] = x[i] - from_fp16(halves[i]);
    for (int i = width; i < size; i++) values[i] = 0;
}

/* Store `width` fp32 values of a block at `to`, rounded to `dtype`. */
static inline void store(const float *restrict values, int64_t dtype, int width, char *restrict to) {
    uint16_t *halves = (uint16_t *)to;
    if (dtype == FP32)
        memcpy(to, values, 4 * (size_t)width);
    else if (dtype == BF16)
        for (int i = 0; i < width; i++) halves[i] = to_bf16(values[i]);
    else
        for (int i = 0; i < width; i++) halves[i] = to_fp16(values[i]);
}

/* Dequantize a block: values = integers * scale, or values += integers * scale with `add`. */
LOOP void dequantize(
    const char *restrict payload, uint16_t scale_bits, int64_t bits, int size, int add, float *restrict values
) {
    const float scale = from_bf16(scale_bits);
    const int half = size / 2;
    const int8_t *bytes = (const int8_t *)payload;
    const uint8_t *pairs = (const uint8_t *)payload;
    if (bits == 4 && size == 32 && !add) { /* packed 4-bit weights; the constant count lets short loops vectorize */
        for (int i = 0; i < 16; i++) values[i] = (float)((pairs[i] & 15) - 8) * scale;
        for (int i = 0; i < 16; i++) values[16 + i] = (float)((pairs[i] >> 4) - 8) * scale;
    } else if (bits == 8 && add) {
        for (int i = 0; i < size; i++) values[i] += (float)bytes[i] * scale;
    } else if (bits == 8) {
        for (int i = 0; i < size; i++) values[i] = (float)bytes[i] * scale;
    } else if (add) {
        for (int i = 0; i < half; i++) values[i] += (float)((pairs[i] & 15) - 8) * scale;
        for (int i = 0; i < half; i++) values[half + i] += (float)((pairs[i] >> 4) - 8) * scale;
    } else {
        for (int i = 0; i < half; i++) values[i] = (float)((pairs[i] & 15) - 8) * scale;
        for (int i = 0; i < half; i++) values[half + i] = (float)((pairs[i] >> 4) - 8) * scale;
    }
}

/* Return the scale of a block, exact in bf16, by the formulas of formats.py. The scale is NaN if a value is NaN or Inf,
and 0 if it would be subnormal. `near` counts the elements of at least 15/16 of the largest magnitude. */
LOOP float scale_of(const float *restrict values, int64_t bits, int64_t clip, int size) {
    uint32_t peak = 0; /* the largest magnitude; bits of magnitudes have the order of their values */
    if (bits == 8) {
        for (int i = 0; i < size; i++) {
            uint32_t magnitude = bits_of(values[i]) & 0x7FFFFFFF;
            peak = magnitude > peak ? magnitude : peak;
        }
        if (peak >= INFINITE) return float_of(NAN_BITS);
        peak = (bits_of(float_of(peak) * (float)(1.0 / 127)) + 0xFFFF) & 0xFFFF0000; /* rounded up */
        return float_of(peak) < FLT_MIN ? 0 : float_of(peak);
    }
    int32_t highest = 0, near = 0;
    uint32_t lowest = 0x80000000; /* as unsigned integers, negative floats are above all others */
    for (int i = 0; i < size; i++) {
        uint32_t value = bits_of(values[i]);
        highest = (int32_t)value > highest ? (int32_t)value : highest;
        lowest = value > lowest ? value : lowest;
    }
    lowest &= 0x7FFFFFFF;
    const int negative = lowest >= (uint32_t)highest; /* 1 if an element of the largest magnitude is negative */
    const uint32_t opposite = negative ? (uint32_t)highest : lowest;
    peak = negative ? lowest : (uint32_t)highest;
    if (peak >= INFINITE) return float_of(NAN_BITS);
    const int32_t limit = (int32_t)bits_of(float_of(peak) * 0.9375f);
    for (int i = 0; i < size; i++) near += (int32_t)(bits_of(values[i]) & 0x7FFFFFFF) >= limit;
    const float own = float_of(peak) * (float)(1 / 8.4375), other = float_of(opposite) * (float)(1 / 7.4375);
    float scale = clip ? float_of(peak) * (float)(1.0 / 9) : own > other ? own : other;
    scale = near * 2 >= size ? float_of(peak) * (float)(1.0 / 7) : scale;
    scale = from_bf16(to_bf16(negative ? scale : -scale));
    return fabsf(scale) < FLT_MIN ? 0 : scale;
}

/* For |x| < 2^22, the low bits of x + NEAREST are the integer nearest to x in two's complement, half to even. */
#define NEAREST 0x1.8p23f

static inline float nearest(float x) { return (x + NEAREST) - NEAREST; }

/* Return the bits of NEAREST + 8 + q, where q is the nearest integer to x, clipped to -8..7. */
static inline int32_t clipped(float x) {
    const int32_t lowest = 0x4B400000, bits = (int32_t)bits_of(x + (NEAREST + 8));
    const int32_t at_least = bits < lowest ? lowest : bits;
    return at_least > lowest + 15 ? lowest + 15 : at_least;
}

/* Round values * inverse to integers and store them in the payload. */
LOOP void store_integers(
    const float *restrict values, float inverse, int64_t bits, int64_t clip, int size, char *restrict payload
) {
    const int half = size / 2;
    uint8_t *bytes = (uint8_t *)payload;
    if (bits == 8) {
        for (int i = 0; i < size; i++) bytes[i] = (uint8_t)bits_of(values[i] * inverse + NEAREST);
        return;
    }
    for (int i = 0; !clip && i < half; i++) {
        uint32_t low = bits_of(values[i] * inverse + (NEAREST + 8));
        uint32_t high = bits_of(values[half + i] * inverse + (NEAREST + 8));
        bytes[i] = (uint8_t)((low & 15) | (high & 15) << 4);
    }
    for (int i = 0; clip && i < half; i++)
        bytes[i] = (uint8_t)((clipped(values[i] * inverse) & 15) | clipped(values[half + i] * inverse) << 4);
}

/* Quantize a block into `payload` and return its scale. With `keep`, `values` is replaced by the quantization error. */
static inline float quantize_block(
    float *restrict values, int64_t bits, int64_t clip, int size, char *restrict payload, int keep
) {
    const float scale = scale_of(values, bits, clip, size);
    if (!(fabsf(scale) > 0)) { /* 0 or NaN */
        memset(payload, bits == 8 ? 0 : 0x88, (size_t)(size * bits / 8)); /* integers 0, which int4 stores as q + 8 */
        for (int i = 0; keep && i < size; i++) values[i] -= 0 * scale; /* NaN if the scale is NaN */
        return scale;
    }
    const float inverse = 1 / scale;
    store_integers(values, inverse, bits, clip, size, payload);
    for (int i = 0; keep && !clip && i < size; i++) values[i] -= nearest(values[i] * inverse) * scale;
    for (int i = 0; keep && clip && i < size; i++)
        values[i] -= (float_of((uint32_t)clipped(values[i] * inverse)) - (NEAREST + 8)) * scale;
    return scale;
}

static inline int64_t block_bytes(int64_t bits, int size) { return size * bits / 8; }

static inline int64_t element_bytes(int64_t dtype) { return dtype == FP32 ? 4 : 2; }

static inline char *row(const struct messages *x, int64_t k, int64_t a, int64_t b) {
    return x->start + k * x->stride_k + a * x->stride_a + b * x->stride_b;
}

static inline char *elements(const struct data *x, int64_t a, int64_t b, int64_t first) {
    return x->start + a * x->stride_a + b * x->stride_b + first * element_bytes(x->dtype);
}

static inline uint16_t *scales_in(char *message, const struct range *range) {
    return (uint16_t *)(message + range->scales);
}

/* Loop over all rows and over the segments of each row. */
#define FOR_EACH_RANGE(shape, table)                                                                                   \
    for (int64_t a = 0; a < (shape)->a; a++)                                                                           \
        for (int64_t b = 0; b < (shape)->b; b++)                                                                       \
            for (const struct range *range = (table)->ranges; range < (table)->ranges + (table)->num_ranges; range++)

/* Loop over the blocks of a segment, with the block's `index` and its `first` element. The block size is the variable
`size` of the code around the loop. */
#define FOR_EACH_BLOCK(range)                                                                                          \
    for (int64_t index = 0, first = 0; first < (range)->size; index++, first += size)

/* Average a block's new quantization error with its earlier one: values = values * share + earlier * earlier_share. */
LOOP void average(
    const float *restrict earlier, float share, float earlier_share, int size, float *restrict values
) {
    for (int i = 0; i < size; i++) values[i] = values[i] * share + earlier[i] * earlier_share;
}

/* Copy `count` unquantized elements between data and a message, and convert their dtype. */
static void move(const char *from, int64_t from_dtype, int64_t count, int64_t to_dtype, char *to) {
    float buffer[MAX_BLOCK_SIZE];
    const int size = MAX_BLOCK_SIZE;
    if (from_dtype == to_dtype) {
        memcpy(to, from, (size_t)(count * element_bytes(to_dtype)));
        return;
    }
    for (int64_t first = 0; first < count; first += size) {
        const int width = (int)(count - first < size ? count - first : size);
        load(from + first * element_bytes(from_dtype), from_dtype, width, width, buffer);
        store(buffer, to_dtype, width, to + first * element_bytes(to_dtype));
    }
}

/* Add the `size` elements of `more` to `values`, in place. */
LOOP void add(const float *restrict more, int size, float *restrict values) {
    for (int i = 0; i < size; i++) values[i] += more[i];
}

/* Quantize a segment of x, of x - base, or of x + error into a message; base and error may be NULL. `error` is error
feedback's buffer in int8, and `kept` tells where the segment is in this buffer. The error is replaced by rest * new
error + beta * earlier error, or by the new error if beta is 0. */
static void quantize_range(
    const struct table *table, const struct range *range, const char *x, int64_t dtype, const char *base,
    int64_t base_dtype, char *message, const struct range *kept, char *error, float beta, float rest
) {
    float buffer[MAX_BLOCK_SIZE], other[MAX_BLOCK_SIZE];
    const int64_t bits = table->bits;
    const int size = (int)(table->block_size / CHUNK) * CHUNK;
    FOR_EACH_BLOCK(range) {
        const int width = (int)(range->size - first < size ? range->size - first : size);
        /* ---- load a block of x, and subtract the base */
        const char *from = x + first * element_bytes(dtype);
        char *payload = message + range->payload + index * block_bytes(bits, size);
        uint16_t *scale = scales_in(message, range) + index;
        const int in_place = dtype == FP32 && width == size && error == NULL; /* x itself is not written */
        float *values = in_place ? (float *)from : buffer;
        if (!in_place) load(from, dtype, width, size, buffer);
        if (base != NULL) {
            subtract(values, base + first * element_bytes(base_dtype), base_dtype, width, size, other);
            values = other;
        }
        /* ---- without error feedback, quantize the block, and go on with the next block */
        if (error == NULL) {
            *scale = (uint16_t)(bits_of(quantize_block(values, bits, table->clip, size, payload, 0)) >> 16);
            continue;
        }
        /* ---- add the stored error to the block, quantize the block, and store the new error in int8 */
        char *lost = error + kept->payload + index * size;
        uint16_t *lost_scale = scales_in(error, kept) + index;
        dequantize(lost, *lost_scale, 8, size, 1, buffer);
        *scale = (uint16_t)(bits_of(quantize_block(buffer, bits, table->clip, size, payload, 1)) >> 16);
        if (beta > 0) {
            dequantize(lost, *lost_scale, 8, size, 0, other);
            average(other, rest, beta, size, buffer);
        }
        const float error_scale = quantize_block(buffer, 8, 0, size, lost, 0);
        *lost_scale = error_scale == error_scale ? (uint16_t)(bits_of(error_scale) >> 16) : 0; /* 0 if it is NaN */
    }
}

/* Quantize rows x [A, B, n] into messages [A, B, M]; see `pack` in __init__.py. base and errors may be NULL. */
void megazpp_pack(
    const struct shape *shape, const struct table *table, const struct data *x, const struct data *base,
    const struct messages *to, const struct table *error_table, const struct messages *errors, float beta, float rest
) {
    FOR_EACH_RANGE(shape, table) {
        const char *from = elements(x, a, b, range->start);
        char *message = row(to, 0, a, b);
        if (range->scales < 0) {
            move(from, x->dtype, range->size, table->dtype, message + range->payload);
            continue;
        }
        const char *subtracted = base == NULL ? NULL : elements(base, a, b, range->start);
        const int64_t base_dtype = base == NULL ? FP32 : base->dtype;
        const struct range *kept = errors == NULL ? NULL : error_table->ranges + (range - table->ranges);
        char *error = errors == NULL ? NULL : row(errors, 0, a, b);
        quantize_range(table, range, from, x->dtype, subtracted, base_dtype, message, kept, error, beta, rest);
    }
}

/* Dequantize K messages of each row and sum them in the order 0..K-1 into `out`. With onto_quantized, the sum of
quantized elements starts with the values in `out`. With onto_exact, the sum of unquantized elements does so. */
void megazpp_unpack_sum(
    const struct shape *shape, const struct table *table, const struct messages *from, const struct data *out,
    int64_t onto_quantized, int64_t onto_exact
) {
    float buffer[MAX_BLOCK_SIZE], more[MAX_BLOCK_SIZE];
    FOR_EACH_RANGE(shape, table) {
        const int exact = range->scales < 0;
        const int64_t onto = exact ? onto_exact : onto_quantized;
        const int size = exact ? MAX_BLOCK_SIZE : (int)(table->block_size / CHUNK) * CHUNK;
        if (exact && shape->k == 1 && !onto) {
            const char *payload = row(from, 0, a, b) + range->payload;
            move(payload, table->dtype, range->size, out->dtype, elements(out, a, b, range->start));
            continue;
        }
        FOR_EACH_BLOCK(range) {
            const int width = (int)(range->size - first < size ? range->size - first : size);
            char *to = elements(out, a, b, range->start + first);
            const int in_place = out->dtype == FP32 && width == size;
            float *values = in_place ? (float *)to : buffer;
            if (onto && !in_place) load(to, out->dtype, width, size, buffer);
            for (int64_t k = 0; k < shape->k; k++) {
                char *message = row(from, k, a, b), *payload = message + range->payload;
                if (!exact) {
                    payload += index * block_bytes(table->bits, size);
                    dequantize(payload, scales_in(message, range)[index], table->bits, size, onto || k, values);
                    continue;
                }
                payload += first * element_bytes(table->dtype);
                load(payload, table->dtype, width, width, onto || k ? more : values);
                if (onto || k) add(more, width, values);
            }
            if (!in_place) store(buffer, out->dtype, width, to);
        }
    }
}
