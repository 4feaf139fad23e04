// How products go through a multiprocessor of Hopper (sm_90a): a block stays for many tiles of 128 rows. Its first
// four warps copy what is multiplied into a ring of stages, lines of 128 bytes deep, and run ahead into the next
// tile; the other two groups of four multiply 64 rows each straight from there (`wgmma`), and hand the sums to the
// epilogue by way of shared memory, so that it has eight neighbouring columns at a time. Rows of A are gathered,
// which tensor copies (TMA) cannot: they come by asynchronous copies of 16 bytes. What is not gathered comes by
// tensor copies where the host gave a map of it: one thread asks for what would be many copies.
//
// Operands along the depth are copied as numbers of 16 bits, whatever they are.

const u32 TILE_ROWS = 128, DEPTH = 64;
const u32 COPIERS = 128, MULTIPLYING_WARPS = 8, A_BYTES = TILE_ROWS * DEPTH * 2;
// Of a warp's shared memory for sums on their way to the epilogue: two times 16 rows of 32 (hopper_finish.cuh).
const u32 OWN_BUFFERS_BYTES = 4096;
// Columns of a tile, and stages of the ring.
template <u32 TILE_COLUMNS, u32 RING_STAGES> struct Tiling {
    static const u32 COLUMNS = TILE_COLUMNS, STAGES = RING_STAGES, STAGE_BYTES = A_BYTES + COLUMNS * DEPTH * 2;
    // Stages whose copies may be under way, and which are thus not said to be full yet: the oldest of them is when
    // this many are, before there is room for the next. The products of a stage end one stage later at most.
    static const u32 LAG = STAGES - 2;
    static const u32 OWN_AT = STAGES * STAGE_BYTES, BARRIERS_AT = OWN_AT + MULTIPLYING_WARPS * OWN_BUFFERS_BYTES;
};

template <typename T> struct Ring {
    u64 *full, *empty;
    DEVICE_MEMBER void wait_full(u32 count) const { phase_wait(full + count % T::STAGES, count / T::STAGES & 1); }
    DEVICE_MEMBER void wait_empty(u32 count) const { phase_wait(empty + count % T::STAGES, (count / T::STAGES & 1) ^ 1); }
    // Behind the barriers: epochs that the block has begun, and how often it has waited in vain (`Pace`).
    DEVICE_MEMBER u32* own_epochs() const { return (u32*)(empty + T::STAGES); }
    // By one lane of each warp that multiplies, when the products of this stage are over.
    DEVICE_MEMBER void release(u32 count) const {
        if (threadIdx.x % 32 == 0) phase_arrive(empty + count % T::STAGES);
    }
};

// What comes by tensor copies in a stage: the maps of both operands, or null. Boxes of an operand across the depth
// begin at its row `a_row` or `b_row`, in matrix `group`.
struct Boxes {
    const void *a, *b;
    u32 a_row, b_row, group;
};

// How far ahead of the others a block may be. Blocks at work at the same time read the same rows and columns, at
// about the same depth: one that is ahead by more than the second-level cache holds reads from memory alone, and so
// do those behind it, each for itself. Nothing brings them together again, as all then go on at the rate of memory.
// (Counters of an H100: a product 28,672 deep read 42 GB of memory, of 9 that blocks in step with each other need;
// kept together, 14.) So a tile's depth has some epochs: a block that begins one adds it to those that all have
// begun, and waits while it is ahead of their average. It does not wait for long, nor often in vain: blocks that
// other work keeps from their multiprocessors begin nothing.
//
// A warp of those who multiply sees to it, whose products of the stage before are at work meanwhile. In the loop of
// those who copy the same costs registers and the compiler's knowledge of what all lanes have in common: half as many
// instructions again, 12% of a layer's time.
struct Pace {
    u32* begun;  // epochs of all blocks, and blocks that are done; 0 before and after. Or null
    u32 in_epoch, epochs;  // bits of a depth within its epoch; epochs of a tile
    DEVICE_MEMBER bool is_kept() const { return begun && threadIdx.x == COPIERS; }
    // By all of those who multiply, at this depth of a tile.
    DEVICE_MEMBER void keep(u32* own, u32 k) const {
        if ((k & in_epoch) != 0 || !begun || threadIdx.x / 32 != COPIERS / 32) return;
        if (threadIdx.x == COPIERS) begin(own);
        // Products are the whole warp's.
        __syncwarp();
    }
    DEVICE_MEMBER void begin(u32* own) const {
        const u32 MOST_TRIES = 48, NAP_NS = 200, MOST_IN_VAIN = 4;
        u32 least = own[0] * gridDim.x, tries = 0;
        own[0] += 1;
        atomicAdd(begun, 1u);
        if (own[1] == MOST_IN_VAIN) return;
#pragma unroll 1
        while (tries < MOST_TRIES && read_now(begun) < least) {
            nap(NAP_NS);
            tries++;
        }
        if (tries == MOST_TRIES) own[1]++;
    }
    // Of tiles that the block has not.
    DEVICE_MEMBER void pass(u32* own, u32 tiles) const {
        if (!is_kept()) return;
        own[0] += tiles * epochs;
        atomicAdd(begun, tiles * epochs);
    }
    // The block is done, as if it had tiles as long as any has.
    DEVICE_MEMBER void end(u32* own, u32 tiles) const {
        if (!is_kept()) return;
        // The last round has tiles for the first blocks alone.
        u32 rest = tiles % gridDim.x;
        if (rest > 0 && blockIdx.x >= rest) pass(own, 1);
        __threadfence();
        if (atomicAdd(begun + 1, 1u) == gridDim.x - 1) begun[0] = begun[1] = 0;
    }
};

