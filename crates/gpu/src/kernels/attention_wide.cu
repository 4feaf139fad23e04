// Attention of bf16 heads that are wider than attention_tensor.cu's registers hold, and whose keys are their values:
// what latent attention keeps of a sequence, 576 numbers a token of DeepSeek's (2405.04434, section 2.1.2), for the
// rows that a step of decoding has. A block of eight warps takes 64 rows and goes through tiles of 32 keys that are
// copied while the tile before is computed with. For scores a warp has 16 rows and 16 keys; for sums it has all rows
// and an eighth of the columns, so scores and weights go by way of shared memory, where four lanes have a row's
// softmax.

const u32 OWN = 64, THREADS = 256, WARPS = 8, KEYS = 32, ROW_TILES = OWN / 16;
// Numbers from a row of scores, and of weights, to the next: lanes that read together are in different banks.
const u32 SCORES = KEYS + 4, WEIGHTS = KEYS + 8;

template <u32 DIM> struct Room {
    static const u32 TILE_BYTES = KEYS * DIM * 2, TILES_AT = OWN * DIM * 2, SCORES_AT = TILES_AT + 2 * TILE_BYTES;
    static const u32 WEIGHTS_AT = SCORES_AT + OWN * SCORES * 4, FADES_AT = WEIGHTS_AT + OWN * WEIGHTS * 2;
    // Groups of 16 columns of a warp: every eighth.
    static const u32 GROUPS = (DIM / 16 + WARPS - 1) / WARPS;
};

// Starts copying N rows of which `at(i)` is row i's address, or null where there is none; zeros there, and from
// element `dim` on.
template <u32 N, u32 DIM, typename At> DEVICE void copy_wide(unsigned char* to, const bf16* any, u32 dim, At at) {
    static_assert(N * (DIM / 8) % THREADS == 0, "each thread copies as much");
#pragma unroll 3
    for (u32 n = 0; n < N * (DIM / 8) / THREADS; n++) {
        u32 i = threadIdx.x + n * THREADS, row = i / (DIM / 8), chunk = i % (DIM / 8);
        const bf16* from = at(row);
        bool is_there = from && chunk * 8 < dim;
        copy_async(to + spot<DIM>(row, chunk), is_there ? from + chunk * 8 : any, is_there);
    }
}

// Scores of the block's rows and a tile's keys, as they are.
template <u32 DIM> DEVICE void score(f32* scores, const unsigned char* q_tile, const unsigned char* keys, u32 num_rows) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 2 * 16, key = warp % 2 * 16;
    if (row >= num_rows) return;
    f32 sums[2][4] = {};
#pragma unroll 4
    for (u32 k = 0; k < DIM; k += 16) {
        u32 a[4], b[4];
        load_left<DIM>(a, q_tile, row, k);
        load_right<DIM>(b, keys, key, k);
        mma_bf16(sums[0], a, b[0], b[1]);
        mma_bf16(sums[1], a, b[2], b[3]);
    }
#pragma unroll
    for (u32 j = 0; j < 2; j++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            *(float2*)(scores + (row + lane / 4 + half * 8) * SCORES + key + j * 8 + lane % 4 * 2) = make_float2(sums[j][half * 2], sums[j][half * 2 + 1]);
}

// What a row has so far, in each of its four lanes, in powers of two.
struct RowState {
    f32 top, total;
};

