/* half.h - bfloat16 and binary16 to and from float32, round to nearest even, NaN stays NaN. */
#ifndef BITDELTA_BASE_HALF_H
#define BITDELTA_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float bd_bf16_to_f32(uint16_t bits) {
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint16_t bd_f32_to_bf16(float value) {
    uint32_t u;
    memcpy(&u, &value, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

float bd_f16_to_f32(uint16_t bits);
uint16_t bd_f32_to_f16(float value);

#endif
