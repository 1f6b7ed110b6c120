/* Lossless deltas of 16-bit weights in C: format.py defines the encoding.

A block of weights is loaded, encoded and stored while it is in the L1 cache. Compilers vectorize the loops over all
elements of a block for the CPU that -march=native selects. Loops that shift each element by its own count use 32-bit
numbers, because AVX2 has no such shift for 16-bit lanes.

`extract` concatenates the low bits of all lanes of a 64-bit word, and `deposit` is its inverse. With BMI2 each of them
is one instruction. Other CPUs use plain C, and so do all CPUs if the compiler's command defines MEGAZPP_PORTABLE
(CC="cc -DMEGAZPP_PORTABLE"). Messages are little-endian, and so must be the machine.
*/

#include <stdint.h>
#include <string.h>

/* AMD's Excavator, Zen and Zen 2 have BMI2, but execute pext and pdep in microcode, which is slower than plain C. */
#if !defined(__BMI2__) || defined(__bdver4__) || defined(__znver1__) || defined(__znver2__) || defined(MEGAZPP_PORTABLE)
#define USE_BMI2 0
#else
#define USE_BMI2 1
#include <immintrin.h>
#endif

#define BLOCK 256
#define MOST_POSITIONS 63
#define DENSE 64
#define RAW 255
#define MOST_QUOTIENTS 1024
#define ROOM 2048 /* bytes in which one body and the bytes that are written beyond its end fit */
#define ONES 0x0101010101010101ull
#define INLINE static inline __attribute__((always_inline))
#define LIKELY(condition) __builtin_expect(!!(condition), 1)

/* Shift and mask of the exponent, and an offset that is added to it; see EXPONENTS in format.py. All functions with
a parameter `f` are inlined, which makes these numbers constants in vectorized loops. */
struct format {
    int shift, mask, above;
};
static const struct format BF16 = {7, 0xFF, 0}, FP16 = {10, 0x1F, 96};

/* A 16-bit number for each weight of a block, which code may also read in pairs. In a pair, the low half belongs to the
earlier weight. */
union lanes {
    uint16_t one[BLOCK];
    uint32_t two[BLOCK / 2];
};

/* Number 16-bit floats by increasing value. */
INLINE uint16_t order(uint16_t bits) { return bits ^ (uint16_t)(((int16_t)bits >> 15) & 0x7FFF); }

INLINE int16_t exponent(uint16_t bits, struct format f) { return (int16_t)(((bits >> f.shift) & f.mask) + f.above); }