// Tiles that are not kept together.
struct NoPace {
    DEVICE_MEMBER void keep(u32*, u32) const {}
    DEVICE_MEMBER void pass(u32*, u32) const {}
    DEVICE_MEMBER void end(u32*, u32) const {}
};

// Which tiles there are, and what each is; `problem` is false where nothing is to be done.
struct RowTiles {
    Rows rows;
    u32 row_tiles, width;  // of the list; columns of a tile
    const void* b_map;     // for tensor copies, or null
    Pace pace;
    DEVICE_MEMBER u32 column_tiles() const { return (rows.columns + width - 1) / width; }
    DEVICE_MEMBER u32 count() const { return row_tiles * column_tiles(); }
    DEVICE_MEMBER bool problem(u32 index, Problem& p) const {
        u32 row, column;
        tile_at(index, column_tiles(), row_tiles, row, column);
        p = rows_problem(rows, row, column * width);
        return p.rows > 0;
    }
    DEVICE_MEMBER u32 first_row(const Problem&) const { return 0; }
    DEVICE_MEMBER void maps_are_there() const {
        if (b_map) map_is_there(b_map);
    }
    DEVICE_MEMBER Boxes boxes(const Problem& p, u32 k) const { return {nullptr, b_map, 0, k, p.group}; }
};

// ---- copying ----

// Where chunk `c` of a line of 128 bytes lies.
DEVICE u32 in_line(u32 line, u32 c) { return line * 128 + (c ^ (line & 7)) * 16; }

// A stage of an operand whose rows lie along the depth: each 16th of 16 N from this thread's on. `row_at` says where
// in the operand.
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

