/* overlay.h - from a delta on disk to pages on the device: where each tensor of a variant goes.
 * A page holds one layer's one-plane overlay (bits, scales; plane 0's page also norms and biases
 * that differ), a block of embedding or head rows, or rows of the vocabulary kept whole (in full,
 * or added to the base's). Page size is the same for all, so pages never fragment. Layout inside a
 * page is fixed per model. Owner: cache. Threads: plans are immutable; build and read anywhere. */
#ifndef BITDELTA_MODEL_OVERLAY_H
#define BITDELTA_MODEL_OVERLAY_H

#include "bitdelta/delta/delta.h"
#include "bitdelta/model/model.h"

/* Known from the config alone, before a model is open (memory planning): one rank's, see
 * bd_model_rank_config; rank 0 has at least as many pages as any other. */
uint64_t bd_overlay_page_bytes(const bd_model_config *config, const bd_backend_ops *ops);
uint32_t bd_overlay_pages_per_variant(const bd_model_config *config, const bd_backend_ops *ops,
                                      uint32_t planes, bool with_embeddings);
/* Pages of this very delta. */
uint32_t bd_overlay_pages_of(const bd_model_config *config, const bd_backend_ops *ops,
                             const bd_delta *delta);
/* Likewise, on each of the model's ranks. */
uint32_t bd_overlay_pages_for(const bd_model *model, const bd_delta *delta);
/* More pages for `rows` added rows of one table. */
uint32_t bd_overlay_extra_pages(const bd_model_config *config, const bd_backend_ops *ops,
                                uint32_t rows);

typedef enum bd_piece_kind { BD_PIECE_BITS, BD_PIECE_FLOATS, BD_PIECE_ROWS } bd_piece_kind;

/* One contiguous run of a delta file that goes to one place of one page. Sorted by (file, offset).
 */
typedef struct bd_overlay_piece {
    bd_piece_kind kind;
    uint32_t file_index;
    uint64_t offset_bytes, bytes; /* in the file */
    uint32_t ready_index;         /* 0 embedding, 1 + l layer l, 1 + layers final norm and head */
    uint32_t page;                /* index into the variant's page list */
    uint64_t page_offset_bytes;   /* start of the plane, vector or block of rows inside the page */
    uint32_t first_row;           /* of the plane, vector or block: where the piece goes */
    uint32_t first_col;           /* BITS of a shard cut by columns */
    uint32_t n, k;                /* the whole shape in the page */
    uint64_t row_bytes;           /* BITS, ROWS: of a row in the file */
    /* BITS: which bytes of a row go to the page; those of k / 8 unless it is cut by columns. */
    uint64_t take_from, take_bytes;
    bd_dtype dtype;     /* FLOATS: F32, BF16, F16 -> float32 */
    const char *tensor; /* for messages */
} bd_overlay_piece;

typedef struct bd_overlay_plan {
    uint32_t page_count, piece_count, ready_count; /* ready_count = layers + 2 */
    const bd_overlay_piece *pieces;
    void *storage; /* owned */
} bd_overlay_plan;

/* Reads the shard headers and checks every tensor against the model: missing, unknown or misshapen
 * ones and a foreign base fingerprint are BD_E_MISMATCH naming file and tensor; what the backend
 * has no operator for (matrices in full, added vocabulary, parts cut by columns) is
 * BD_E_UNSUPPORTED naming the tensor. A delta of S shards needs all S files: its layers are
 * complete only with the last of them. */
BD_MUST_CHECK bd_status bd_overlay_plan_create(const bd_model *model, const bd_delta *delta,
                                               bd_overlay_plan *out, bd_error *err);
void bd_overlay_plan_destroy(bd_overlay_plan *plan);

/* The overlay's host structure over given pages (addresses in the delta arena). Registers a rope
 * table when the variant's config.json (delta->dir) has its own. Free with destroy; pages stay the
 * caller's. */
BD_MUST_CHECK bd_status bd_overlay_create(bd_model *model, const bd_delta *delta,
                                          const bd_overlay_plan *plan, void *const *pages,
                                          bd_overlay **out, bd_error *err);
/* Of all ranks if they were joined. */
void bd_overlay_destroy(bd_overlay *overlay);
/* One variant's overlays on every rank, in order, become one: overlays[0], which owns the others.
 */
void bd_overlay_join(bd_overlay *const *overlays, uint32_t count);
/* Where rank `rank` has the page that is `page` on rank 0. */
void *bd_overlay_page_on(bd_model *model, uint32_t rank, void *page);

/* Puts bytes [from, from + bytes) of file `file_index`, already verified, into the pages: every
 * whole row or value they complete. `data` is the whole file's bytes at `from`. Each byte once, in
 * pieces of any sizes; what is cut between two of them is kept until it is whole. Where
 * bd_overlay_feeds_anywhere() says so, in any order and from any threads at once; else in ascending
 * order from one thread. What lies in memory of the backend's host_alloc or host_lock must stay as
 * it is until the next call of feed_bytes for this model has gone well, or the feed is destroyed.
 */
typedef struct bd_overlay_feed bd_overlay_feed;
bool bd_overlay_feeds_anywhere(const bd_model *model);
BD_MUST_CHECK bd_status bd_overlay_feed_create(bd_model *model, const bd_overlay_plan *plan,
                                               void *const *pages, bd_overlay_feed **out,
                                               bd_error *err);
BD_MUST_CHECK bd_status bd_overlay_feed_bytes(bd_overlay_feed *feed, uint32_t file_index,
                                              uint64_t from, const uint8_t *data, uint64_t bytes,
                                              bd_error *err);
/* When no more bytes are there for a while: what is complete is ready afterwards. */
BD_MUST_CHECK bd_status bd_overlay_feed_settle(bd_overlay_feed *feed, bd_error *err);
/* Ready indices whose pieces are complete, counted from 0 without a gap. Any thread. */
uint32_t bd_overlay_feed_ready(const bd_overlay_feed *feed);
/* Before the plan goes. Nothing reads what was fed or writes the pages afterwards. */
void bd_overlay_feed_destroy(bd_overlay_feed *feed);

#endif
