// Weights in blocks as floats; block_products.cu multiplies with them as they lie.

// to [groups, rows, width] = the nearest bf16 numbers to blocks; groups that no row is multiplied with are left
// alone. A block of threads has a row of a group; `offsets` may be null. With `listed`, which names groups, `to` has
// these alone, and `blocks` are the addresses of all groups'.
KERNEL(256) blocks_to_bf16(const u8* blocks, bf16* to, const u32* offsets, u32 type, u32 rows, u32 width, u32 row_bytes,
                           const u32* listed) {
    u32 group = listed ? listed[blockIdx.y] : blockIdx.y;
    if (offsets && offsets[group] == offsets[group + 1]) return;
    u64 row = (u64)blockIdx.y * rows + blockIdx.x;
    const u8* from = listed ? ((const u8* const*)blocks)[group] + (u64)blockIdx.x * row_bytes : blocks + row * row_bytes;
    for (u32 k = threadIdx.x * 8; k < width; k += 256 * 8) {
        f32 w[8];
        decode_any(type, w, from, k);
        store_vector(to, 1, row * width + k, w);
    }
}

// y [rows, width] = the rows of a table in blocks that `ids` name.
KERNEL(256) gather_block_rows(const u32* ids, const u8* blocks, void* y, u32 y_bf16, u32 type, u32 width, u32 row_bytes) {
    for (u32 k = threadIdx.x * 8; k < width; k += 256 * 8) {
        f32 w[8];
        decode_any(type, w, blocks + (u64)ids[blockIdx.x] * row_bytes, k);
        store_vector(y, y_bf16, (u64)blockIdx.x * width + k, w);
    }
}
