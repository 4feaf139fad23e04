// The products of grouped.cu that go to tensor cores, for Hopper (sm_90a).
//
// A block stays for many tiles of 128 x 256. Its first four warps copy what is multiplied into a ring of four stages, each 64 deep,
// and run ahead into the next tile; the other two groups of four multiply 64 rows each straight from there (`wgmma`), and hand
// the sums to the epilogue by way of shared memory, so that it has eight neighbouring columns at a time. Copies are asynchronous
// ones of 16 bytes and not tensor copies (TMA), which cannot gather rows.

const u32 TILE_ROWS = 128, TILE_COLUMNS = 256, DEPTH = 64, STAGES = 4;
const u32 COPIERS = 128, MULTIPLYING_WARPS = 8;
const u32 A_BYTES = TILE_ROWS * DEPTH * 2, STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * DEPTH * 2;
const u32 OWN_AT = STAGES * STAGE_BYTES, BARRIERS_AT = OWN_AT + MULTIPLYING_WARPS * OWN_BYTES;
// A stage is said to be full when as many more copies are under way. The products of a stage end one stage later, so of four
// stages two may be waited for here.
const u32 LAG = 2;

struct Ring {
    u64 *full, *empty;
    DEVICE_MEMBER void wait_full(u32 count) const { phase_wait(full + count % STAGES, count / STAGES & 1); }
    DEVICE_MEMBER void wait_empty(u32 count) const { phase_wait(empty + count % STAGES, (count / STAGES & 1) ^ 1); }
    // By one lane of each warp that multiplies, when the products of this stage are over.
    DEVICE_MEMBER void release(u32 count) const {
        if (threadIdx.x % 32 == 0) phase_arrive(empty + count % STAGES);
    }
};

// Which tiles there are, and what each is; `problem` is false where nothing is to be done.
struct RowTiles {
    Rows rows;
    u32 row_tiles, width;  // of the list; columns of a tile
    DEVICE_MEMBER u32 column_tiles() const { return (rows.columns + width - 1) / width; }
    DEVICE_MEMBER u32 count() const { return row_tiles * column_tiles(); }
    DEVICE_MEMBER bool problem(u32 index, Problem& p) const {
        u32 row, column;
        tile_at(index, column_tiles(), row_tiles, row, column);
        p = rows_problem(rows, row, column * width);
        return p.rows > 0;
    }
    DEVICE_MEMBER u32 first_row(const Problem&) const { return 0; }
};

struct DepthTiles {
    Depths depths;
    u32 groups;
    DEVICE_MEMBER u32 column_tiles() const { return (depths.columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }
    DEVICE_MEMBER u32 row_tiles() const { return (depths.rows + TILE_ROWS - 1) / TILE_ROWS; }
    DEVICE_MEMBER u32 count() const { return groups * row_tiles() * column_tiles(); }
    DEVICE_MEMBER bool problem(u32 index, Problem& p) const {
        u32 row, column, of_group = row_tiles() * column_tiles(), group = index / of_group;
        tile_at(index % of_group, column_tiles(), row_tiles(), row, column);
        bool is_there = depths_problem(depths, group, row * TILE_ROWS, column * TILE_COLUMNS, TILE_ROWS, p);
        p.row += (u64)group * depths.rows;
        return is_there;
    }
    // The tile's first row of its group's.
    DEVICE_MEMBER u32 first_row(const Problem& p) const { return (u32)(p.row - (u64)p.group * depths.rows); }
};

// ---- copying ----

// Where chunk `c` of a line of 128 bytes lies.
DEVICE u32 in_line(u32 line, u32 c) { return line * 128 + (c ^ (line & 7)) * 16; }

// A stage of an operand whose rows lie along the depth: each 16th of 16 N from this thread's on. `row_at` says where in the operand.
template <u32 N, typename RowAt>
DEVICE void copy_rows(unsigned char* to, const Operand& o, RowAt row_at, u32 edge, u32 k, u32 depth) {
    u32 chunk = threadIdx.x % 8, first = threadIdx.x / 8;
    bool is_inside = k + chunk * 8 < depth;
    const bf16* from = (const bf16*)o.data + k + chunk * 8;
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        u32 row = first + 16 * i;
        copy_async(to + in_line(row, chunk), from + (u64)row_at(i) * o.stride, is_inside && row < edge);
    }
}

// The rows that a lane knows of the 64 from depth `k` on: its own, and that of 32 on.
DEVICE void name_depths(u32 (&rows)[2], const Operand& o, u32 k, u32 depth) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 at = k + half * 32 + threadIdx.x % 32;
        rows[half] = at >= depth ? 0 : o.gather ? o.gather[o.first + at] : (u32)o.first + at;
    }
}

