// Products of rows in eight-bit floats on Hopper (hopper_tiles.cuh): A B_g^T of bytes (E4M3) along the depth, with a
// scale for each 128 of them, of a row of A and of 128 rows of B (DeepSeek-V3, 2412.19437, section 3.3). Tensor cores
// add up 128 in depth, of which their sums keep few bits; with the scales what they give is added up outside of them
// (section 3.3.2). Tiles are of 128 x 128 for that: a thread has as many sums twice.
//
// Operands are copied as numbers of 16 bits: strides and depths that the host gives are of pairs of bytes.

typedef Tiling<128, 6> Narrow;

// Of row `i` of A and the 128 from 128 k on: a[i * depths + k]; of rows of group g's matrix from 128 j on: b[(g *
// blocks + j) * depths + k].
struct Scales {
    const f32 *a, *b;
    u32 blocks, depths;
};

// The scales of one step: of this thread's two rows, and of first columns of pairs and second ones (or of all
// columns).
template <bool IS_PAIRED> struct StepScales {
    f32 rows[2], columns[IS_PAIRED ? 2 : 1];
    DEVICE_MEMBER f32 of(u32 sum) const {
        const u32 HALF = 32;
        return rows[sum / 2 % 2] * columns[IS_PAIRED ? sum / HALF : 0];
    }
};

// Where they begin for a tile.
template <bool IS_PAIRED> struct TileScales {
    const f32 *rows[2], *columns[IS_PAIRED ? 2 : 1];
    DEVICE_MEMBER void begin(const Problem& p, const Scales& scales) {
        u32 first = (threadIdx.x - COPIERS) / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            u64 row = p.a.first + min(first + 8 * h, p.rows - 1);
            rows[h] = scales.a + (p.a.gather ? (u64)p.a.gather[row] : row) * scales.depths;
        }
        const f32* group = scales.b + (u64)p.group * scales.blocks * scales.depths;
        columns[0] = group + (u64)(p.column / 128) * scales.depths;
        if constexpr (IS_PAIRED) columns[1] = group + (p.column + p.pair) / 128 * scales.depths;
    }
    DEVICE_MEMBER StepScales<IS_PAIRED> at(u32 step) const {
        StepScales<IS_PAIRED> scales;
        scales.rows[0] = rows[0][step];
        scales.rows[1] = rows[1][step];
        scales.columns[0] = columns[0][step];
        if constexpr (IS_PAIRED) scales.columns[1] = columns[1][step];
        return scales;
    }
};

template <bool IS_PAIRED, typename Epilogue>
DEVICE void multiply_tiles(const RowTiles& tiles, const Scales& scales, const Ring<Narrow>& ring, unsigned char* shared,
                           const Epilogue& epilogue, f32* parts) {
    const u32 A_GROUP = 64 * 128;
    u32 warp = threadIdx.x / 32 - COPIERS / 32, count = 0;
    f32* own = (f32*)(shared + Narrow::OWN_AT + warp * OWN_BUFFERS_BYTES);
    for (u32 index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
        Problem p;
        if (!tiles.problem(index, p)) {
            tiles.pace.pass(ring.own_epochs(), 1);
            continue;
        }
        TileScales<IS_PAIRED> of_tile;
        of_tile.begin(p, scales);
        StepScales<IS_PAIRED> step = of_tile.at(0);
        f32 sums[64] = {}, products[64] = {};
        ask_ahead(p, epilogue, warp * 16, 16, Narrow::COLUMNS);
        for (u32 k = 0; k < scales.depths; k++) {
            tiles.pace.keep(ring.own_epochs(), k * DEPTH);
            const unsigned char* a = shared + count % Narrow::STAGES * Narrow::STAGE_BYTES + warp / 4 * A_GROUP;
            const unsigned char* b = shared + count % Narrow::STAGES * Narrow::STAGE_BYTES + A_BYTES;
            ring.wait_full(count);
            // What was read of the last step's products was read before the fence.
            wgmma_sums_are_there(products);
            wgmma_begin();
            wgmma_e4m3<false>(products, descriptor(a, 1024, 16), descriptor(b, 1024, 16));
#pragma unroll
            for (u32 i = 1; i < 4; i++) wgmma_e4m3<true>(products, descriptor(a + i * 32, 1024, 16), descriptor(b + i * 32, 1024, 16));
            wgmma_commit();
            // The next step's are on their way meanwhile; the other group's products go on while these are added up.
            StepScales<IS_PAIRED> next = of_tile.at(min(k + 1, scales.depths - 1));
            wgmma_wait<0>();
            wgmma_sums_are_there(products);
            ring.release(count);
#pragma unroll
            for (u32 i = 0; i < 64; i++) sums[i] = fmaf(products[i], step.of(i), sums[i]);
            step = next;
            count++;
        }
        typename Epilogue::Ahead ahead[Own<IS_PAIRED>::HELD] = {};
        look_ahead<IS_PAIRED>(p, epilogue, warp * 16, p.column, ahead);
        finish<IS_PAIRED>(p, epilogue, sums, parts, tiles.column_tiles(), own, ahead);
    }
    tiles.pace.end(ring.own_epochs(), tiles.count());
}

template <bool IS_PAIRED, typename Epilogue>
DEVICE void products(const RowTiles& tiles, const Scales& scales, const Epilogue& epilogue, f32* parts) {
    by_groups_of_warps<Narrow, Registers<104>, true, true, IS_PAIRED>(tiles, [&](const Ring<Narrow>& ring, unsigned char* shared) {
        multiply_tiles<IS_PAIRED>(tiles, scales, ring, shared, epilogue, parts);
    });
}

// ---- kernels: as those of the same names in grouped.cu; one dimension of blocks, any number ----

#define SCALES const f32 *a_scales, const f32 *b_scales
#define THE_SCALES Scales{a_scales, b_scales, (group_rows + 127) / 128, (depth + DEPTH - 1) / DEPTH}

HOPPER_KERNEL(384) fp8_rows_nt(ROWS, STORE, ROW_LIST, SCALES) {
    products<false>(ROW_TILES(Narrow::COLUMNS), THE_SCALES, THE_STORE, nullptr);
}
HOPPER_KERNEL(384) fp8_up_paired(ROWS, ACTIVATE, ROW_LIST, SCALES) {
    products<true>(ROW_TILES(Narrow::COLUMNS / 2), THE_SCALES, THE_ACTIVATE, nullptr);
}
HOPPER_KERNEL(384) fp8_up_single(ROWS, ACTIVATE, ROW_LIST, SCALES) {
    products<false>(ROW_TILES(Narrow::COLUMNS), THE_SCALES, THE_ACTIVATE, nullptr);
}
HOPPER_KERNEL(384) fp8_pull_back_rows(ROWS, PULL_BACK, ROW_LIST, SCALES) {
    products<false>(ROW_TILES(Narrow::COLUMNS), THE_SCALES, THE_PULL_BACK, parts);
}
