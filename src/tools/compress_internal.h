/* compress_internal.h - the parts of the compress tool: plan (what is stored), encoder (one
 * weight), output (directories that appear whole), progress. One run owns one of each. */
#ifndef BITDELTA_SRC_TOOLS_COMPRESS_INTERNAL_H
#define BITDELTA_SRC_TOOLS_COMPRESS_INTERNAL_H

#include <stdio.h>

#include "bitdelta/base/pool.h"
#include "bitdelta/delta/delta.h"
#include "bitdelta/hf/checkpoint.h"
#include "bitdelta/hf/model_config.h"
#include "bitdelta/tools/compress.h"

/* ---- plan: compress_plan.c, compress_names.c ------------------------------------------------- */

typedef struct bd_compress_item { /* one tensor under its canonical name */
    char *name;                   /* owned */
    bd_delta_kind kind;
    bd_tensor base,
        tuned;           /* views: whole tensors, or the rows of one projection of a fused tensor */
    uint64_t extra_rows; /* rows of the fine-tune below those of the base; tuned has fewer rows
                            than base where its vocabulary is smaller */
} bd_compress_item;

typedef struct bd_compress_model {
    const bd_checkpoint *checkpoint;
    bool has_config; /* a directory of weights alone is compressed by its tensor names */
    bd_model_config config;
} bd_compress_model;

typedef struct bd_compress_plan {
    uint32_t count, cap;
    bd_compress_item *items; /* what the delta holds, in data order */
    uint32_t equal_count;    /* tensors left out because they are the base's */
    uint64_t input_bytes;    /* of both models' stored tensors */
    uint32_t shards;
    uint64_t kv_parts;     /* different parts of k and v */
    uint32_t tensor_count; /* what each file will hold, [shards][tensor_max]: names owned */
    uint32_t tensor_max;
    bd_tensor *tensors;
    bd_delta_entry *entries; /* [count] */
} bd_compress_plan;

typedef enum bd_embeddings {
    BD_EMBEDDINGS_SIGN,
    BD_EMBEDDINGS_FULL,
    BD_EMBEDDINGS_BASE
} bd_embeddings;

/* Pairs the tensors of both models; missing, surplus and misshapen ones are named. */
BD_MUST_CHECK bd_status bd_compress_plan_make(const bd_compress_model *base,
                                              const bd_compress_model *tuned,
                                              bd_embeddings embeddings, uint32_t planes,
                                              uint32_t shards, bd_compress_plan *out,
                                              bd_error *err);
void bd_compress_plan_free(bd_compress_plan *plan);

bool bd_compress_is_embedding(const char *name); /* the embedding or the head */
bool bd_compress_is_signed(const char *name);    /* a projection, the embedding or the head */
/* Data order: embedding, layers with their parts in order, the final norm, the head; ties by name.
 */
int bd_compress_order(const char *a, const char *b);

/* ---- encoder: compress_encode.c -------------------------------------------------------------- */

typedef struct bd_compress_planes { /* all planes of one weight */
    uint8_t *bits[BD_PLANES_MAX];   /* [rows][cols / 8] */
    float *scale[BD_PLANES_MAX];    /* [rows] */
    double relative_change;         /* mean |delta| / mean |base| */
    void *storage;                  /* owned */
} bd_compress_planes;

BD_MUST_CHECK bd_status bd_compress_encode(bd_pool *pool, const bd_compress_item *item,
                                           uint32_t planes, bool matrix_scale,
                                           bd_compress_planes *out, bd_error *err);
void bd_compress_planes_free(bd_compress_planes *planes);
/* A NaN or an infinity in a tensor that is stored whole is BD_E_FORMAT naming it. */
BD_MUST_CHECK bd_status bd_compress_check_finite(const bd_tensor *tensor, const char *name,
                                                 bd_error *err);

/* ---- files: compress_shards.c ---------------------------------------------------------------- */

#define BD_COMPRESS_SHARDS_MAX 8u

/* Can a model of this shape be cut? The refusal says which number does not divide. */
BD_MUST_CHECK bd_status bd_compress_check_shards(const bd_compress_model *base, uint32_t shards,
                                                 bd_error *err);
/* Fills plan->tensors from its items. */
BD_MUST_CHECK bd_status bd_compress_list_tensors(bd_compress_plan *plan, uint32_t planes,
                                                 bd_error *err);

typedef struct bd_compress_files { /* zeroed by the caller; free with bd_compress_files_free */
    const bd_compress_plan *plan;
    bd_safetensors_writer *writers[BD_COMPRESS_SHARDS_MAX];
    bd_delta_file files[BD_COMPRESS_SHARDS_MAX];
    char names[BD_COMPRESS_SHARDS_MAX][64];
    uint64_t *chunks[BD_COMPRESS_SHARDS_MAX]; /* owned, borrowed by files */
} bd_compress_files;

BD_MUST_CHECK bd_status bd_compress_files_open(bd_compress_files *files,
                                               const bd_compress_plan *plan, const char *dir,
                                               uint32_t align_bytes, bd_error *err);
/* The next item of the plan; planes: of a sign-coded one. */
BD_MUST_CHECK bd_status bd_compress_files_put(bd_compress_files *files,
                                              const bd_compress_item *item,
                                              const bd_compress_planes *planes,
                                              uint32_t plane_count, bd_error *err);
/* Ends and hashes all files: files->files are complete. */
BD_MUST_CHECK bd_status bd_compress_files_finish(bd_compress_files *files, const char *dir,
                                                 bd_error *err);
void bd_compress_files_free(bd_compress_files *files);

#define SIDE_FILE_BYTES_MAX ((size_t)512 << 20) /* of a file beside the weights */

/* ---- output: compress_output.c --------------------------------------------------------------- */

typedef struct bd_output_dir {
    char path[1024];      /* the final name, without trailing slashes */
    char temporary[1024]; /* exists, is locked by us, and becomes `path` */
    int lock_fd;          /* -1: nothing was created */
} bd_output_dir;

/* BD_E_ARGUMENT when OUT exists and may not be replaced. Creates nothing. */
BD_MUST_CHECK bd_status bd_output_check(const char *path, bool force, bd_output_dir *out,
                                        bd_error *err);
/* Removes what dead runs left and creates the temporary directory; needed_bytes must be free. */
BD_MUST_CHECK bd_status bd_output_begin(bd_output_dir *dir, uint64_t needed_bytes, bd_error *err);
/* Copies whole files of another directory, by name, into the temporary one. */
BD_MUST_CHECK bd_status bd_output_copy(const bd_output_dir *dir, const char *from_dir,
                                       const char *const *names, uint32_t count, bd_error *err);
/* Syncs and renames; an old OUT is swapped out and removed. */
BD_MUST_CHECK bd_status bd_output_commit(bd_output_dir *dir, bd_error *err);
void bd_output_abort(
    bd_output_dir *dir); /* removes the temporary directory; nothing after a commit */

/* ---- progress: compress_progress.c ----------------------------------------------------------- */

typedef struct bd_progress {
    FILE *stream;
    bool json, terminal;
    uint64_t total_bytes, done_bytes, start_us, last_us;
} bd_progress;

void bd_progress_begin(bd_progress *progress, FILE *stream, bool json, uint64_t total_bytes);
/* Prints at most twice a second, and at the end. */
void bd_progress_add(bd_progress *progress, uint64_t bytes, const char *what);
double bd_progress_seconds(const bd_progress *progress);

#endif