// A stage of an operand whose rows lie across the depth: WIDTH columns from `first` on, in blocks of 64.
template <u32 WIDTH>
DEVICE void copy_depths(unsigned char* to, const Operand& o, const u32 (&rows)[2], u32 first, u32 edge, u32 k, u32 depth) {
    const u32 CHUNKS = WIDTH / 8, AT_ONCE = COPIERS / CHUNKS;
    u32 chunk = threadIdx.x % CHUNKS;
    const bf16* from = (const bf16*)o.data + first + chunk * 8;
#pragma unroll
    for (u32 i = 0; i < DEPTH / AT_ONCE; i++) {
        u32 line = threadIdx.x / CHUNKS + AT_ONCE * i;
        u32 row = from_lane(rows[i * AT_ONCE / 32], (int)(line % 32));
        bool is_there = k + line < depth && chunk * 8 < edge;
        copy_async(to + chunk / 8 * (DEPTH * 128) + in_line(line, chunk % 8), from + (u64)row * o.stride, is_there);
    }
}

// The rows of this thread's copies of A or of a step of either; those of B along the depth follow one another.
template <bool A_MAJOR, bool B_MAJOR> struct Named {
    u32 a[A_MAJOR ? 8 : 2], b[B_MAJOR ? 1 : 2];

    DEVICE_MEMBER void begin(const Problem& p) {
        if constexpr (A_MAJOR)
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 row = threadIdx.x / 8 + 16 * i;
                a[i] = row >= p.rows ? 0 : p.a.gather ? p.a.gather[p.a.first + row] : (u32)p.a.first + row;
            }
        if constexpr (B_MAJOR) b[0] = (u32)p.b.first + p.column + threadIdx.x / 8;
        step(p, 0);
    }
    DEVICE_MEMBER void step(const Problem& p, u32 k) {
        if constexpr (!A_MAJOR) name_depths(a, p.a, k, p.depth);
        if constexpr (!B_MAJOR) name_depths(b, p.b, k, p.depth);
    }
};

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED>
DEVICE void copy_stage(unsigned char* to, const Problem& p, const Named<A_MAJOR, B_MAJOR>& named, u32 first_row, u32 k) {
    u32 edge = p.columns - p.column, pair = (u32)p.pair;
    unsigned char* b = to + A_BYTES;
    if constexpr (A_MAJOR) copy_rows<8>(to, p.a, [&](u32 i) { return named.a[i]; }, p.rows, k, p.depth);
    else copy_depths<TILE_ROWS>(to, p.a, named.a, first_row, p.rows, k, p.depth);
    if constexpr (IS_PAIRED) {
        // The rows of all first columns of pairs, then those of their second ones.
        copy_rows<8>(b, p.b, [&](u32 i) { return named.b[0] + 16 * i; }, edge, k, p.depth);
        copy_rows<8>(b + TILE_COLUMNS / 2 * 128, p.b, [&](u32 i) { return named.b[0] + pair + 16 * i; }, edge, k, p.depth);
    } else if constexpr (B_MAJOR) copy_rows<16>(b, p.b, [&](u32 i) { return named.b[0] + 16 * i; }, edge, k, p.depth);
    else copy_depths<TILE_COLUMNS>(b, p.b, named.b, p.column, edge, k, p.depth);
}