// The weights of a row's scores in place of those, rounded; returns what sums before shrink by. Row `r` sees keys
// `from` to `to`.
DEVICE f32 weigh(RowState& state, const f32* scores, bf16* weights, f32 scale, u32 key, u32 from, u32 to) {
    const f32 NOTHING = bits_float(0xff800000u);
    u32 lane = threadIdx.x % 4;
    f32 own[KEYS / 4], best = NOTHING, added = 0.0f;
#pragma unroll
    for (u32 i = 0; i < KEYS / 4; i++) {
        u32 c = lane + 4 * i;
        own[i] = key + c >= from && key + c < to ? scores[c] * (scale * LOG2_E) : NOTHING;
        best = larger(best, own[i]);
    }
    f32 new_top = larger(state.top, quad_max(best));
    bool is_empty = new_top == NOTHING;
    f32 fade = is_empty ? 1.0f : power_of_two(state.top - new_top);
#pragma unroll
    for (u32 i = 0; i < KEYS / 4; i++) {
        f32 p = is_empty ? 0.0f : power_of_two(own[i] - new_top);
        store(weights[lane + 4 * i], p);
        added += p;
    }
    state.total = state.total * fade + quad_sum(added);
    state.top = new_top;
    return fade;
}

// A warp's sums: of each 16 rows its groups of 16 columns.
template <u32 DIM> struct WideSums {
    f32 of[ROW_TILES][Room<DIM>::GROUPS][2][4];

    DEVICE_MEMBER void add(const unsigned char* values, const bf16* weights, const f32* fades, u32 num_rows) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (u32 t = 0; t < ROW_TILES; t++) {
            f32 fade[2] = {fades[t * 16 + lane / 4], fades[t * 16 + lane / 4 + 8]};
#pragma unroll
            for (u32 g = 0; g < Room<DIM>::GROUPS; g++)
#pragma unroll
                for (u32 j = 0; j < 8; j++) of[t][g][j / 4][j % 4] *= fade[j % 4 / 2];
        }
#pragma unroll
        for (u32 k = 0; k < KEYS; k += 16) {
            u32 a[ROW_TILES][4];
#pragma unroll
            for (u32 t = 0; t < ROW_TILES; t++)
                if (t * 16 < num_rows) load_matrices(a[t], weights + (t * 16 + lane % 16) * WEIGHTS + k + lane / 16 * 8);
#pragma unroll
            for (u32 g = 0; g < Room<DIM>::GROUPS; g++) {
                u32 column = (warp + g * WARPS) * 16, b[4];
                if (column >= DIM) continue;
                load_right_down<DIM>(b, values, k, column);
#pragma unroll
                for (u32 t = 0; t < ROW_TILES; t++) {
                    if (t * 16 >= num_rows) continue;
                    mma_bf16(of[t][g][0], a[t], b[0], b[1]);
                    mma_bf16(of[t][g][1], a[t], b[2], b[3]);
                }
            }
        }
    }

    // Hands `put` each two neighbouring columns' sums: with their row of the block's, and the first one's column.
    template <typename Put> DEVICE_MEMBER void each(u32 num_rows, u32 dim, Put put) const {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (u32 t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 row = t * 16 + lane / 4 + half * 8;
                if (row >= num_rows) continue;
#pragma unroll
                for (u32 g = 0; g < Room<DIM>::GROUPS; g++)
#pragma unroll
                    for (u32 j = 0; j < 2; j++) {
                        u32 column = (warp + g * WARPS) * 16 + j * 8 + lane % 4 * 2;
                        if (column < dim) put(row, column, of[t][g][j][half * 2], of[t][g][j][half * 2 + 1]);
                    }
            }
    }
};

