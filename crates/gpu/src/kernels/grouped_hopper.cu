// The products of grouped.cu that go to tensor cores, for Hopper (hopper_tiles.cuh): tiles of 128 x 256, four stages
// of 64 in depth.

typedef Tiling<256, 4> Wide;

// Which tiles there are of gradients of matrices.
struct DepthTiles {
    Depths depths;
    u32 groups;
    const void *a_map, *b_map;  // for tensor copies, or null
    // Which gain little by it (2% where an expert has 16,384 rows).
    NoPace pace;
    DEVICE_MEMBER u32 column_tiles() const { return (depths.columns + Wide::COLUMNS - 1) / Wide::COLUMNS; }
    DEVICE_MEMBER u32 row_tiles() const { return (depths.rows + TILE_ROWS - 1) / TILE_ROWS; }
    DEVICE_MEMBER u32 count() const { return groups * row_tiles() * column_tiles(); }
    DEVICE_MEMBER bool problem(u32 index, Problem& p) const {
        u32 row, column, of_group = row_tiles() * column_tiles(), group = index / of_group;
        tile_at(index % of_group, column_tiles(), row_tiles(), row, column);
        bool is_there = depths_problem(depths, group, row * TILE_ROWS, column * Wide::COLUMNS, TILE_ROWS, p);
        p.row += (u64)group * depths.rows;
        return is_there;
    }
    DEVICE_MEMBER void maps_are_there() const {
        if (a_map) map_is_there(a_map);
        if (b_map) map_is_there(b_map);
    }
    // None where the group's end is amid the rows that a box has.
    DEVICE_MEMBER Boxes boxes(const Problem& p, u32 k) const {
        bool is_whole = k + DEPTH <= p.depth;
        return {is_whole ? a_map : nullptr, is_whole ? b_map : nullptr, (u32)p.a.first + k, (u32)p.b.first + k, 0};
    }
    // The tile's first row of its group's.
    DEVICE_MEMBER u32 first_row(const Problem& p) const { return (u32)(p.row - (u64)p.group * depths.rows); }
};

// How deep the products of a tile are when what its epilogue reads is asked for.
DEVICE u32 ask_at(u32 depth) {
    const u32 STEPS_BEFORE = 12;
    u32 steps = (depth + DEPTH - 1) / DEPTH;
    return steps > STEPS_BEFORE ? (steps - STEPS_BEFORE) * DEPTH : 0;
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Tiles, typename Epilogue>
DEVICE void multiply_tiles(const Tiles& tiles, const Ring<Wide>& ring, unsigned char* shared, const Epilogue& epilogue, f32* parts) {
    // Of 64 rows of A, and 16 deep.
    const u32 A_BLOCK = A_MAJOR ? 16 : DEPTH * 128, B_BLOCK = B_MAJOR ? 16 : DEPTH * 128;
    const u32 A_GROUP = DEPTH * 128, A_STEP = A_MAJOR ? 32 : 16 * 128, B_STEP = B_MAJOR ? 32 : 16 * 128;
    u32 warp = threadIdx.x / 32 - COPIERS / 32, count = 0;
    f32* own = (f32*)(shared + Wide::OWN_AT + warp * OWN_BUFFERS_BYTES);
    for (u32 index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
        Problem p;
        if (!tiles.problem(index, p)) {
            tiles.pace.pass(ring.own_epochs(), 1);
            continue;
        }
        f32 sums[128] = {};
        // Zeros before the first fence, not behind it.
        wgmma_sums_are_there(sums);
        for (u32 k = 0; k < p.depth; k += DEPTH) {
            tiles.pace.keep(ring.own_epochs(), k);
            // Asked for earlier, it would have left the cache again.
            if (k == ask_at(p.depth)) ask_ahead(p, epilogue, warp * 16, 16, Wide::COLUMNS);
            const unsigned char* a = shared + count % Wide::STAGES * Wide::STAGE_BYTES + warp / 4 * A_GROUP;
            const unsigned char* b = shared + count % Wide::STAGES * Wide::STAGE_BYTES + A_BYTES;
            ring.wait_full(count);
            wgmma_begin();
#pragma unroll
            for (u32 i = 0; i < DEPTH / 16; i++)
                wgmma<A_MAJOR, B_MAJOR>(sums, descriptor(a + i * A_STEP, 1024, A_BLOCK), descriptor(b + i * B_STEP, 1024, B_BLOCK));
            wgmma_commit();
            // The products of the stage before are over, those of this one go on.
            if (k > 0) {
                wgmma_wait<1>();
                ring.release(count - 1);
            }
            count++;
        }
        typename Epilogue::Ahead ahead[Own<IS_PAIRED>::HELD] = {};
        look_ahead<IS_PAIRED>(p, epilogue, warp * 16, p.column, ahead);
        wgmma_wait<0>();
        wgmma_sums_are_there(sums);
        if (p.depth > 0) ring.release(count - 1);
        finish<IS_PAIRED>(p, epilogue, sums, parts, tiles.column_tiles(), own, ahead);
    }
    tiles.pace.end(ring.own_epochs(), tiles.count());
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Tiles, typename Epilogue>
DEVICE void products(const Tiles& tiles, const Epilogue& epilogue, f32* parts) {
    // What pulls gradients back has more in hand.
    typedef Registers<Epilogue::HAS_PARTS ? 88 : 104> Shares;
    by_groups_of_warps<Wide, Shares, A_MAJOR, B_MAJOR, IS_PAIRED>(tiles, [&](const Ring<Wide>& ring, unsigned char* shared) {
        multiply_tiles<A_MAJOR, B_MAJOR, IS_PAIRED>(tiles, ring, shared, epilogue, parts);
    });
}

// ---- kernels: as those of the same names in grouped.cu; one dimension of blocks, any number ----

HOPPER_KERNEL(384) hopper_rows_nt(ROWS, STORE, ROW_LIST) {
    products<true, true, false>(ROW_TILES(Wide::COLUMNS), THE_STORE, nullptr);
}
HOPPER_KERNEL(384) hopper_rows_nn(ROWS, STORE, ROW_LIST) {
    products<true, false, false>(ROW_TILES(Wide::COLUMNS), THE_STORE, nullptr);
}
HOPPER_KERNEL(384) hopper_up_paired(ROWS, ACTIVATE, ROW_LIST) {
    products<true, true, true>(ROW_TILES(Wide::COLUMNS / 2), THE_ACTIVATE, nullptr);
}
HOPPER_KERNEL(384) hopper_up_single(ROWS, ACTIVATE, ROW_LIST) {
    products<true, true, false>(ROW_TILES(Wide::COLUMNS), THE_ACTIVATE, nullptr);
}
HOPPER_KERNEL(384) hopper_pull_back_rows(ROWS, PULL_BACK, ROW_LIST) {
    products<true, false, false>(ROW_TILES(Wide::COLUMNS), THE_PULL_BACK, parts);
}
HOPPER_KERNEL(384) hopper_wgrad_tn(DEPTHS, u32 groups, const void* a_map, const void* b_map) {
    Store store = {to, add ? to : nullptr, to_bf16, columns, to_bf16};
    products<false, false, false>(DepthTiles{THE_DEPTHS, groups, a_map, b_map}, store, nullptr);
}