INLINE int bit_length(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

INLINE uint64_t load64(const void *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

/* Return the Rice parameter k, 0 to 15, of a weight with this exponent in a block with the exponent `c`. */
INLINE int16_t parameter(int16_t c, int16_t exponent) {
    int16_t k = c - exponent;
    k = k < 0 ? 0 : k;
    return k > 15 ? 15 : k;
}

/* Return masks of the low k bits for a pair of Rice parameters k, each in a 16-bit half. */
INLINE uint32_t mask_pair(uint32_t k) { return (1u << (k & 0xFFFF) | 0x10000u << (k >> 16)) - 0x10001; }

/* ---- bits of a 64-bit word */

/* Concatenate the bits of a 64-bit word that are set in `masks`, the lowest first. The word consists of lanes of
`width` bits, and each lane's mask selects some of its low bits. */
INLINE uint64_t extract(uint64_t lanes, uint64_t masks, int width) {
#if USE_BMI2
    (void)width;
    return _pext_u64(lanes, masks);
#else
    uint64_t bits = 0;
    for (int from = 0, to = 0; from < 64; from += width) {
        const uint64_t mask = masks >> from & ((1ull << width) - 1);
        bits |= (lanes >> from & mask) << to;
        to += __builtin_popcountll(mask);
    }
    return bits;
#endif
}

/* Distribute bits among the lanes of a 64-bit word, as many to each lane as its mask has ones: the inverse of
`extract`. */
INLINE uint64_t deposit(uint64_t bits, uint64_t masks, int width) {
#if USE_BMI2
    (void)width;
    return _pdep_u64(bits, masks);
#else
    uint64_t lanes = 0;
    for (int to = 0; to < 64; to += width) {
        const uint64_t mask = masks >> to & ((1ull << width) - 1);
        lanes |= (bits & mask) << to;
        bits >>= __builtin_popcountll(mask);
    }
    return lanes;
#endif
}

static uint16_t places_of[256][8]; /* for each value of a byte, the positions of its ones */

/* Fill the table `places_of` when the library is loaded, before any thread can read it. */
__attribute__((constructor)) static void fill_places(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, n = 0; bit < 8; bit++)
            if (byte >> bit & 1) places_of[byte][n++] = (uint16_t)bit;
}

/* List the positions of the first `count` ones among `size` bits, a multiple of 64, and return how many were found. At
most 64 further numbers are written to `places`. */
INLINE int find_ones(const uint8_t *bits, int size, int count, uint16_t *places) {
    int n = 0;
    for (int base = 0; base < size && n < count; base += 64, bits += 8)
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < 8; j++) places[n + j] = (uint16_t)(places_of[bits[i]][j] + base + 8 * i);
            n += __builtin_popcount(bits[i]);
        }
    return n < count ? n : count;
}

/* ---- encoder */

/* A writer of bits to memory, from the lowest bit of each byte. `at` is the next byte, and `word` holds the `used`
bits, 0 to 7, that do not fill a byte yet. */
struct writer {
    uint8_t *at;
    uint64_t word;
    uint32_t used;
};

/* Append `width` bits, 0 to 63, to a writer. The function may overwrite up to 8 bytes after the appended bits. */
INLINE void append(struct writer *w, uint64_t bits, uint32_t width) {
    const uint32_t total = w->used + width;
    w->word |= bits << w->used;
    memcpy(w->at, &w->word, 8);
    w->at += total / 8;
    w->word = LIKELY(total < 64) ? w->word >> (total & 56) : bits >> (64 - w->used);
    w->used = total % 8;
}

/* Write the last bits of a writer, which do not fill a byte, and return the address of the next free byte. */
INLINE uint8_t *finish(const struct writer *w) {
    memcpy(w->at, &w->word, 8);
    return w->at + (w->used + 7) / 8;
}

/* Append the unary Rice quotients of 8 weights. Some of the quotients may be 7 or more.

bits: codes of the quotients, limited to 7. masks: a byte for each element, with as many low ones as its code has bits.
large: a byte for each element, with its top bit set if the quotient is at least 7. values: the numbers to encode. low:
(1 << k) - 1 for each number, where k is its Rice parameter. */
static void append_large(
    struct writer *w, uint64_t bits, uint64_t masks, uint64_t large, const uint16_t *values, const uint16_t *low
) {
    uint32_t done = 0;
    for (; large; large &= large - 1) {
        const int top = __builtin_ctzll(large), element = top / 8;
        const uint32_t end = __builtin_popcountll(masks & ((1ull << top) - 1)); /* place of this element's one */
        append(w, bits >> done & ((1ull << (end - done)) - 1), end - done);
        uint32_t zeros = (values[element] >> __builtin_popcount(low[element])) - 7;
        for (; zeros > 63; zeros -= 63) append(w, 0, 63);
        append(w, 0, zeros);
        done = end;
    }
    append(w, bits >> done, __builtin_popcountll(masks) - done);
}

