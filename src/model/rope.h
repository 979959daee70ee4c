/* rope.h - the frequencies of rotary position embedding. Inside the model room. Threads: pure. */
#ifndef BITDELTA_SRC_MODEL_ROPE_H
#define BITDELTA_SRC_MODEL_ROPE_H

#include "bitdelta/hf/model_config.h"

#define BD_ROTARY_DIM_MAX 512

/* inv_freq: [rotary_dim / 2]. *scale multiplies cos and sin (1 but for yarn). */
BD_MUST_CHECK bd_status bd_rope_table(const bd_rope_config *rope, float *inv_freq, float *scale,
                                      bd_error *err);

#endif