template <u32 DIM> DEVICE void attend_wide(const bf16* q, const bf16* kept, const f32* sinks, bf16* o, f32* lse, const Parts& parts, const Sizes& s) {
    SHARED(shared);
    typedef Room<DIM> R;
    u32 g = blockIdx.y, part = blockIdx.x % parts.count, first = block_from_last(parts.count) * OWN, end = min(first + OWN, s.rows());
    u32 num_rows = end - first, dim = s.head_dim;
    unsigned char *q_tile = shared, *tiles = shared + R::TILES_AT;
    f32 *scores = (f32*)(shared + R::SCORES_AT), *fades = (f32*)(shared + R::FADES_AT), *tops = fades + OWN, *totals = tops + OWN;
    bf16* weights = (bf16*)(shared + R::WEIGHTS_AT);
    u32 low = s.first_key(first) / KEYS * KEYS + part * parts.keys, high = min(s.last_key(end - 1) + 1, s.kv_len);
    if (parts.count > 1) high = min(high, low + parts.keys);
    copy_wide<OWN, DIM>(q_tile, q, dim, [&](u32 i) { return i < num_rows ? q + s.place(blockIdx.z, g, first + i) * dim : nullptr; });
    auto copy_keys = [&](u32 key) {
        if (key < high)
            copy_wide<KEYS, DIM>(tiles + key / KEYS % 2 * R::TILE_BYTES, kept, dim,
                                 [&](u32 i) { return key + i < s.kv_len ? kept + s.key_place(blockIdx.z, g, key + i) * dim : nullptr; });
        copy_commit();
    };
    copy_keys(low);
    // Four lanes have a row's softmax; rows that are not there see nothing.
    u32 row = threadIdx.x / 4, r = first + min(row, num_rows - 1);
    u32 from = s.first_key(r), to = row < num_rows ? min(s.last_key(r) + 1, high) : 0;
    RowState state = {bits_float(0xff800000u), 0.0f};
    WideSums<DIM> sums = {};
    for (u32 key = low; key < high; key += KEYS) {
        copy_keys(key + KEYS);
        copy_wait<1>();
        __syncthreads();
        const unsigned char* tile = tiles + key / KEYS % 2 * R::TILE_BYTES;
        score<DIM>(scores, q_tile, tile, num_rows);
        __syncthreads();
        f32 fade = weigh(state, scores + row * SCORES, weights + row * WEIGHTS, s.scale, key, from, to);
        if (threadIdx.x % 4 == 0) fades[row] = fade;
        __syncthreads();
        sums.add(tile, weights, fades, num_rows);
        // The next tile but one comes where this one was.
        __syncthreads();
    }
    copy_wait<0>();
    if (threadIdx.x % 4 == 0) {
        tops[row] = state.top;
        totals[row] = state.total;
    }
    __syncthreads();
    if (parts.count > 1) {
        sums.each(num_rows, s.value_dim, [&](u32 i, u32 column, f32 x, f32 y) {
            *(float2*)(parts.of(s, first + i, part) + column) = make_float2(x, y);
        });
        if (threadIdx.x < num_rows)
            *(float2*)(parts.of(s, first + threadIdx.x, part) + s.value_dim) = make_float2(tops[threadIdx.x], totals[threadIdx.x]);
        return;
    }
    // What a row's sums are multiplied with, in place of what they shrank by.
    if (threadIdx.x < num_rows) {
        u32 own = first + threadIdx.x;
        f32 top = tops[threadIdx.x], total = totals[threadIdx.x];
        f32 factor = sinks ? add_sink(sinks[g * s.group() + s.head(own)], top, total) : 1.0f;
        fades[threadIdx.x] = factor / total;
        lse[s.lse_place(blockIdx.z, g, own)] = top * LN_2 + logf(total);
    }
    __syncthreads();
    sums.each(num_rows, s.value_dim, [&](u32 i, u32 column, f32 x, f32 y) {
        *(u32*)(o + s.place(blockIdx.z, g, first + i) * s.value_dim + column) = pack_bf16(x * fades[i], y * fades[i]);
    });
}

#define DEFINE(DIM)                                                                                                                  \
    KERNEL(256) attention_wide_##DIM(const bf16* q, const bf16* kept, const f32* sinks, bf16* o, f32* lse, f32* parts, u32 num_parts, \
                                     u32 part_keys, SIZES) {                                                                         \
        attend_wide<DIM>(q, kept, sinks, o, lse, Parts{parts, num_parts, part_keys}, THE_SIZES);                                     \
    }
DEFINE(320)
DEFINE(576)

KERNEL(32) attention_wide_join(f32* data, u32 count, const f32* sinks, bf16* o, f32* lse, SIZES) {
    join_parts<18>(data, count, sinks, o, lse, THE_SIZES);
}
