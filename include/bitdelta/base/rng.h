/* rng.h - counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11). A pure function of
 * key and counter, so a request's draws do not depend on what else runs. */
#ifndef BITDELTA_BASE_RNG_H
#define BITDELTA_BASE_RNG_H

#include <stdint.h>

void bd_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* Uniform in [0, 1) with 53 bits: key = (seed low, seed high), counter = (position, choice, 0, 0),
 * ((out[0] << 32 | out[1]) >> 11) * 2^-53. Kernels that draw on the device use the same mapping. */
double bd_rng_uniform(uint64_t seed, uint32_t choice, uint32_t position);

#endif
