/* bench/gpu_model.c - whole steps of a model of random weights on the GPU: time of a step from its
 * tables to its tokens. bench_gpu_model [small|8b] [bf16|fp16] [KERNELS]     one CSV row a case,
 * and how long the weights took to upload. KERNELS: of lean, mixed and even those to choose among
 * too. Decode at several batch sizes, contexts and numbers of variants, with
 * recorded steps and without, in turn; prefill of one prompt. Odd sequences sample (top_k 50, top_p
 * 0.9), even ones are greedy. Wall-clock medians; every step reads all weights, so nothing stays in
 * the cache between them. */
#include <stdio.h>

#include "../tests/gpu/gpu_model.h"
#include "backend/cuda/fast.h"

#define REPEATS 15

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Median microseconds of a step. */
static double time_us(gpu_model *m, const bd_step *step, int repeats) {
    bd_error err;
    double us[REPEATS];
    bd_token_result *results = calloc(step->logits_row_count + 1u, sizeof *results);
    for (int i = -2; i < repeats; i++) {
        const uint64_t from = bd_now_us();
        GPU_MODEL_TRY(gpu_model_step(m, step, results, &err));
        if (i >= 0) us[i] = (double)(bd_now_us() - from);
    }
    free(results);
    qsort(us, (size_t)repeats, sizeof *us, by_value);
    return us[repeats / 2];
}

int main(int argc, char **argv) {
    const bool large = argc > 1 && strcmp(argv[1], "8b") == 0,
               fp16 = argc > 2 && strcmp(argv[2], "fp16") == 0;
    gpu_shape s = large ? (gpu_shape){.hidden = 4096,
                                      .layers = 32,
                                      .heads = 32,
                                      .kv_heads = 8,
                                      .head_dim = 128,
                                      .ffn = 14336,
                                      .vocab = 128256,
                                      .variants = 14}
                        : (gpu_shape){.hidden = 1024,
                                      .layers = 8,
                                      .heads = 16,
                                      .kv_heads = 4,
                                      .head_dim = 64,
                                      .ffn = 2816,
                                      .vocab = 32000,
                                      .variants = 14};
    if (argc > 3)
        cuda_fast_choices = (cuda_choices){.lean = strstr(argv[3], "lean") != NULL,
                                           .mixed = strstr(argv[3], "mixed") != NULL,
                                           .even = strstr(argv[3], "even") != NULL};
    s.rows = 2048, s.seqs = 64, s.len = 8192, s.blocks = 64 * 2064 / GPU_MODEL_BLOCK + 64,
    s.dtype = fp16 ? BD_DTYPE_F16 : BD_DTYPE_BF16;
    uint64_t from = bd_now_us();
    gpu_model *m = gpu_model_open(s, false);
    fprintf(stderr, "opened in %.1f s\n", (double)(bd_now_us() - from) * 1e-6);
    static const uint32_t cases[][3] = {{1, 512, 0},   {1, 512, 1},   {8, 512, 0},   {8, 512, 8},
                                        {14, 512, 14}, {16, 512, 0},  {16, 512, 14}, {64, 512, 0},
                                        {64, 512, 14}, {64, 2047, 0}, {64, 2047, 14}};
    enum { CASES = sizeof cases / sizeof *cases };
    double launched[CASES], recorded[CASES];
    for (int pass = 0; pass < 2; pass++) {
        bd_error err;
        if (pass) {
            from = bd_now_us();
            GPU_MODEL_TRY(m->ops->record(m->backend, gpu_model_forward, m, &err));
            fprintf(stderr, "recorded in %.2f s\n", (double)(bd_now_us() - from) * 1e-6);
        }
        for (int i = 0; i < CASES; i++) {
            gpu_batch *b = gpu_batch_make(m, cases[i][0], 1, cases[i][1], cases[i][2]);
            (pass ? recorded : launched)[i] = time_us(m, &b->step, REPEATS);
            gpu_batch_free(b);
        }
    }
    printf("what,model,dtype,batch,context,variants,launched_us,recorded_us,tokens_per_s\n");
    for (int i = 0; i < CASES; i++)
        printf("decode,%s,%s,%u,%u,%u,%.0f,%.0f,%.0f\n", large ? "8b" : "small",
               fp16 ? "fp16" : "bf16", cases[i][0], cases[i][1] + 1, cases[i][2], launched[i],
               recorded[i], cases[i][0] * 1e6 / recorded[i]);
    static const uint32_t prompts[] = {128, 512, 2048};
    for (int i = 0; i < 3; i++)
        for (uint32_t variants = 0; variants < 2; variants++) {
            gpu_batch *b = gpu_batch_make(m, 1, prompts[i], 0, variants);
            const double us = time_us(m, &b->step, 7);
            printf("prefill,%s,%s,1,%u,%u,%.0f,,%.0f\n", large ? "8b" : "small",
                   fp16 ? "fp16" : "bf16", prompts[i], variants, us, prompts[i] * 1e6 / us);
            gpu_batch_free(b);
        }
    gpu_model_close(m);
    return 0;
}