/* Write the Rice code of `count` numbers at `at`: all remainders, then all quotients. Return the next free byte.

values: the numbers to encode. masks: (1 << k) - 1 for each number, where k is its Rice parameter. ones: 1 << quotient
for each number, where the quotient is limited to 7. The arrays are padded to a multiple of 16 elements, with values 0,
masks 0 and ones 1. */
static __attribute__((noinline)) uint8_t *code(
    uint8_t *at, const uint16_t *values, const uint16_t *masks, const uint8_t *ones, int count
) {
    uint8_t unary[MOST_QUOTIENTS / 8 + 16];
    struct writer w = {at, 0, 0}, u = {unary, 0, 0};
    int i = 0;
    for (; i < count; i += 16) {
        /* ---- append the remainders of 16 elements: 8 at a time, 4 in each 64-bit word */
        for (int j = i; j < i + 16; j += 8) {
            const uint64_t mask = load64(masks + j), mask2 = load64(masks + j + 4);
            const uint64_t bits = extract(load64(values + j), mask, 16);
            const uint64_t bits2 = extract(load64(values + j + 4), mask2, 16);
            const uint32_t width = __builtin_popcountll(mask), width2 = __builtin_popcountll(mask2);
            if (LIKELY(width + width2 < 64)) {
                append(&w, bits | bits2 << width, width + width2);
            } else {
                append(&w, bits, width);
                append(&w, bits2, width2);
            }
        }
        /* ---- append the quotients of 16 elements, 8 in each 64-bit word; the mask of 1 << q is (2 << q) - 1 */
        const uint64_t one = load64(ones + i), one2 = load64(ones + i + 8);
        const uint64_t mask = one | (one - ONES), mask2 = one2 | (one2 - ONES); /* no byte borrows: none is 0 */
        const uint64_t bits = extract(one, mask, 8), bits2 = extract(one2, mask2, 8);
        const uint32_t width = __builtin_popcountll(mask), width2 = __builtin_popcountll(mask2);
        if (LIKELY(!((one | one2) & ONES << 7) && width + width2 < 64)) {
            append(&u, bits | bits2 << width, width + width2);
        } else {
            append_large(&u, bits, mask, one & ONES << 7, values + i, masks + i);
            append_large(&u, bits2, mask2, one2 & ONES << 7, values + i + 8, masks + i + 8);
        }
    }
    /* ---- append the quotients to the remainders, without the padding's quotients, which are one bit each */
    at = finish(&w);
    finish(&u);
    const int64_t end = 8 * (u.at - unary) + u.used - (i - count);
    memcpy(at, unary, sizeof unary);
    at[end / 8] &= (uint8_t)((1 << end % 8) - 1);
    return at + (end + 7) / 8;
}

