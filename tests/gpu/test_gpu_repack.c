/* test_gpu_repack.c - a sign plane put on the card in rectangles, as shards cut by columns come, is the plane put at
 * once, whatever the page held before. */
#include "gpu_test.h"

static void put(uint8_t *dst, const uint8_t *bits, uint32_t k, k_plane_part part) {
    const size_t bytes = part.col_count / 8;
    uint8_t *packed = malloc(bytes * part.row_count + 1);
    for (uint32_t i = 0; i < part.row_count; i++)
        memcpy(packed + i * bytes, bits + (size_t)(part.first_row + i) * (k / 8) + part.first_col / 8, bytes);
    void *device = NULL;
    CUDA_OK(cudaMalloc(&device, bytes * part.row_count + 1));
    CUDA_OK(cudaMemcpy(device, packed, bytes * part.row_count, cudaMemcpyHostToDevice));
    CUDA_OK(k_repack_part(dst, device, k, &part, NULL));
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaFree(device));
    free(packed);
}

static void read_back(uint8_t *out, const uint8_t *device, size_t bytes) {
    CUDA_OK(cudaMemcpy(out, device, bytes, cudaMemcpyDeviceToHost));
}

static void test_parts_make_the_plane(void **state) {
    (void)state;
    for (int round = 0; round < 40; round++) {
        const uint32_t n = 1 + (uint32_t)(test_next() % 300), parts = 1 + (uint32_t)(test_next() % 8);
        const uint32_t k = 8 * parts * (1 + (uint32_t)(test_next() % 32)) + (uint32_t)(test_next() % 8) * 8;
        const size_t bytes = k_sign_bytes(n, k);
        uint8_t *bits = malloc((size_t)n * k / 8), *whole = malloc(bytes), *pieces = malloc(bytes);
        void *device = NULL;
        CUDA_OK(cudaMalloc(&device, bytes));
        for (size_t i = 0; i < (size_t)n * k / 8; i++) bits[i] = (uint8_t)test_next();
        CUDA_OK(cudaMemset(device, 0x5a, bytes));
        put(device, bits, k, (k_plane_part){0, n, 0, k});
        read_back(whole, device, bytes);
        CUDA_OK(cudaMemset(device, 0x5a, bytes));
        for (uint32_t p = parts; p-- > 0;) { /* seams at any multiple of 8: parts share the layout's words */
            const uint32_t each = k / 8 / parts * 8, first = p * each, cut = (uint32_t)(test_next() % (n + 1));
            const uint32_t count = p + 1 == parts ? k - first : each;
            put(device, bits, k, (k_plane_part){cut, n - cut, first, count});
            put(device, bits, k, (k_plane_part){0, cut, first, count});
        }
        read_back(pieces, device, bytes);
        assert_memory_equal(whole, pieces, bytes);
        CUDA_OK(cudaFree(device));
        free(bits);
        free(whole);
        free(pieces);
    }
    const k_plane_part odd = {0, 1, 4, 64}, short_part = {0, 1, 0, 76};
    assert_int_equal(k_repack_part(NULL, NULL, 256, &odd, NULL), cudaErrorInvalidValue);
    assert_int_equal(k_repack_part(NULL, NULL, 256, &short_part, NULL), cudaErrorInvalidValue);
}

int main(int argc, char **argv) {
    gpu_test_begin(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_parts_make_the_plane)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
