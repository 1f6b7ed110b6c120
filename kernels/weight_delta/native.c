/* Lossless differences of 16-bit weights in C: produces the same bytes as reference.py, which defines them.

A block is loaded, encoded and stored while it is in the L1 cache. Compilers vectorize the loops over all elements. Bits
are written through a 64-bit word. Messages are little-endian, and so must be the machine.
*/

#include <stdint.h>
#include <string.h>

#define BLOCK 256
#define MOST_POSITIONS 63
#define DENSE 64
#define RAW 255
#define MOST_QUOTIENTS 1024
#define ROOM 2048 /* bytes of a buffer for one body, before its length is compared with the capacity */

struct format {
    int64_t shift, mask, above; /* shift and mask of the exponent, and an offset that is added to it */
};

/* Number 16-bit floats by increasing value; see `order` in reference.py. */
static inline uint16_t order(uint16_t bits) { return bits ^ (((int16_t)bits >> 15) & 0x7FFF); }

static int bit_length(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

/* The Rice parameter k of an element. */
static inline int32_t parameter(int32_t c, int32_t exponent) {
    int32_t k = c - exponent;
    k = k < 0 ? 0 : k;
    return k > 15 ? 15 : k;
}

/* Writes bits to memory, from the lowest bit of a byte. `word` holds `used` bits that are not written yet. */
struct writer {
    uint8_t *at;
    uint64_t word;
    uint32_t used;
};

/* Append `width` bits, 0 to 63. */
static inline void append(struct writer *w, uint64_t bits, uint32_t width) {
    w->word |= bits << w->used;
    w->used += width;
    if (w->used >= 64) {
        memcpy(w->at, &w->word, 8);
        w->at += 8;
        w->used -= 64;
        w->word = w->used ? bits >> (width - w->used) : 0;
    }
}

/* Write the remaining bits and return the next free byte. */
static inline uint8_t *finish(const struct writer *w) {
    memcpy(w->at, &w->word, 8);
    return w->at + (w->used + 7) / 8;
}

/* Write remainders, then quotients, and return the next free byte. Four values are combined before they are appended,
which shortens the chain of dependent operations on the word. */
static uint8_t *code(uint8_t *at, const uint32_t *values, const uint32_t *k, int count) {
    struct writer w = {at, 0, 0};
    uint32_t h[BLOCK + 4] = {0}, low[BLOCK];
    for (int i = 0; i < count; i++) {
        h[i] = values[i] >> k[i];
        low[i] = values[i] & ((1u << k[i]) - 1);
    }
    int i = 0;
    for (; i + 4 <= count; i += 4) {
        uint32_t first = k[i] + k[i + 1], second = k[i + 2] + k[i + 3];
        uint64_t bits = low[i] | low[i + 1] << k[i] | (uint64_t)(low[i + 2] | low[i + 3] << k[i + 2]) << first;
        append(&w, bits, first + second);
    }
    for (; i < count; i++) append(&w, low[i], k[i]);
    w = (struct writer){finish(&w), 0, 0};
    for (i = 0; i < count; i += 4) {
        uint32_t second = h[i] + h[i + 1] + 1, third = second + h[i + 2] + 1, fourth = third + h[i + 3] + 1;
        if (i + 4 <= count && fourth < 63) {
            append(&w, 1ull << h[i] | 1ull << second | 1ull << third | 1ull << fourth, fourth + 1);
            continue;
        }
        for (int j = i; j < i + 4 && j < count; j++) {
            for (uint32_t zeros = h[j]; zeros; zeros -= zeros < 63 ? zeros : 63) append(&w, 0, zeros < 63 ? zeros : 63);
            append(&w, 1, 1);
        }
    }
    return finish(&w);
}

/* Extract the exponents of a block into `e` and return the highest finite one. */
static int32_t exponents(uint32_t *e, const uint16_t *old, struct format f) {
    uint32_t highest = 0;
    for (int i = 0; i < BLOCK; i++) {
        e[i] = ((old[i] >> f.shift) & f.mask) + f.above;
        uint32_t finite = e[i] < 255 ? e[i] : 0;
        highest = finite > highest ? finite : highest;
    }
    return highest;
}

/* Encode the changes of one block: write its body and its kind, and return the body's bytes. Elements from `valid` on
are padding. */
static int body_of(const uint16_t *new, const uint16_t *old, int valid, struct format f, uint8_t *kind, uint8_t *body,
                   int64_t *changed) {
    /* ---- z, and the number of changed elements */
    uint32_t z[BLOCK], e[BLOCK], k[BLOCK], places[BLOCK];
    int32_t highest, count = 0;
    uint32_t total = 0, sum_k = 0, sum_h = 0;
    for (int i = 0; i < BLOCK; i++) {
        int16_t d = order(new[i]) - order(old[i]);
        z[i] = (uint16_t)((d << 1) ^ (d >> 15));
        count += z[i] != 0;
    }
    *changed = count;
    *kind = 0;
    if (!count) return 0;
    /* ---- c from the mean change, and the Rice parameters */
    highest = exponents(e, old, f);
    for (int i = valid; i < BLOCK; i++) e[i] = 255;
    for (int i = 0; i < BLOCK; i++) {
        int32_t lower = highest - (int32_t)e[i];
        lower = lower < 0 ? 0 : lower > 31 ? 31 : lower;
        total += (z[i] << 6) >> lower;
    }
    int32_t c = highest + bit_length((total >> 3) * 5) - 14;
    c = c < DENSE ? DENSE : c >= RAW ? RAW - 1 : c;
    for (int i = 0; i < BLOCK; i++) {
        k[i] = parameter(c, e[i]);
        sum_k += k[i];
        sum_h += z[i] >> k[i];
    }
    /* ---- length of the dense body */
    int size = 2 * valid, dense = (sum_k + 7) / 8 + (BLOCK + sum_h + 7) / 8;
    *kind = RAW;
    dense += dense & 1;
    if (BLOCK + sum_h <= MOST_QUOTIENTS && dense < size) {
        size = dense;
        *kind = c;
    }
    /* ---- the sparse body, if it is the shortest */
    if (count <= MOST_POSITIONS) {
        uint32_t values[MOST_POSITIONS + 1], sparse_k[MOST_POSITIONS + 1], n = 0;
        sum_k = sum_h = 0;
        for (int i = 0; i < BLOCK; i++) {
            places[n] = i;
            n += z[i] != 0;
        }
        for (uint32_t i = 0; i < n; i++) {
            values[i] = z[places[i]] - 1;
            sparse_k[i] = k[places[i]];
            sum_k += sparse_k[i];
            sum_h += values[i] >> sparse_k[i];
        }
        int sparse = 1 + n + (sum_k + 7) / 8 + (n + sum_h + 7) / 8;
        sparse += sparse & 1;
        if (n + sum_h <= MOST_QUOTIENTS && sparse < 2 * valid && sparse <= size) {
            *kind = n;
            body[0] = c;
            for (uint32_t i = 0; i < n; i++) body[1 + i] = places[i];
            uint8_t *end = code(body + 1 + n, values, sparse_k, n);
            *end = 0;
            return sparse;
        }
    }
    /* ---- the raw or the dense body */
    if (*kind == RAW) {
        memcpy(body, new, 2 * valid);
        return 2 * valid;
    }
    *code(body, z, k, BLOCK) = 0;
    return size;
}

/* Encode the difference between old and new weights; see `encode` in reference.py. */
void megazpp_encode(const uint16_t *new, const uint16_t *old, int64_t size, const struct format *f, uint8_t *kinds,
                    uint8_t *halves, uint8_t *body, int64_t capacity, int64_t *numbers) {
    uint8_t found[ROOM];
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
        int bytes = body_of(a, b, valid, *f, kinds, found, &changed);
        *halves = bytes / 2;
        if (offset + bytes <= capacity) {
            memcpy(body + offset, found, bytes);
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

/* Decode the values of `count` elements from remainders and quotients. MOST_QUOTIENTS / 8 + 8 bytes after the body must
be readable. */
static void decode_values(const uint8_t *at, const uint32_t *k, int count, uint32_t *values) {
    uint32_t offset = 0;
    for (int i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, at + (offset >> 3), 4);
        values[i] = (word >> (offset & 7)) & ((1u << k[i]) - 1);
        offset += k[i];
    }
    at += (offset + 7) / 8;
    int64_t previous = -1, base = 0;
    for (int i = 0; i < count && base < MOST_QUOTIENTS; base += 64, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        while (word && i < count) {
            int64_t place = base + __builtin_ctzll(word);
            word &= word - 1;
            values[i] += (uint32_t)(place - previous - 1) << k[i];
            previous = place;
            i++;
        }
    }
}

/* Return the new weight for an old weight and its encoded change z (see reference.py). */
static inline uint16_t moved(uint16_t old, uint32_t z) { return order(order(old) + (uint16_t)((z >> 1) ^ -(z & 1))); }

/* Turn old weights into new ones, in place; see `decode` in reference.py. */
void megazpp_decode(const uint8_t *kinds, const uint8_t *halves, const uint8_t *body, int64_t capacity, int64_t size,
                    const struct format *f, uint16_t *weights) {
    int64_t offset = 0;
    for (int64_t start = 0; start < size; start += BLOCK, kinds++, halves++) {
        int valid = size - start < BLOCK ? size - start : BLOCK, kind = *kinds;
        int64_t bytes = kind == RAW ? 2 * valid : 2 * *halves;
        uint16_t *block = weights + start;
        if (offset + bytes > capacity) return; /* an invalid message; `encode` writes no such body */
        if (kind == RAW) {
            memcpy(block, body + offset, bytes);
        } else if (kind) {
            uint8_t padded[2 * BLOCK + MOST_QUOTIENTS / 8 + 16];
            uint32_t values[BLOCK], k[BLOCK];
            const uint8_t *at = padded;
            memcpy(padded, body + offset, bytes);
            memset(padded + bytes, 0, sizeof padded - bytes);
            if (kind <= MOST_POSITIONS) {
                int32_t c = *at++;
                const uint8_t *places = at;
                for (int i = 0; i < kind; i++)
                    k[i] = places[i] < valid ? parameter(c, ((block[places[i]] >> f->shift) & f->mask) + f->above) : 0;
                decode_values(at + kind, k, kind, values);
                for (int i = 0; i < kind; i++)
                    if (places[i] < valid) block[places[i]] = moved(block[places[i]], values[i] + 1);
            } else {
                uint16_t old[BLOCK] = {0};
                memcpy(old, block, 2 * valid);
                for (int i = 0; i < BLOCK; i++) k[i] = parameter(kind, ((old[i] >> f->shift) & f->mask) + f->above);
                for (int i = valid; i < BLOCK; i++) k[i] = 0;
                decode_values(at, k, BLOCK, values);
                for (int i = 0; i < BLOCK; i++) old[i] = moved(old[i], values[i]);
                memcpy(block, old, 2 * valid);
            }
        }
        offset += bytes;
    }
}