/* Encode the changes of one block of weights: write the body and its kind, and return the number of the body's bytes.
Elements from `valid` on are padding. `body` has ROOM bytes. `changed` receives the number of changed elements. */
INLINE int body_of(
    const uint16_t *new, const uint16_t *old, int valid, struct format f, uint8_t *kind, uint8_t *body, int64_t *changed
) {
    /* ---- compute z and the exponent of each element, and the number of changed elements */
    union lanes z, e, k, masks;
    uint16_t ones[BLOCK / 2];
    int16_t count = 0, highest = 0;
    for (int i = 0; i < BLOCK; i++) {
        const int16_t d = order(new[i]) - order(old[i]), known = exponent(old[i], f);
        const int16_t finite = ((known + 1) & 255) - 1; /* -1 for infinities and NaN of bf16 */
        z.one[i] = (uint16_t)((uint16_t)d << 1) ^ (uint16_t)(d >> 15);
        e.one[i] = known;
        count += z.one[i] != 0;
        highest = finite > highest ? finite : highest;
    }
    *changed = count;
    *kind = 0;
    if (!count) return 0;
    /* ---- compute the exponent c, which determines the block's Rice parameters. total is the sum of 2^6 z over the 2^8
    elements, where each z is converted to the highest exponent of the block. So total / 2^14 is the mean z. The factor
    5 / 8 makes the mean z 0.8 to 1.6 at exponent c */
    uint32_t total = 0, sums_k = 0, sum_h = 0;
    for (int i = valid; i < BLOCK; i++) e.one[i] = 255;
    for (int i = 0; i < BLOCK; i++) {
        int16_t lower = highest - (int16_t)e.one[i];
        lower = lower < 0 ? 0 : lower;
        k.one[i] = lower > 31 ? 31 : lower;
    }
    for (int i = 0; i < BLOCK / 2; i++) {
        total += (z.two[i] << 6 & 0x3FFFC0) >> (k.two[i] & 0xFFFF);
        total += (z.two[i] >> 10 & 0x3FFFC0) >> (k.two[i] >> 16);
    }
    int32_t c = highest + bit_length((total >> 3) * 5) - 14;
    c = c < DENSE ? DENSE : c >= RAW ? RAW - 1 : c;
    /* ---- compute the Rice parameters and quotients of all elements */
    for (int i = 0; i < BLOCK; i++) k.one[i] = parameter(c, e.one[i]);
    for (int i = 0; i < BLOCK / 2; i++) {
        uint32_t k0 = k.two[i] & 0xFFFF, k1 = k.two[i] >> 16, h0 = (z.two[i] & 0xFFFF) >> k0, h1 = z.two[i] >> 16 >> k1;
        masks.two[i] = mask_pair(k.two[i]);
        sums_k += k.two[i]; /* both halves stay below 65536 */
        sum_h += h0 + h1;
        h0 = h0 < 7 ? h0 : 7;
        h1 = h1 < 7 ? h1 : 7;
        ones[i] = (0x10000u << h0 | 0x1000000u << h1) >> 16; /* gcc vectorizes no shifts of less than 32 bits */
    }
    /* ---- compute the length of the dense body */
    uint32_t sum_k = (sums_k & 0xFFFF) + (sums_k >> 16);
    int size = 2 * valid, dense = (sum_k + 7) / 8 + (BLOCK + sum_h + 7) / 8;
    *kind = RAW;
    dense += dense & 1;
    if (BLOCK + sum_h <= MOST_QUOTIENTS && dense < size) {
        size = dense;
        *kind = c;
    }
    /* ---- write the sparse body if it is the shortest; a change takes a byte (position) and at least a bit */
    if (count <= MOST_POSITIONS && 1 + count + (count + 7) / 8 <= size) {
        uint16_t places[MOST_POSITIONS + 64], values[MOST_POSITIONS + 1], low[MOST_POSITIONS + 1];
        uint8_t differs[BLOCK], bits[BLOCK / 8], one[MOST_POSITIONS + 1];
        for (int i = 0; i < BLOCK; i++) differs[i] = z.one[i] != 0;
        for (int i = 0; i < BLOCK / 8; i++) bits[i] = extract(load64(differs + 8 * i), ONES, 8);
        const int n = find_ones(bits, BLOCK, count, places);
        sum_k = sum_h = 0;
        for (int i = 0; i < n; i++) {
            values[i] = z.one[places[i]] - 1;
            low[i] = masks.one[places[i]];
            const uint32_t h = values[i] >> k.one[places[i]];
            sum_k += k.one[places[i]];
            sum_h += h;
            one[i] = 1 << (h < 7 ? h : 7);
        }
        int sparse = 1 + n + (sum_k + 7) / 8 + (n + sum_h + 7) / 8;
        sparse += sparse & 1;
        if (n + sum_h <= MOST_QUOTIENTS && sparse < 2 * valid && sparse <= size) {
            *kind = n;
            body[0] = c;
            for (int i = 0; i < n; i++) body[1 + i] = places[i];
            for (int i = n; i % 16; i++) low[i] = values[i] = 0, one[i] = 1;
            *code(body + 1 + n, values, low, one, n) = 0; /* the byte that makes the size even, if there is one */
            return sparse;
        }
    }
    /* ---- write the raw or the dense body */
    if (*kind == RAW) {
        memcpy(body, new, 2 * valid);
        return 2 * valid;
    }
    *code(body, z.one, masks.one, (const uint8_t *)ones, BLOCK) = 0;
    return size;
}

