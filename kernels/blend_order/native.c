/* The order of a blend in C: __init__.py says what it is. Same choices as reference.py, bit for bit.

Datasets with equal shares form a group, which takes from its members in turn: `taken` counts the whole rounds, `turn`
is the next member. Groups have distinct shares.

Samples are planned in blocks. Within a block only candidates are compared: the groups whose lag at the block's last
sample, had they nothing more, is at least a floor. Rounding is monotone, so no other group reaches the floor in the
block. A choice at or above the floor is therefore the choice of all groups; the block ends before one below it, and
the next floor is lower. The floor is a guess from the block before, which decides the speed and not the result.
*/

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 4
#define AT_ONCE 16 /* groups in a pass over all of them */

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t masks __attribute__((vector_size(8 * LANES))); /* -1 where true */

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
    const int32_t *starts, *members; /* members of group g: starts[g] to starts[g + 1] - 1, ascending */
    int32_t *turns;
    double floor, margin;
    double *some_shares, *some_taken; /* of candidates: num_groups + AT_ONCE elements each */
    int32_t *candidates;
};

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
    for (int64_t j = count; j < count + 2 * LANES; j++) { /* their lag is below any */
        p->some_shares[j] = 0.0;
        p->some_taken[j] = INFINITY;
    }
    return count;
}

static inline int32_t member(const struct plan *p, int64_t j) {
    int32_t group = p->candidates[j];
    return p->members[p->starts[group] + p->turns[group]];
}

/* Returns, of the candidates with the largest lag, the one whose next member is the first dataset; writes that lag.

Lanes keep their largest lag, its place, and whether another one was equal; two sets of lanes do not wait for each other.
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

/* Plans samples `first` to `first + count` - 1; the arrays begin with sample `first`. */
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
        if (planned < size) { /* the floor was too high */
            p->margin *= 2.0;
            p->floor = lag - p->margin;
        } else if (p->block < INT32_MAX) {
            p->margin *= 0.98;
            p->floor = least - p->margin;
        }
    }
}
