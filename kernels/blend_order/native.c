/* The order of a blend's samples in C, defined in __init__.py, with the same choices as reference.py.

Datasets with equal shares form a group, which takes samples from its members in turn, so all groups have different
shares. A group's `taken` counts how often all its members have had their turn, and its entry in `turns` is the index of
the member whose turn is next.

The lag of a group is share * max(n, 1) - taken; the group with the largest lag provides sample n. Samples are planned
in blocks of consecutive samples, and within a block only candidates are compared. The floor of a block is a linear
function of n. A candidate is a group whose lag would reach the floor at the block's first or last sample if the group
provided no sample in between. Lags are linear functions too, up to rounding, so no other group reaches the floor within
the block. If the candidate with the largest lag at a sample reaches the floor, its lag is therefore the largest of all
groups. Otherwise the block ends early, before this sample.

The floor affects the speed, not the result. It is predicted from the lags of the previous block's choices: it continues
their smallest value, minus a margin, with their slope. The slope is 0 in most blends; the floor is level then. With
nearly equal shares all lags rise together until every group has had its turn, and a level floor would make nearly every
group a candidate. After a block that ended early, the floor is a lag that enough groups reach. If the next block ends
early too, the floor after it is level and so low that the following block cannot end early.
*/

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 4
#define AT_ONCE 16 /* groups per iteration when candidates are chosen */

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t masks __attribute__((vector_size(8 * LANES))); /* a lane is -1 for true, 0 for false */

