/* tensor_types.h - the table of element types, for the files of this room. */
#ifndef BITDELTA_SRC_HF_TENSOR_TYPES_H
#define BITDELTA_SRC_HF_TENSOR_TYPES_H

#include "bitdelta/hf/safetensors.h"

/* bits: of one element. False: not a type of the format. */
bool bd_dtype_lookup(const char *name, bd_dtype *dtype, uint32_t *bits);

#endif
