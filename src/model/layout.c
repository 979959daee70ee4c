/* layout.c - see layout.h. */
#include "layout.h"

#include "bitdelta/model/overlay.h"
#include "names.h"

enum { PART_ALIGN = 64, BLOCK_ROWS_STEP = 128, BLOCK_ROWS_MIN = 8 };

static uint64_t round_up(uint64_t bytes, uint64_t step) {
    return (bytes + step - 1) / step * step;
}

/* The place of a part of `bytes` at the end of what is placed so far. */
static uint64_t place(uint64_t *used, uint64_t bytes) {
    const uint64_t at = *used;
    *used = round_up(at + bytes, PART_ALIGN);
    return at;
}

/* As many rows as fit into a page with their scales. */
static uint32_t rows_that_fit(uint64_t page_bytes, const bd_model_config *config,
                              const bd_backend_ops *ops) {
    uint32_t low = BLOCK_ROWS_MIN, high = config->vocab;
    while (low < high) {
        const uint32_t middle = high - (high - low) / 2;
        const uint64_t bytes =
            round_up(ops->plane_bytes(middle, config->hidden), PART_ALIGN) + 4 * (uint64_t)middle;
        if (bytes <= page_bytes) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    if (low < config->vocab && low > BLOCK_ROWS_STEP) low -= low % BLOCK_ROWS_STEP;
    return low;
}

void bd_layout_init(bd_layout *layout, const bd_model_config *config, const bd_backend_ops *ops) {
    uint64_t used = 0;
    uint32_t rows, cols;
    *layout = (bd_layout){0};
    bd_weight_id id = {.kind = BD_WEIGHT_LINEAR};
    for (id.which = 0; id.which < BD_LINEAR_COUNT; id.which++) {
        BD_ASSERT(bd_weight_shape(config, id, &rows, &cols));
        layout->bits[id.which] = place(&used, ops->plane_bytes(rows, cols));
    }
    for (id.which = 0; id.which < BD_LINEAR_COUNT; id.which++) {
        BD_ASSERT(bd_weight_shape(config, id, &rows, &cols));
        layout->scales[id.which] = place(&used, 4 * (uint64_t)rows);
    }
    id.kind = BD_WEIGHT_NORM;
    for (id.which = 0; id.which < BD_NORM_COUNT; id.which++) {
        if (bd_weight_shape(config, id, &rows, &cols))
            layout->norms[id.which] = place(&used, 4 * (uint64_t)rows);
    }
    id.kind = BD_WEIGHT_BIAS;
    for (id.which = 0; id.which < BD_LINEAR_COUNT; id.which++) {
        if (bd_weight_shape(config, id, &rows, &cols))
            layout->biases[id.which] = place(&used, 4 * (uint64_t)rows);
    }
    layout->final_norm = place(&used, 4 * (uint64_t)config->hidden);
    layout->page_bytes = round_up(used, ops->page_align_bytes);
    layout->block_rows = rows_that_fit(layout->page_bytes, config, ops);
    layout->block_count = (config->vocab + layout->block_rows - 1) / layout->block_rows;
    layout->block_scales =
        round_up(ops->plane_bytes(layout->block_rows, config->hidden), PART_ALIGN);
    layout->whole_rows = (uint32_t)(layout->page_bytes / (2 * (uint64_t)config->hidden));
    BD_ASSERT(layout->whole_rows > 0 &&
              layout->block_scales + 4 * (uint64_t)layout->block_rows <= layout->page_bytes);
}

uint32_t bd_layout_block_rows(const bd_layout *layout, const bd_model_config *config,
                              uint32_t index) {
    const uint32_t left = config->vocab - index * layout->block_rows;
    return left < layout->block_rows ? left : layout->block_rows;
}

uint32_t bd_layout_whole_pages(const bd_layout *layout, uint64_t rows) {
    return (uint32_t)((rows + layout->whole_rows - 1) / layout->whole_rows);
}

uint64_t bd_overlay_page_bytes(const bd_model_config *config, const bd_backend_ops *ops) {
    bd_layout layout;
    bd_layout_init(&layout, config, ops);
    return layout.page_bytes;
}

uint32_t bd_overlay_pages_per_variant(const bd_model_config *config, const bd_backend_ops *ops,
                                      uint32_t planes, bool with_embeddings) {
    bd_layout layout;
    bd_layout_init(&layout, config, ops);
    const uint32_t blocks = with_embeddings ? layout.block_count * (config->tied ? 1 : 2) : 0;
    return planes * (config->layers + blocks);
}

uint32_t bd_overlay_extra_pages(const bd_model_config *config, const bd_backend_ops *ops,
                                uint32_t rows) {
    bd_layout layout;
    bd_layout_init(&layout, config, ops);
    return bd_layout_whole_pages(&layout, rows);
}

uint32_t bd_layout_table_pages(const bd_layout *layout, const bd_model_config *config,
                               const bd_delta *delta, const bd_delta_entry *entry,
                               uint32_t *extra_at) {
    const uint32_t own = entry->kind == BD_DELTA_FULL ? bd_layout_whole_pages(layout, config->vocab)
                                                      : layout->block_count * delta->bits;
    if (extra_at) *extra_at = own;
    return own + bd_layout_whole_pages(layout, entry->extra_rows);
}

uint32_t bd_overlay_pages_of(const bd_model_config *config, const bd_backend_ops *ops,
                             const bd_delta *delta) {
    bd_layout layout;
    bd_layout_init(&layout, config, ops);
    uint32_t pages = config->layers * delta->bits;
    for (uint32_t i = 0; i < delta->entry_count; i++) {
        const bd_delta_entry *entry = &delta->entries[i];
        bd_weight_id id;
        if (bd_table_parse(entry->name, &id)) {
            pages += bd_layout_table_pages(&layout, config, delta, entry, NULL);
        }
    }
    return pages;
}
