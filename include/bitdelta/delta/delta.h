/* delta.h - the delta format on disk, "bitdelta-1": delta.json plus safetensors shards.
 * Layout, order and rounding: architecture.md "The delta on disk". A matrix in full (--embeddings
 * full) and added rows of the vocabulary are BF16. Where base and variant differ in tying, the
 * tensors decide: a variant with a head of its own over a tied base has an entry lm_head.weight,
 * coded against the base's embedding as its reference; a tied variant of an untied base has one
 * too, its embedding coded against the base's head. A variant with fewer rows than the base is
 * coded as if the missing ones were the base's (scale 0; zeros where in full) and masked by its
 * vocab_size. Owner: the caller; immutable once open. */
#ifndef BITDELTA_DELTA_DELTA_H
#define BITDELTA_DELTA_DELTA_H

#include "bitdelta/hf/safetensors.h"

#define BD_DELTA_FORMAT      "bitdelta-1"
#define BD_DELTA_CHUNK_BYTES (4u << 20)
#define BD_DELTA_SHARDS_MAX  64
#define BD_PLANES_MAX        4
#define BD_VARIANT_NAME_MAX  128 /* bytes; see bd_variant_name_fault */

typedef enum bd_delta_kind { BD_DELTA_SIGN, BD_DELTA_FULL } bd_delta_kind;

typedef struct bd_delta_entry { /* one tensor of the model that the variant changes */
    const char *name;           /* canonical, e.g. model.layers.0.self_attn.q_proj.weight */
    bd_delta_kind kind;
    uint32_t rank;
    uint64_t shape[BD_TENSOR_RANK_MAX]; /* of the base's weight, not of the packed bits */
    uint64_t extra_rows; /* rows beyond the base's vocabulary, in <name>.extra BF16; usually 0 */
} bd_delta_entry;

typedef struct bd_delta_file {
    const char *name;
    uint64_t bytes;
    char sha256[65];
    uint64_t chunk_bytes; /* 0: no chunk sums, the file is verified whole */
    uint32_t chunk_count;
    const uint64_t *chunk_xxh3; /* XXH3-64, seed 0 */
} bd_delta_file;

typedef struct bd_delta { /* delta.json, checked */
    char dir[1024];
    char variant[BD_VARIANT_NAME_MAX + 1], base[BD_VARIANT_NAME_MAX + 1];
    char base_fingerprint[65];
    char embeddings[8]; /* sign | full | base */
    char scale[8];      /* row | matrix */
    uint32_t bits;      /* planes */
    uint32_t shard_count;
    uint32_t entry_count;
    const bd_delta_entry *entries; /* in data order */
    const bd_delta_file *files;    /* [shard_count] */
    uint8_t digest[32]; /* SHA-256 over delta.json's bytes: the variant's content identity */
    void *storage;      /* owned */
} bd_delta;

/* What keeps a name from being given or served ("has a quote"), or NULL: control characters,
 * quotes, backslashes, spaces at the ends, parts ".." and what is no UTF-8 are refused, because
 * names stand in JSON, URLs, logs, metrics and shell commands. '/' inside is fine ("org/model").
 * delta.json is read whatever name it has: it can be served under another. */
const char *bd_variant_name_fault(const char *name);

/* Whether an entry of a directory of deltas is looked at: what is hidden or was left by a killed
 * compress is not. */
bool bd_delta_is_entry(const char *entry);
/* BD_E_ARGUMENT: `dir`, where directories of deltas should be, is a delta itself. */
BD_MUST_CHECK bd_status bd_delta_check_parent(const char *dir, bd_error *err);
/* The directory that entry is, in `path` ("" if it has no room). BD_OK: it holds a delta.json;
 * BD_E_NOT_FOUND: it is no variant. Any other fault is for people: a variant that cannot be reached
 * is not silently left out. */
BD_MUST_CHECK bd_status bd_delta_find(const char *dir, const char *entry, char *path,
                                      size_t path_bytes, bd_error *err);

