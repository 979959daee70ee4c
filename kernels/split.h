/* split.h - how units of work are dealt to CTAs (or clusters), for the kernels and for the tests of it: see split.cuh. */
#ifndef BITDELTA_KERNELS_SPLIT_H
#define BITDELTA_KERNELS_SPLIT_H

#ifdef __CUDACC__
#define K_SPLIT_SIDES __host__ __device__
#else
#define K_SPLIT_SIDES
#endif

/* CTAs for that many units, each with one at least. Where none has more than a tile, no more CTAs than it takes for none to have more than it
 * must: ranges are alike then and end where tiles do more often, so that fewer tiles are split in more than they need be. */
K_SPLIT_SIDES static inline int split_count(int units, int per_tile, int most) {
    const int each = (units + most - 1) / most;
    return each > per_tile ? most : (units + each - 1) / each;
}

/* Unit where the range of CTA `at` of `count` begins. */
K_SPLIT_SIDES static inline int split_begin(int units, int at, unsigned count) {
    return (int)((long long)units * at / count);
}

/* One past the last of the CTAs after `at` that hold units below `end`. */
K_SPLIT_SIDES static inline int split_last(int units, int at, unsigned count, int end) {
    int last = at + 1;
    while (last < (int)count && split_begin(units, last, count) < end) last++;
    return last;
}

#endif
