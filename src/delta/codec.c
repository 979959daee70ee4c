/* codec.c - one bit per weight. The sum is taken pairwise in float64: for bf16 weights it is exact,
 * so any order gives the same scale; for float32 ones it has the rounding of the blocks below
 * (numpy's), so files stay comparable. Threads: any. */
#include <math.h>

#include "bitdelta/delta/delta.h"

#define LANES        8u   /* independent sums of a block */
#define BLOCK_VALUES 128u /* summed without splitting */

static double block_sum(const float *values, uint64_t count) {
    double lane[LANES];
    if (count < LANES) {
        double sum = 0.0;
        for (uint64_t i = 0; i < count; i++)
            sum += (double)fabsf(values[i]);
        return sum;
    }
    for (uint32_t j = 0; j < LANES; j++)
        lane[j] = (double)fabsf(values[j]);
    uint64_t i = LANES;
    for (; i + LANES <= count; i += LANES) {
        for (uint32_t j = 0; j < LANES; j++)
            lane[j] += (double)fabsf(values[i + j]);
    }
    double sum =
        ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    for (; i < count; i++)
        sum += (double)fabsf(values[i]);
    return sum;
}

static double pairwise_sum(const float *values, uint64_t count) {
    if (count <= BLOCK_VALUES) return block_sum(values, count);
    uint64_t half = count / 2;
    half -= half % LANES;
    return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
}

double bd_delta_pack_row(const float *values, uint64_t cols, uint8_t *bits) {
    for (uint64_t b = 0; b < cols / 8; b++) {
        uint32_t byte = 0;
        for (uint32_t j = 0; j < 8; j++)
            byte |= (uint32_t)(values[8 * b + j] >= 0.0f) << j;
        bits[b] = (uint8_t)byte;
    }
    return pairwise_sum(values, cols);
}

/* The same splits as pairwise_sum, a block's differences at a time: no row-sized buffer. Halves are
 * multiples of 8 values, so each half owns whole bytes of bits. */
static double encode_range(const float *base, const float *tuned, uint64_t count, uint8_t *bits) {
    if (count > BLOCK_VALUES) {
        uint64_t half = count / 2;
        half -= half % LANES;
        const double left = encode_range(base, tuned, half, bits);
        return left + encode_range(base + half, tuned + half, count - half, bits + half / 8);
    }
    float difference[BLOCK_VALUES];
    for (uint64_t i = 0; i < count; i++)
        difference[i] = tuned[i] - base[i];
    return bd_delta_pack_row(difference, count, bits);
}

float bd_delta_encode_row(const float *base, const float *tuned, uint64_t cols, uint8_t *bits) {
    return (float)(encode_range(base, tuned, cols, bits) / (double)cols);
}
