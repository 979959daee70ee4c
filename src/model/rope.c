/* rope.c - inv_freq as Hugging Face transformers computes it: its tensors are float32 and its
 * Python numbers double, so every step here is rounded where theirs is (a float is divided by a
 * scalar after the scalar was rounded to float; scalar / tensor is the tensor's reciprocal times
 * the scalar). */
#include "rope.h"

#include <math.h>

static const double two_pi = 6.283185307179586;

/* theta^(2i / dim) */
static float plain_freq(const bd_rope_config *rope, uint32_t i) {
    const float exponent = (float)(2 * i) / (float)rope->rotary_dim;
    return powf((float)rope->theta, exponent);
}

/* Long wavelengths are stretched by factor, short ones kept, those between blended. */
static float llama3_freq(const bd_rope_config *rope, float inv) {
    const double old_len = (double)rope->original_max_positions;
    const float low_wavelen = (float)(old_len / rope->low_freq_factor);
    const float high_wavelen = (float)(old_len / rope->high_freq_factor);
    const float factor = (float)rope->factor;
    const float wavelen = 1.0f / inv * (float)two_pi;
    if (wavelen > low_wavelen) return inv / factor;
    if (wavelen < high_wavelen) return inv;
    const float spread = (float)(rope->high_freq_factor - rope->low_freq_factor);
    const float smooth = (1.0f / wavelen * (float)old_len - (float)rope->low_freq_factor) / spread;
    return (1.0f - smooth) * inv / factor + smooth * inv;
}

/* The dimension whose wavelength makes this many turns within the original length. */
static double yarn_dim(const bd_rope_config *rope, double turns) {
    const double len = (double)rope->original_max_positions;
    return (double)rope->rotary_dim * log(len / (turns * two_pi)) / (2 * log(rope->theta));
}

static void yarn_table(const bd_rope_config *rope, float *inv_freq) {
    double low = yarn_dim(rope, rope->beta_fast), high = yarn_dim(rope, rope->beta_slow);
    if (rope->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, (double)rope->rotary_dim - 1);
    if (low == high) high += 0.001; /* the ramp must not divide by zero */
    const float width = (float)(high - low), factor = (float)rope->factor;
    for (uint32_t i = 0; i < rope->rotary_dim / 2; i++) {
        const float freq = plain_freq(rope, i);
        const float ramp = ((float)i - (float)low) / width;
        const float keep = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
        inv_freq[i] = 1.0f / (factor * freq) * (1.0f - keep) + 1.0f / freq * keep;
    }
}

static double yarn_mscale(double factor, double mscale) {
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

static float yarn_scale(const bd_rope_config *rope) {
    if (rope->attention_factor != 0) return (float)rope->attention_factor;
    if (rope->mscale != 0 && rope->mscale_all_dim != 0) {
        return (float)(yarn_mscale(rope->factor, rope->mscale) /
                       yarn_mscale(rope->factor, rope->mscale_all_dim));
    }
    return (float)yarn_mscale(rope->factor, 1);
}

bd_status bd_rope_table(const bd_rope_config *rope, float *inv_freq, float *scale, bd_error *err) {
    *scale = 1.0f;
    if (rope->rotary_dim == 0 || rope->rotary_dim % 2 != 0 ||
        rope->rotary_dim > BD_ROTARY_DIM_MAX) {
        return bd_fail(err, BD_E_UNSUPPORTED, "rotary_dim",
                       "rotary dimension %u is not even and within 2..%u", rope->rotary_dim,
                       BD_ROTARY_DIM_MAX);
    }
    if (rope->kind == BD_ROPE_LONGROPE) {
        return bd_fail(err, BD_E_UNSUPPORTED, "rope_scaling",
                       "rope type longrope is not supported");
    }
    if (rope->kind == BD_ROPE_YARN) {
        yarn_table(rope, inv_freq);
        *scale = yarn_scale(rope);
        return BD_OK;
    }
    for (uint32_t i = 0; i < rope->rotary_dim / 2; i++) {
        const float inv = 1.0f / plain_freq(rope, i);
        inv_freq[i] = rope->kind == BD_ROPE_LINEAR   ? inv / (float)rope->factor
                      : rope->kind == BD_ROPE_LLAMA3 ? llama3_freq(rope, inv)
                                                     : inv;
    }
    return BD_OK;
}
