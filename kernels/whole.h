/* whole.h - C launcher of whole.cu. Rules as in kernels.h. */
#ifndef BITDELTA_KERNELS_WHOLE_H
#define BITDELTA_KERNELS_WHOLE_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct k_embed_rows_args { /* after k_embed: residual[m] = scale * from[m], but where from[m] is NULL */
    float *residual;             /* [rows, hidden] */
    const uint16_t *const *from; /* [rows] of [hidden] */
    int32_t rows, hidden;
    float scale;
    bool fp16;
} k_embed_rows_args;
cudaError_t k_embed_rows(const k_embed_rows_args *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
