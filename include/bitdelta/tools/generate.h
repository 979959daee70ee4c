/* generate.h - `bitdelta generate`: one prompt through one model, without a server.
 * Threads: the main thread only (a CPU backend has its own workers). */
#ifndef BITDELTA_TOOLS_GENERATE_H
#define BITDELTA_TOOLS_GENERATE_H

#include "bitdelta/backend/backend.h"

typedef struct bd_generate_request { /* strings are borrowed; NULL or 0: not given */
    const char *base_dir;
    /* At most one: a delta over the base; another checkpoint in its place (its config must fit the
     * base's); a PEFT LoRA adapter over the base. */
    const char *delta_dir, *finetuned_dir, *lora_dir;
    const char *prompt;        /* needs tokenizer.json (the variant's, else the base's) */
    const int32_t *prompt_ids; /* exactly one of the two */
    size_t prompt_id_count;
    uint32_t max_tokens;      /* 0: the prompt is run and nothing is generated */
    bool greedy;              /* temperature 0 whatever `temperature` says */
    float temperature, top_p; /* top_p 0: 1 */
    uint64_t seed;
    bool ignore_eos;
    bool json;
    const char *dump_logits; /* .npy, float32 [rows, vocab], a row per id fed in */
    uint32_t chunk_tokens;   /* prompt tokens per step; 0: 256 */
    uint32_t thread_count;   /* CPU workers; 0: all cores */
    uint32_t device_index;
    uint32_t rank_count; /* 0: 1 */
    bd_backend_choice backend;
    bd_dtype dtype; /* BD_DTYPE_OTHER: the backend's own */
    bd_kernels kernels;
} bd_generate_request;

/* Runs the request; text or JSON goes to stdout, progress to stderr, the error into err for the
 * caller to print. Generation ends after an end-of-sequence id, which is the last of the ids, or
 * after max_tokens. Returns the process's exit status: 0, 1 (input or environment), 2 (wrong
 * usage), 3 (internal fault). */
int bd_generate_main(const bd_generate_request *request, bd_error *err);

#endif
