/* The order of a blend's samples in C, defined in __init__.py, with the same choices as reference.py. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 4
#define AT_ONCE (4 * LANES) /* datasets per iteration; 4 independent vectors shorten the chain of dependencies */

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t masks __attribute__((vector_size(8 * LANES))); /* a lane is -1 for true, 0 for false */

static inline lanes load(const double *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline masks pick(masks where, masks yes, masks no) { return (yes & where) | (no & ~where); }

/* Return the dataset with the largest lag, share * at - taken; in a tie, the first one. `size` is a multiple of
AT_ONCE. Each lane tracks its largest lag and the first dataset with this lag. */
static int64_t furthest_behind(const double *shares, const double *taken, int64_t size, double at) {
    masks here = {0, 1, 2, 3}, place[4];
    lanes best[4];
    for (int h = 0; h < 4; h++) {
        best[h] = load(shares + h * LANES) * at - load(taken + h * LANES);
        place[h] = here + h * LANES;
    }
    for (int64_t j = AT_ONCE; j < size; j += AT_ONCE)
        for (int h = 0; h < 4; h++) {
            lanes lag = load(shares + j + h * LANES) * at - load(taken + j + h * LANES);
            masks more = lag > best[h];
            best[h] = (lanes)pick(more, (masks)lag, (masks)best[h]);
            place[h] = pick(more, here + (j + h * LANES), place[h]);
        }
    double largest = -INFINITY;
    int64_t found = 0;
    for (int h = 0; h < 4; h++)
        for (int k = 0; k < LANES; k++)
            if (best[h][k] > largest || (best[h][k] == largest && place[h][k] < found)) {
                largest = best[h][k];
                found = place[h][k];
            }
    return found;
}

/* Choose the datasets of samples `first` to `first + count` - 1. Write the dataset of each sample, and the sample's
number among the blend's samples from that dataset. `taken` counts the samples of each dataset. The arrays of datasets
are filled up to `size`, a multiple of AT_ONCE, with datasets whose `taken` is infinite. */
void megazpp_blend_order(
    const double *shares, double *taken, int64_t size, int64_t first, int64_t count, int16_t *datasets, int64_t *numbers
) {
    for (int64_t i = 0; i < count; i++) {
        int64_t n = first + i, chosen = furthest_behind(shares, taken, size, n > 1 ? (double)n : 1.0);
        datasets[i] = (int16_t)chosen;
        numbers[i] = (int64_t)taken[chosen];
        taken[chosen] += 1.0;
    }
}
