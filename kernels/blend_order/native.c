/* The order of a blend in C, defined in __init__.py, with the same choices as reference.py.

Datasets with equal shares form a group, which takes samples from its members in turn: `taken` counts complete rounds,
and `turn` is the next member. So all groups have different shares.

The lag of a group is share * max(n, 1) - taken; the group with the largest lag provides sample n. Samples are planned
in blocks, and within a block only candidates are compared. A candidate is a group whose lag at the block's last sample
is at least the floor, if it gets no sample before. Rounding is monotone, so no other group reaches the floor within the
block. A choice with a lag of at least the floor is therefore correct among all groups. Before a choice with a smaller
lag the block ends, and the next block has a lower floor. The floor is estimated from the previous block: it affects the
speed, not the result.
*/

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 4
#define AT_ONCE 16 /* groups per iteration when candidates are chosen */

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t masks __attribute__((vector_size(8 * LANES))); /* -1 for true, 0 for false */

static inline lanes load(const double *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline masks pick(masks where, masks yes, masks no) { return (yes & where) | (no & ~where); }

static inline int any(masks x) { return (x[0] | x[1] | x[2] | x[3]) != 0; }

struct plan {
    int64_t num_groups, block;
    const double *shares;
    double *taken;
    const int32_t *starts, *members; /* group g has members[starts[g]] to members[starts[g + 1] - 1], ascending */
    int32_t *turns;
    double floor, margin;
    double *some_shares, *some_taken; /* copies for the candidates, with room for num_groups + AT_ONCE elements each */
    int32_t *candidates;
};

/* Choose the candidates of a block whose last sample is number `last`, copy their state, and return their number. */
static int64_t choose_candidates(struct plan *p, double last) {
    const double *shares = p->shares, *taken = p->taken, floor = p->floor;
    int64_t count = 0, i = 0;
    for (; i + AT_ONCE <= p->num_groups; i += AT_ONCE) {
        masks some = {0};
        for (int k = 0; k < AT_ONCE; k += LANES) some |= load(shares + i + k) * last - load(taken + i + k) >= floor;
        if (any(some))
            for (int k = 0; k < AT_ONCE; k++) {
                p->candidates[count] = (int32_t)(i + k);
                count += shares[i + k] * last - taken[i + k] >= floor;
            }
    }
    for (; i < p->num_groups; i++) {
        p->candidates[count] = (int32_t)i;
        count += shares[i] * last - taken[i] >= floor;
    }
    for (int64_t j = 0; j < count; j++) {
        p->some_shares[j] = shares[p->candidates[j]];
        p->some_taken[j] = taken[p->candidates[j]];
    }
    for (int64_t j = count; j < count + 2 * LANES; j++) { /* padding whose lag is below every other */
        p->some_shares[j] = 0.0;
        p->some_taken[j] = INFINITY;
    }
    return count;
}

/* The dataset that provides the next sample of candidate j. */
static inline int32_t member(const struct plan *p, int64_t j) {
    int32_t group = p->candidates[j];
    return p->members[p->starts[group] + p->turns[group]];
}

/* Return the candidate with the largest lag, and write that lag to `largest`. In a tie it is the candidate whose next
member has the lowest number.

Each lane keeps its largest lag, the candidate that has it, and whether another one was equal. Two independent sets of
lanes shorten the chain of dependent operations.
*/
static int64_t furthest_behind(const struct plan *p, int64_t count, double at, double *largest) {
    lanes best[2];
    masks place[2], tied[2] = {{0}, {0}}, here = {0, 1, 2, 3};
    for (int h = 0; h < 2; h++) {
        best[h] = load(p->some_shares + h * LANES) * at - load(p->some_taken + h * LANES);
        place[h] = here + h * LANES;
    }
    for (int64_t j = 2 * LANES; j < count; j += 2 * LANES)
        for (int h = 0; h < 2; h++) {
            lanes lag = load(p->some_shares + j + h * LANES) * at - load(p->some_taken + j + h * LANES);
            masks more = lag > best[h];
            tied[h] = (tied[h] & ~more) | (lag == best[h]);
            best[h] = (lanes)pick(more, (masks)lag, (masks)best[h]);
            place[h] = pick(more, here + (j + h * LANES), place[h]);
        }
    double top = -INFINITY;
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < LANES; k++) top = best[h][k] > top ? best[h][k] : top;
    int64_t found = -1, equal = 0;
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < LANES; k++)
            if (best[h][k] == top) {
                found = place[h][k];
                equal += 1 - tied[h][k];
            }
    if (equal > 1)
        for (int64_t j = 0; j < count; j++)
            if (p->some_shares[j] * at - p->some_taken[j] == top && member(p, j) < member(p, found)) found = j;
    *largest = top;
    return found;
}

/* Plan samples `first` to `first + count` - 1; the arrays begin with sample `first`. */
void megazpp_blend_order(struct plan *p, int64_t first, int64_t count, int16_t *datasets, int64_t *numbers) {
    for (int64_t done = 0; done < count;) {
        int64_t size = count - done < p->block ? count - done : p->block;
        int64_t end = first + done + size, planned = 0;
        int64_t num_candidates = choose_candidates(p, end > 2 ? (double)(end - 1) : 1.0);
        double least = INFINITY, lag = p->floor;
        for (; planned < size && num_candidates; planned++) {
            int64_t n = first + done + planned;
            int64_t j = furthest_behind(p, num_candidates, n > 1 ? (double)n : 1.0, &lag);
            if (lag < p->floor) break;
            least = lag < least ? lag : least;
            int32_t group = p->candidates[j];
            datasets[done + planned] = (int16_t)member(p, j);
            numbers[done + planned] = (int64_t)p->some_taken[j];
            if (++p->turns[group] == p->starts[group + 1] - p->starts[group]) {
                p->turns[group] = 0;
                p->some_taken[j] += 1.0;
            }
        }
        for (int64_t j = 0; j < num_candidates; j++) p->taken[p->candidates[j]] = p->some_taken[j];
        done += planned;
        if (planned < size) { /* the floor was too high: lower it, with a larger margin */
            p->margin *= 2.0;
            p->floor = lag - p->margin;
        } else if (p->block < INT32_MAX) {
            p->margin *= 0.98;
            p->floor = least - p->margin;
        }
    }
}
