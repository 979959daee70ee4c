/* half.c - binary16 conversions in integer arithmetic. Threads: pure functions. */
#include "bitdelta/base/half.h"

float bd_f16_to_f32(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (uint32_t)(bits >> 10) & 0x1fu;
    uint32_t fraction = bits & 0x3ffu;
    uint32_t u;
    if (exponent == 0x1fu) {
        u = sign | 0x7f800000u | fraction << 13;
    } else if (exponent != 0) {
        u = sign | (exponent + 112u) << 23 | fraction << 13; /* bias 127 - 15 */
    } else if (fraction == 0) {
        u = sign;
    } else {
        /* Subnormal here, normal in float32: shift the leading one to bit 10. */
        uint32_t shift = (uint32_t)__builtin_clz(fraction) - 21u;
        u = sign | (113u - shift) << 23 | ((fraction << shift) & 0x3ffu) << 13;
    }
    float value;
    memcpy(&value, &u, sizeof value);
    return value;
}

uint16_t bd_f32_to_f16(float value) {
    uint32_t u;
    memcpy(&u, &value, sizeof u);
    uint32_t sign = u >> 16 & 0x8000u;
    uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu)); /* quiet, payload kept */
    }
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and up round to inf */
    if (magnitude >= 0x38800000u) {
        /* Normal: half a unit less one, plus the last kept bit, rounds ties to even; a carry moves
         * into the exponent as it should. */
        uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
        return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
    }
    if (magnitude < 0x33000000u) return (uint16_t)sign; /* below 2^-25 */
    /* Subnormal: value = mantissa * 2^(exponent - 150), unit 2^-24. */
    uint32_t shift = 126u - (magnitude >> 23);
    uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    uint32_t kept = mantissa >> shift;
    uint32_t rest = mantissa & ((1u << shift) - 1u);
    uint32_t middle = 1u << (shift - 1);
    if (rest > middle || (rest == middle && (kept & 1u) != 0)) kept++;
    return (uint16_t)(sign | kept);
}
