/* overlay_internal.h - what a plan knows beyond its public pieces. */
#ifndef BITDELTA_SRC_MODEL_OVERLAY_INTERNAL_H
#define BITDELTA_SRC_MODEL_OVERLAY_INTERNAL_H

#include "bitdelta/base/arena.h"
#include "bitdelta/model/overlay.h"
#include "layout.h"

typedef struct bd_piece_target { /* what a piece is, for the overlay's tables */
    bd_weight_id id;
    uint32_t plane;
    uint32_t block; /* of embedding or head */
    bool scale;     /* FLOATS: a plane's scales; else a norm or bias in full */
} bd_piece_target;

typedef struct bd_plan_storage {
    bd_arena *arena; /* pieces, names, targets and this */
    bd_layout layout;
    const bd_piece_target *targets; /* [piece_count] */
} bd_plan_storage;

#endif