// A stage of an operand whose rows lie across the depth: WIDTH columns from `first` on, in blocks of 64. The copiers
// have little more time than it takes to name what they copy, so where all of it is there nothing is asked.
template <u32 WIDTH>
DEVICE void copy_depths(unsigned char* to, const Operand& o, const u32 (&rows)[2], u32 first, u32 edge, u32 k, u32 depth) {
    const u32 CHUNKS = WIDTH / 8, AT_ONCE = COPIERS / CHUNKS;
    u32 chunk = threadIdx.x % CHUNKS;
    const bf16* from = (const bf16*)o.data + first + chunk * 8;
    if (k + DEPTH <= depth && WIDTH <= edge) {
        // Chunks are swapped as eight lines before.
        u32 row_bytes = o.stride * 2, own = threadIdx.x / CHUNKS;
        unsigned char* block = to + chunk / 8 * (DEPTH * 128);
        unsigned char* lines[2] = {block + in_line(own, chunk % 8), block + in_line(own + AT_ONCE, chunk % 8)};
#pragma unroll
        for (u32 i = 0; i < DEPTH / AT_ONCE; i++) {
            u32 row = from_lane(rows[i * AT_ONCE / 32], (int)(own + AT_ONCE * i % 32));
            copy_async(lines[i % 2] + i / 2 * (2 * AT_ONCE * 128), (const char*)from + (u64)row * row_bytes, true);
        }
        return;
    }
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

// A stage's tensor copies, whose bytes its barrier waits for.
template <typename T, bool B_MAJOR, bool IS_PAIRED>
DEVICE void copy_boxes(unsigned char* to, const Boxes& boxes, const Problem& p, u32 first_row, u32 k, u64* full) {
    unsigned char* b = to + A_BYTES;
    expect_bytes(full, (boxes.a ? A_BYTES : 0) + (boxes.b ? T::COLUMNS * 128 : 0));
    if (boxes.a) copy_blocks_box(to, boxes.a, first_row / 64, boxes.a_row, boxes.group, full);
    if (!boxes.b) return;
    if constexpr (B_MAJOR) {
        copy_box(b, boxes.b, k, p.column, boxes.group, full);
        if constexpr (IS_PAIRED) copy_box(b + T::COLUMNS / 2 * 128, boxes.b, k, p.column + (u32)p.pair, boxes.group, full);
    } else copy_blocks_box(b, boxes.b, p.column / 64, boxes.b_row, boxes.group, full);
}

template <typename T, bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED>
DEVICE void copy_stage(unsigned char* to, const Problem& p, const Named<A_MAJOR, B_MAJOR>& named, u32 first_row, u32 k, const Boxes& boxes,
                       u64* full) {
    u32 edge = p.columns - p.column, pair = (u32)p.pair;
    unsigned char* b = to + A_BYTES;
    if (boxes.a || boxes.b) {
        if (threadIdx.x == 0) copy_boxes<T, B_MAJOR, IS_PAIRED>(to, boxes, p, first_row, k, full);
        // The warp's lanes go on together: apart, each of what follows would be done for one of them after the other.
        __syncwarp();
    }
    if constexpr (A_MAJOR) copy_rows<8>(to, p.a, [&](u32 i) { return named.a[i]; }, p.rows, k, p.depth);
    else if (!boxes.a) copy_depths<TILE_ROWS>(to, p.a, named.a, first_row, p.rows, k, p.depth);
    if (boxes.b) return;
    if constexpr (IS_PAIRED) {
        // The rows of all first columns of pairs, then those of their second ones.
        copy_rows<T::COLUMNS / 32>(b, p.b, [&](u32 i) { return named.b[0] + 16 * i; }, edge, k, p.depth);
        copy_rows<T::COLUMNS / 32>(b + T::COLUMNS / 2 * 128, p.b, [&](u32 i) { return named.b[0] + pair + 16 * i; }, edge, k, p.depth);
    } else if constexpr (B_MAJOR) copy_rows<T::COLUMNS / 16>(b, p.b, [&](u32 i) { return named.b[0] + 16 * i; }, edge, k, p.depth);
    else copy_depths<T::COLUMNS>(b, p.b, named.b, p.column, edge, k, p.depth);
}

// Says that the stage is full whose copies the warp's threads have waited for: once for all of them, as arrivals at
// one barrier wait for each other.
template <typename T> DEVICE void say_full(const Ring<T>& ring, u32 count) {
    products_may_read();
    __syncwarp();
    if (threadIdx.x % 32 == 0) phase_arrive(ring.full + count % T::STAGES);
}

template <typename T, bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Tiles>
DEVICE void copy_tiles(const Tiles& tiles, const Ring<T>& ring, unsigned char* stages) {
    if (threadIdx.x == 0) tiles.maps_are_there();
    u32 count = 0, said = 0;
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
            if (count - said == T::LAG) {
                copy_wait<T::LAG - 1>();
                say_full(ring, said++);
            }
            ring.wait_empty(count);
            unsigned char* to = stages + count % T::STAGES * T::STAGE_BYTES;
            copy_stage<T, A_MAJOR, B_MAJOR, IS_PAIRED>(to, p, named, first_row, k, tiles.boxes(p, k), ring.full + count % T::STAGES);
            copy_commit();
            named = next;
            count++;
        }
        // What the next tile is takes a while to find out, and there is work for longer.
        copy_wait<0>();
        for (; said < count; said++) say_full(ring, said);
    }
}

// ---- who does what ----

// Registers of a thread that copies, and of one that multiplies: 128 of these and 256 of those have what 384 x 168
// are.
template <u32 OF_COPIERS> struct Registers {
    static const u32 COPIERS = OF_COPIERS, OTHERS = (3 * 168 - OF_COPIERS) / 16 * 8;
};

// `multiply` is what the groups of warps do that multiply; it gets the ring and all of the shared memory.
template <typename T, typename Registers, bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Tiles, typename Multiply>
DEVICE void by_groups_of_warps(const Tiles& tiles, Multiply multiply) {
    SHARED(shared);
    u64* barriers = (u64*)(shared + T::BARRIERS_AT);
    Ring<T> ring = {barriers, barriers + T::STAGES};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < T::STAGES; i++) {
            phases_begin(ring.full + i, COPIERS / 32);
            phases_begin(ring.empty + i, MULTIPLYING_WARPS);
        }
        phases_are_there();
        ring.own_epochs()[0] = ring.own_epochs()[1] = 0;
    }
    __syncthreads();
    if (threadIdx.x < COPIERS) {
        give_registers<Registers::COPIERS>();
        copy_tiles<T, A_MAJOR, B_MAJOR, IS_PAIRED>(tiles, ring, shared);
    } else {
        take_registers<Registers::OTHERS>();
        multiply(ring, shared);
    }
}

#define ROW_LIST u32 row_tiles, u32 *begun, u32 in_epoch, u32 epochs, const void *b_map
#define ROW_TILES(width) RowTiles{THE_ROWS, row_tiles, width, b_map, Pace{begun, in_epoch, epochs}}