/* Reads and checks delta.json alone: cheap enough for 10,000 variants at start. Names in `files`
 * may not contain '/'. */
BD_MUST_CHECK bd_status bd_delta_open(const char *dir, bd_delta *out, bd_error *err);
void bd_delta_close(bd_delta *delta);

/* Opens shard `index` header-only and checks it against the entries: every entry has its .sign and
 * .scale (or its full tensor) with the right shape, nothing else is inside, the file has the
 * recorded size. */
BD_MUST_CHECK bd_status bd_delta_open_shard(const bd_delta *delta, uint32_t index, bool map_data,
                                            bd_safetensors **out, bd_error *err);

/* Whole-file check of one shard: size, every chunk's xxh3, sha256. Names file, chunk number and
 * byte range. */
BD_MUST_CHECK bd_status bd_delta_verify_shard(const bd_delta *delta, uint32_t index, bd_error *err);
BD_MUST_CHECK bd_status bd_delta_check_chunk(const bd_delta *delta, uint32_t file_index,
                                             uint32_t chunk, const void *data, size_t bytes,
                                             bd_error *err);

/* The same of one chunk after the other, while their bytes come in pieces of any size. */
typedef struct bd_chunk_sum {
    const bd_delta *delta;
    uint32_t file_index, chunk;
    uint64_t left_bytes; /* of the chunk */
    _Alignas(64) unsigned char state[576];
} bd_chunk_sum;
void bd_chunk_sum_begin(bd_chunk_sum *sum, const bd_delta *delta, uint32_t file_index,
                        uint32_t chunk);
/* Fails with the first chunk that is another than recorded, once its last byte is there. */
BD_MUST_CHECK bd_status bd_chunk_sum_add(bd_chunk_sum *sum, const void *data, size_t bytes,
                                         bd_error *err);

/* What shard `index` of `shards` holds of a matrix. q, k, v, gate, up and the two tables of the
 * vocabulary are cut by rows, o and down by columns, everything else (vectors, scales of o and
 * down, added rows) is whole in every shard. */
typedef struct bd_delta_part {
    uint64_t first_row, rows, first_col, cols;
    bool repeated; /* an earlier shard holds the same: kv heads where there are fewer of them than
                      shards */
} bd_delta_part;

/* kv_parts: how many different parts k and v have, which is min(shards, kv heads). False: the
 * matrix cannot be cut like this. */
bool bd_delta_part_of(const char *name, const uint64_t shape[2], uint32_t index, uint32_t shards,
                      uint64_t kv_parts, bd_delta_part *out);
/* The embedding or the head. */
bool bd_delta_is_table(const char *name);

/* Plane names: <name>.sign, <name>.scale, <name>.sign1, <name>.scale1, ... into out. */
void bd_delta_plane_name(char *out, size_t out_bytes, const char *name, bool sign, uint32_t plane);

/* "shard-00-of-01.safetensors" */
void bd_delta_file_name(char *out, size_t out_bytes, uint32_t index, uint32_t shard_count);

/* Size, sha256 and chunk sums of a finished file, for the manifest. *chunks is malloc'ed and
 * borrowed by out. */
BD_MUST_CHECK bd_status bd_delta_hash_file(const char *path, bd_delta_file *out, uint64_t **chunks,
                                           bd_error *err);

/* What a writer must know to write delta.json; files are hashed by the writer. */
BD_MUST_CHECK bd_status bd_delta_write_manifest(const bd_delta *delta, bd_error *err);

/* The codec. cols is a multiple of 8. One plane of one row: bit j of byte b says values[8b + j] >=
 * 0; returns the float64 sum of |values|, which is NaN or infinite if and only if a value is. */
double bd_delta_pack_row(const float *values, uint64_t cols, uint8_t *bits);
/* One row, one plane: sign bits and scale of delta = tuned - base. */
float bd_delta_encode_row(const float *base, const float *tuned, uint64_t cols, uint8_t *bits);

#endif