static inline lanes load(const double *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline masks pick(masks where, masks yes, masks no) { return (yes & where) | (no & ~where); }

static inline int any(masks x) { return (x[0] | x[1] | x[2] | x[3]) != 0; }

/* The state of a planner. `block` is the number of samples per block. It is INT32_MAX if there are so few groups that
all of them are always candidates. Then the floor is -inf, and the margin, slope and lags are not used. */
struct plan {
    int64_t num_groups, block;
    const double *shares;
    double *taken;
    const int32_t *starts, *members; /* group g has members[starts[g]] to members[starts[g + 1] - 1], ascending */
    int32_t *turns;
    /* The floor, its slope per sample, the margin that is subtracted from it, and the floor without this margin.
    `expected`, the last of them, is NaN after `new_floor`. */
    double floor, slope, margin, expected;
    double *some_shares, *some_taken; /* the candidates' shares and taken; room for num_groups + AT_ONCE each */
    int32_t *candidates;
    double *lags; /* lags of the choices in a block, with room for num_groups elements */
};

/* Return the floor at sample `at` of a block that begins with sample `begin`. */
static inline double floor_at(const struct plan *p, double begin, double at) {
    return p->floor + p->slope * (at - begin);
}

/* Choose the candidates for the samples `begin` to `last`, copy their shares and `taken`, and return their number. */
static int64_t choose_candidates(struct plan *p, double begin, double last) {
    const double *shares = p->shares, *taken = p->taken;
    /* The rounding error of a lag is at most 2^-53 of its terms. The slack is 16 times that, which covers the errors of
    the lags at both ends of the block, of the lag at a sample in between, and of the floor. */
    double slack = 0x1p-49 * (shares[p->num_groups - 1] * last + 4.0);
    double low = p->floor - slack, high = floor_at(p, begin, last) - slack;
    int64_t count = 0, i = 0;
    for (; i + AT_ONCE <= p->num_groups; i += AT_ONCE) {
        masks some = {0};
        for (int k = 0; k < AT_ONCE; k += LANES) {
            lanes share = load(shares + i + k), had = load(taken + i + k);
            some |= (share * begin - had >= low) | (share * last - had >= high);
        }
        if (any(some))
            for (int k = 0; k < AT_ONCE; k++) {
                double share = shares[i + k], had = taken[i + k];
                p->candidates[count] = (int32_t)(i + k);
                count += (share * begin - had >= low) | (share * last - had >= high);
            }
    }
    for (; i < p->num_groups; i++) {
        p->candidates[count] = (int32_t)i;
        count += (shares[i] * begin - taken[i] >= low) | (shares[i] * last - taken[i] >= high);
    }
    for (int64_t j = 0; j < count; j++) {
        p->some_shares[j] = shares[p->candidates[j]];
        p->some_taken[j] = taken[p->candidates[j]];
    }
    for (int64_t j = count; j < count + 2 * LANES; j++) { /* padding with lag -inf, which is never chosen */
        p->some_shares[j] = 0.0;
        p->some_taken[j] = INFINITY;
    }
    return count;
}

/* Return the dataset that provides the next sample of candidate j, a group of datasets with equal shares. */
static inline int32_t member(const struct plan *p, int64_t j) {
    int32_t group = p->candidates[j];
    return p->members[p->starts[group] + p->turns[group]];
}

/* Return the candidate with the largest lag at sample `at`, and write that lag to `largest`. In a tie, return the
candidate whose next member has the lowest dataset number.

Each vector lane tracks its largest lag, the candidate with this lag, and whether another candidate has an equal lag.
Two independent sets of lanes shorten the chain of dependent operations.
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

/* Return the lag at sample `at` that has index `rank` among all groups' lags in descending order, and write the largest
lag to `largest`. This overwrites the candidates' copies in `some_shares`. */
static double lag_of_rank(struct plan *p, double at, int64_t rank, double *largest) {
    double *lags = p->some_shares;
    int64_t low = 0, high = p->num_groups - 1;
    *largest = -INFINITY;
    for (int64_t i = 0; i <= high; i++) {
        lags[i] = p->shares[i] * at - p->taken[i];
        *largest = lags[i] > *largest ? lags[i] : *largest;
    }
    while (low < high) { /* Hoare's selection: the wanted lag is between `low` and `high` */
        double pivot = lags[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (lags[i] > pivot) i++;
            while (lags[j] < pivot) j--;
            if (i > j) break;
            double other = lags[i];
            lags[i++] = lags[j];
            lags[j--] = other;
        }
        if (rank <= j)
            high = j;
        else if (rank >= i)
            low = i;
        else
            break;
    }
    return lags[rank];
}

/* Choose the floor of the block that begins with sample `at`, after the block that began with `begin` has ended early.
The lags of at least 2 * block groups reach this floor, so a block with a level floor cannot end early. */
static void new_floor(struct plan *p, double begin, double at) {
    double missed = p->expected + p->slope * (at - begin), largest;
    int64_t rank = 2 * p->block < p->num_groups ? 2 * p->block : p->num_groups - 1;
    p->floor = lag_of_rank(p, at, rank, &largest);
    missed -= largest;
    if (missed < 0.5) p->margin *= 2.0;     /* otherwise the largest lag fell by 1: every group has had its turn */
    if (isnan(p->expected)) p->slope = 0.0; /* two blocks in a row ended early */
    p->expected = NAN;
}

/* Continue the floor for the next block, from the lags of the last block's `size` choices. */
static void continue_floor(struct plan *p, int64_t size) {
    /* `missed`: how far the smallest lag fell below the floor without its margin, `expected`, which was predicted from
    the block before */
    double lowest = INFINITY;
    for (int64_t i = 0; i < size; i++) {
        double over = p->lags[i] - p->slope * (double)i;
        lowest = over < lowest ? over : lowest;
    }
    double missed = p->expected - lowest; /* NaN if the floor came from `new_floor`, which predicts nothing */
    p->margin = 2.0 * missed > 0.9 * p->margin ? 2.0 * missed : 0.9 * p->margin;
    /* The next floor continues these lags. Its slope is that of a line from the smallest lag of the block's first half
    to the smallest lag of its second half, `distance` samples later. The middle sample of an odd size is in no half. */
    int64_t distance = size - size / 2;
    double early = INFINITY, late = INFINITY;
    for (int64_t i = 0; i < size / 2; i++) {
        early = p->lags[i] < early ? p->lags[i] : early;
        late = p->lags[i + distance] < late ? p->lags[i + distance] : late;
    }
    p->slope = size > 1 ? (late - early) / (double)distance : 0.0;
    p->expected = INFINITY;
    for (int64_t i = 0; i < size; i++) {
        double over = p->lags[i] - p->slope * (double)(i - size);
        p->expected = over < p->expected ? over : p->expected;
    }
    p->floor = p->expected - p->margin;
}

/* Choose the datasets of samples `first` to `first + count` - 1. Write the dataset of each sample, and the sample's
number among the blend's samples from that dataset. */
void megazpp_blend_order(struct plan *p, int64_t first, int64_t count, int16_t *datasets, int64_t *numbers) {
    if (first == 0 && p->block < INT32_MAX) new_floor(p, 1.0, 1.0);
    for (int64_t done = 0; done < count;) {
        int64_t size = count - done < p->block ? count - done : p->block;
        int64_t end = first + done + size, planned = 0;
        double begin = first + done > 1 ? (double)(first + done) : 1.0, last = end > 2 ? (double)(end - 1) : 1.0;
        int64_t num_candidates = choose_candidates(p, begin, last);
        for (; planned < size && num_candidates; planned++) {
            int64_t n = first + done + planned;
            double at = n > 1 ? (double)n : 1.0, lag;
            int64_t j = furthest_behind(p, num_candidates, at, &lag);
            if (lag < floor_at(p, begin, at)) break;
            if (p->block < INT32_MAX) p->lags[planned] = lag;
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
        if (p->block >= INT32_MAX) continue; /* all groups are always candidates */
        if (planned < size)
            new_floor(p, begin, first + done > 1 ? (double)(first + done) : 1.0);
        else
            continue_floor(p, size);
    }
}
