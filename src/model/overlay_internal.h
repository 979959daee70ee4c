/* overlay_internal.h - what a plan knows beyond its public pieces. */
#ifndef BITDELTA_SRC_MODEL_OVERLAY_INTERNAL_H
#define BITDELTA_SRC_MODEL_OVERLAY_INTERNAL_H

#include "bitdelta/base/arena.h"
#include "bitdelta/model/overlay.h"
#include "layout.h"

typedef enum bd_piece_part {
    BD_PART_BITS,   /* of a plane */
    BD_PART_SCALES, /* of a plane */
    BD_PART_VECTOR, /* a norm or a bias in full */
    BD_PART_FULL,   /* rows of the embedding or head in full */
    BD_PART_EXTRA   /* rows added to the embedding or head */
} bd_piece_part;

typedef struct bd_piece_target { /* what a piece is, for the overlay's tables */
    bd_weight_id id;
    bd_piece_part part;
    uint32_t plane;
    uint32_t block; /* of embedding or head: of sign rows, of full rows or of added ones */
} bd_piece_target;

typedef struct bd_plan_storage {
    bd_arena *arena; /* pieces, names, targets and this */
    bd_layout layout;
    const bd_piece_target *targets; /* [piece_count] */
    uint32_t extra_rows;            /* of the vocabulary */
    bool own_head;                  /* the delta has a head, else a tied model's is its embedding */
    bool full_embed, full_head;
} bd_plan_storage;

#endif