// Says that the stage is full whose copies this thread has waited for.
DEVICE void say_full(const Ring& ring, u32 count) {
    products_may_read();
    phase_arrive(ring.full + count % STAGES);
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Tiles>
DEVICE void copy_tiles(const Tiles& tiles, const Ring& ring, unsigned char* stages) {
    u32 count = 0;
    for (u32 index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
        Problem p;
        if (!tiles.problem(index, p)) continue;
        Named<A_MAJOR, B_MAJOR> named;
        named.begin(p);
        u32 first_row = tiles.first_row(p);
        for (u32 k = 0; k < p.depth; k += DEPTH) {
            // The next step's rows are on their way while this one's are copied.
            Named<A_MAJOR, B_MAJOR> next = named;
            next.step(p, k + DEPTH);
            ring.wait_empty(count);
            copy_stage<A_MAJOR, B_MAJOR, IS_PAIRED>(stages + count % STAGES * STAGE_BYTES, p, named, first_row, k);
            copy_commit();
            if (count >= LAG) {
                copy_wait<LAG>();
                say_full(ring, count - LAG);
            }
            named = next;
            count++;
        }
    }
    copy_wait<0>();
    for (u32 rest = min(count, LAG); rest > 0; rest--) say_full(ring, count - rest);
}

// ---- multiplying ----

// Hands a warp's sums to the epilogue: 16 rows in eight parts of 32 columns, or of 16 pairs.
template <bool IS_PAIRED, typename Epilogue>
DEVICE void finish(const Problem& p, const Epilogue& epilogue, const f32 (&sums)[128], f32* parts, u32 num_parts, f32* own) {
    u32 lane = threadIdx.x % 32, first_row = (threadIdx.x - COPIERS) / 32 * 16;
    f32 row_parts[Own<IS_PAIRED>::HELD] = {};
    // Which registers a part has must be known when this is compiled.
#pragma unroll 1
    for (u32 part = 0; part < 8; part++) {
#pragma unroll
        for (u32 chosen = 0; chosen < 8; chosen++) {
            if (chosen != part) continue;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                u32 block = i / 2, half = i % 2, at = IS_PAIRED ? block / 2 * 16 + chosen * 2 + block % 2 : chosen * 4 + block;
                lay_down(own, block, half, sums[at * 4 + half * 2], sums[at * 4 + half * 2 + 1]);
            }
        }
        u32 column = p.column + part * (IS_PAIRED ? OWN_PAIRS : OWN_COLUMNS);
        hand_over<IS_PAIRED>(p, epilogue, own, first_row, column, row_parts);
    }
    if constexpr (Epilogue::HAS_PARTS)
#pragma unroll
        for (u32 i = 0; i < Own<IS_PAIRED>::HELD; i++) {
            f32 sum = row_part<IS_PAIRED>(row_parts[i]);
            u32 row = first_row + lane / Own<IS_PAIRED>::LANES + i * 8;
            if (lane % Own<IS_PAIRED>::LANES == 0 && row < p.rows) parts[(p.row + row) * num_parts + p.column / TILE_COLUMNS] = sum;
        }
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Tiles, typename Epilogue>
DEVICE void multiply_tiles(const Tiles& tiles, const Ring& ring, unsigned char* shared, const Epilogue& epilogue, f32* parts) {
    // Of 64 rows of A, and 16 deep.
    const u32 A_BLOCK = A_MAJOR ? 16 : DEPTH * 128, B_BLOCK = B_MAJOR ? 16 : DEPTH * 128;
    const u32 A_GROUP = DEPTH * 128, A_STEP = A_MAJOR ? 32 : 16 * 128, B_STEP = B_MAJOR ? 32 : 16 * 128;
    u32 warp = threadIdx.x / 32 - COPIERS / 32, count = 0;
    f32* own = (f32*)(shared + OWN_AT + warp * OWN_BYTES);
    for (u32 index = blockIdx.x; index < tiles.count(); index += gridDim.x) {
        Problem p;
        if (!tiles.problem(index, p)) continue;
        f32 sums[128] = {};
        for (u32 k = 0; k < p.depth; k += DEPTH) {
            const unsigned char* a = shared + count % STAGES * STAGE_BYTES + warp / 4 * A_GROUP;
            const unsigned char* b = shared + count % STAGES * STAGE_BYTES + A_BYTES;
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
        wgmma_wait<0>();
        wgmma_sums_are_there(sums);
        if (p.depth > 0) ring.release(count - 1);
        finish<IS_PAIRED>(p, epilogue, sums, parts, tiles.column_tiles(), own);
    }
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Tiles, typename Epilogue>
DEVICE void by_groups_of_warps(const Tiles& tiles, const Epilogue& epilogue, f32* parts) {
    SHARED(shared);
    u64* barriers = (u64*)(shared + BARRIERS_AT);
    Ring ring = {barriers, barriers + STAGES};
    if (threadIdx.x == 0)
        for (u32 i = 0; i < STAGES; i++) {
            phases_begin(ring.full + i, COPIERS);
            phases_begin(ring.empty + i, MULTIPLYING_WARPS);
        }
    __syncthreads();
    // 128 x 104 and 256 x 200 registers are what 384 x 168 were.
    if (threadIdx.x < COPIERS) {
        give_registers<104>();
        copy_tiles<A_MAJOR, B_MAJOR, IS_PAIRED>(tiles, ring, shared);
    } else {
        take_registers<200>();
        multiply_tiles<A_MAJOR, B_MAJOR, IS_PAIRED>(tiles, ring, shared, epilogue, parts);
    }
}

// ---- kernels: as those of the same names in grouped.cu; one dimension of blocks, any number ----

#define ROW_TILES(width) RowTiles{THE_ROWS, row_tiles, width}

HOPPER_KERNEL(384) hopper_rows_nt(ROWS, STORE, u32 row_tiles) {
    by_groups_of_warps<true, true, false>(ROW_TILES(TILE_COLUMNS), THE_STORE, nullptr);
}
HOPPER_KERNEL(384) hopper_rows_nn(ROWS, STORE, u32 row_tiles) {
    by_groups_of_warps<true, false, false>(ROW_TILES(TILE_COLUMNS), THE_STORE, nullptr);
}
HOPPER_KERNEL(384) hopper_up_paired(ROWS, ACTIVATE, u32 row_tiles) {
    by_groups_of_warps<true, true, true>(ROW_TILES(TILE_COLUMNS / 2), THE_ACTIVATE, nullptr);
}
HOPPER_KERNEL(384) hopper_up_single(ROWS, ACTIVATE, u32 row_tiles) {
    by_groups_of_warps<true, true, false>(ROW_TILES(TILE_COLUMNS), THE_ACTIVATE, nullptr);
}
HOPPER_KERNEL(384) hopper_pull_back_rows(ROWS, PULL_BACK, u32 row_tiles) {
    by_groups_of_warps<true, false, false>(ROW_TILES(TILE_COLUMNS), THE_PULL_BACK, parts);
}
HOPPER_KERNEL(384) hopper_depths_tn(DEPTHS, u32 groups) {
    Store store = {to, 0, columns, add};
    by_groups_of_warps<false, false, false>(DepthTiles{THE_DEPTHS, groups}, store, nullptr);
}