/* The code of `megazpp_encode` for one dtype, which is inlined so that `f` is constant. */
INLINE void encode(
    const uint16_t *new, const uint16_t *old, int64_t size, struct format f, uint8_t *kinds, uint8_t *halves,
    uint8_t *body, int64_t capacity, int64_t *numbers
) {
    uint8_t buffer[ROOM]; /* a body near the message's end is written here first, because `body_of` needs ROOM bytes */
    int64_t offset = 0, written = 0, left_out = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        int valid = size - start < BLOCK ? size - start : BLOCK;
        uint16_t last_new[BLOCK], last_old[BLOCK];
        const uint16_t *a = new + start, *b = old + start;
        if (valid < BLOCK) { /* fill the last block with zeros, which count as unchanged */
            memset(last_new, 0, sizeof last_new);
            memset(last_old, 0, sizeof last_old);
            a = memcpy(last_new, a, 2 * valid);
            b = memcpy(last_old, b, 2 * valid);
        }
        int64_t changed;
        uint8_t *to = offset + ROOM <= capacity ? body + offset : buffer;
        int bytes = body_of(a, b, valid, f, kinds, to, &changed);
        *halves = bytes / 2;
        if (offset + bytes <= capacity) {
            if (to == buffer) memcpy(body + offset, buffer, bytes);
            written = offset + bytes;
        } else {
            *kinds = *halves = 0;
            left_out += changed;
        }
        offset += bytes;
        kinds++;
        halves++;
    }
    memset(body + written, 0, capacity - written);
    numbers[0] = offset;
    numbers[1] = left_out;
}

/* Encode the lossless delta from old to new weights; see native.py. */
void megazpp_encode(
    const uint16_t *new, const uint16_t *old, int64_t size, int64_t fp16, uint8_t *kinds, uint8_t *halves,
    uint8_t *body, int64_t capacity, int64_t *numbers
) {
    if (fp16)
        encode(new, old, size, FP16, kinds, halves, body, capacity, numbers);
    else
        encode(new, old, size, BF16, kinds, halves, body, capacity, numbers);
}

/* ---- decoder */

/* Return at least 57 bits that start at bit number `offset` of the memory at `at`. */
INLINE uint64_t load_bits(const uint8_t *at, uint32_t offset) { return load64(at + offset / 8) >> offset % 8; }

/* Return the 64 bits that start at bit number `offset` of the memory at `at`. */
INLINE uint64_t load_all_bits(const uint8_t *at, uint32_t offset) {
    return load_bits(at, offset) | (uint64_t)at[offset / 8 + 8] << 1 << (63 - offset % 8);
}

/* Decode a Rice code of `count` numbers, remainders and then quotients, into `values`. `masks` is (1 << k) - 1 for each
number, where k is its Rice parameter, padded with zeros to a multiple of 8. MOST_QUOTIENTS / 8 + 16 bytes after the
remainders must be readable. */
static void decode_values(const uint8_t *at, const uint16_t *masks, int count, uint16_t *values) {
    /* ---- read the remainders, 4 in each 64-bit word */
    uint32_t offset = 0;
    for (int i = 0; i < count; i += 8) {
        const uint64_t mask = load64(masks + i), mask2 = load64(masks + i + 4);
        const uint32_t width = __builtin_popcountll(mask), width2 = __builtin_popcountll(mask2);
        uint64_t bits = load_bits(at, offset), bits2 = bits >> width;
        if (!LIKELY(width + width2 <= 57)) {
            bits = load_all_bits(at, offset);
            bits2 = load_all_bits(at, offset + width);
        }
        bits = deposit(bits, mask, 16);
        bits2 = deposit(bits2, mask2, 16);
        memcpy(values + i, &bits, 8);
        memcpy(values + i + 4, &bits2, 8);
        offset += width + width2;
    }
    /* ---- read the quotients, which are the numbers of zeros between ones, and add them to the values */
    uint16_t places[1 + BLOCK + 64];
    places[0] = -1;
    const int n = find_ones(at + (offset + 7) / 8, MOST_QUOTIENTS, count, places + 1);
    for (int i = n; i < count; i++) places[i + 1] = places[i] + 1; /* an invalid message has too few ones */
    for (int i = 0; i < count; i++) {
        const uint16_t h = places[i + 1] - places[i] - 1, one = masks[i] + 1;
        values[i] += (uint16_t)(h * one);
    }
}

/* Return the new weight for an old weight and its encoded change z (see format.py). */
INLINE uint16_t moved(uint16_t old, uint16_t z) {
    return order(order(old) + (uint16_t)((uint16_t)(z >> 1) ^ (uint16_t) - (z & 1)));
}

/* The code of `megazpp_decode` for one dtype, which is inlined so that `f` is constant. */
INLINE void decode(
    const uint8_t *kinds, const uint8_t *halves, const uint8_t *body, int64_t capacity, int64_t size, struct format f,
    uint16_t *weights
) {
    int64_t offset = 0;
    for (int64_t start = 0; start < size; start += BLOCK, kinds++, halves++) {
        int valid = size - start < BLOCK ? size - start : BLOCK, kind = *kinds;
        int64_t bytes = kind == RAW ? 2 * valid : 2 * *halves;
        uint16_t *block = weights + start;
        if (offset + bytes > capacity) return; /* an invalid message; `encode` writes no such body */
        if (kind == RAW) {
            memcpy(block, body + offset, bytes);
        } else if (kind) {
            uint16_t values[BLOCK];
            union lanes k, masks;
            uint8_t padded[2 * BLOCK + MOST_QUOTIENTS / 8 + 16];
            const uint8_t *at = body + offset;
            if (offset + (int64_t)sizeof padded > capacity) { /* do not read beyond the end of the message */
                at = memcpy(padded, at, bytes);
                memset(padded + bytes, 0, sizeof padded - bytes);
            }
            if (kind <= MOST_POSITIONS) {
                int16_t c = *at++;
                const uint8_t *places = at;
                for (int i = 0; i < kind; i++)
                    masks.one[i] = places[i] < valid ? (1 << parameter(c, exponent(block[places[i]], f))) - 1 : 0;
                for (int i = kind; i % 8; i++) masks.one[i] = 0;
                decode_values(at + kind, masks.one, kind, values);
                for (int i = 0; i < kind; i++)
                    if (places[i] < valid) block[places[i]] = moved(block[places[i]], values[i] + 1);
            } else {
                uint16_t last[BLOCK] = {0}, *old = valid < BLOCK ? memcpy(last, block, 2 * valid) : block;
                for (int i = 0; i < BLOCK; i++) k.one[i] = parameter(kind, exponent(old[i], f));
                for (int i = valid; i < BLOCK; i++) k.one[i] = 0;
                for (int i = 0; i < BLOCK / 2; i++) masks.two[i] = mask_pair(k.two[i]);
                decode_values(at, masks.one, BLOCK, values);
                for (int i = 0; i < BLOCK; i++) old[i] = moved(old[i], values[i]);
                if (valid < BLOCK) memcpy(block, old, 2 * valid);
            }
        }
        offset += bytes;
    }
}

/* Apply a lossless delta to old weights, which become the new weights in place; see native.py. */
void megazpp_decode(
    const uint8_t *kinds, const uint8_t *halves, const uint8_t *body, int64_t capacity, int64_t size, int64_t fp16,
    uint16_t *weights
) {
    if (fp16)
        decode(kinds, halves, body, capacity, size, FP16, weights);
    else
        decode(kinds, halves, body, capacity, size, BF16, weights);
}
