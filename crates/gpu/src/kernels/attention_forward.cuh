// Attention of bf16 tensors on tensor cores (FlashAttention-2, 2307.08691): as in attention.cu, all queries that
// share a key head are the rows of one matrix. A block of four warps takes 64 rows (or, for the gradients of keys and
// values, 64 keys) and goes through keys (or rows) in tiles that are copied while the tile before is computed with.
// Each warp has 16 of the 64; scores never leave its registers: the sums of one product are, rounded to bf16, the
// left operand of the next. Up to 16 rows, as in decoding, all warps have, and each a quarter of a tile's keys: one
// warp alone would take as long as what it computes with needs to come.

const u32 OWN = 64, THREADS = 128, KEYS = 64, KEYS_BACK = 32, ROWS_BACK = 32;

// Starts copying rows `first..` of a key head, or its keys; zeros from `limit` on, and from element `dim` on.
template <u32 N, u32 DIM>
DEVICE void copy_part(unsigned char* to, const bf16* from, const Sizes& s, u32 g, u32 first, u32 limit, u32 dim, bool is_keys) {
    static_assert(N * (DIM / 8) % THREADS == 0, "each thread copies as much");
    // Keys lie equally far from each other.
    const bf16* first_key = from + s.key_place(blockIdx.z, g, first) * dim;
    u32 from_key_to_key = s.kv_heads * dim;
#pragma unroll 2
    for (u32 n = 0; n < N * (DIM / 8) / THREADS; n++) {
        u32 i = threadIdx.x + n * THREADS, row = i / (DIM / 8), chunk = i % (DIM / 8), place = first + row;
        bool is_there = place < limit && chunk * 8 < dim;
        const bf16* at = is_keys ? first_key + row * from_key_to_key : from + s.place(blockIdx.z, g, place) * dim;
        copy_async(to + spot<DIM>(row, chunk), is_there ? at + chunk * 8 : from, is_there);
    }
}
template <u32 N, u32 DIM> DEVICE void copy_rows(unsigned char* to, const bf16* from, const Sizes& s, u32 first, u32 dim) {
    copy_part<N, DIM>(to, from, s, blockIdx.y, first, s.rows(), dim, false);
}
template <u32 N, u32 DIM> DEVICE void copy_keys(unsigned char* to, const bf16* from, const Sizes& s, u32 first, u32 dim) {
    copy_part<N, DIM>(to, from, s, blockIdx.y, first, s.kv_len, dim, true);
}

// Starts copying N rows of two tensors of queries' shapes, one behind the other: where a row is is worked out once.
template <u32 N, u32 DIM>
DEVICE void copy_rows_of_both(unsigned char* to, const bf16* q, const bf16* d_o, const Sizes& s, u32 first, u32 limit) {
#pragma unroll 2
    for (u32 n = 0; n < N * (DIM / 8) / THREADS; n++) {
        u32 i = threadIdx.x + n * THREADS, row = i / (DIM / 8), chunk = i % (DIM / 8), r = first + row;
        u64 place = s.place(blockIdx.z, blockIdx.y, r);
        bool has_q = r < limit && chunk * 8 < s.head_dim, has_d_o = r < limit && chunk * 8 < s.value_dim;
        unsigned char* at = to + spot<DIM>(row, chunk);
        copy_async(at, has_q ? q + place * s.head_dim + chunk * 8 : q, has_q);
        copy_async(at + N * DIM * 2, has_d_o ? d_o + place * s.value_dim + chunk * 8 : d_o, has_d_o);
    }
}

// Starts copying the N keys from `key` on and their values, if there are any before `high`, into one of two places
// that take turns.
template <u32 N, u32 DIM>
DEVICE void copy_next(unsigned char* tiles, const bf16* k, const bf16* v, const Sizes& s, u32 key, u32 high) {
    const u32 BYTES = N * DIM * 2;
    if (key < high) {
        unsigned char* to = tiles + key / N % 2 * 2 * BYTES;
        copy_keys<N, DIM>(to, k, s, key, s.head_dim);
        copy_keys<N, DIM>(to + BYTES, v, s, key, s.value_dim);
    }
    copy_commit();
}

// sums [16, 8 N] += 16 rows of `left` from `row` times the first 8 N rows of `right`, transposed.
template <u32 DIM, u32 N>
DEVICE void multiply_across(f32 (&sums)[N][4], const unsigned char* left, u32 row, const unsigned char* right) {
#pragma unroll
    for (u32 k = 0; k < DIM; k += 16) {
        u32 a[4], b[4];
        load_left<DIM>(a, left, row, k);
#pragma unroll
        for (u32 j = 0; j < N; j += 2) {
            load_right<DIM>(b, right, j * 8, k);
            mma_bf16(sums[j], a, b[0], b[1]);
            mma_bf16(sums[j + 1], a, b[2], b[3]);
        }
    }
}

// sums [16, DIM] += weights [16, 8 N], rounded, times the first 8 N rows of `right`.
template <u32 DIM, u32 N> DEVICE void multiply_down(f32 (&sums)[DIM / 8][4], const f32 (&weights)[N][4], const unsigned char* right) {
#pragma unroll
    for (u32 j = 0; j < N; j += 2) {
        u32 a[4] = {pack_bf16(weights[j][0], weights[j][1]), pack_bf16(weights[j][2], weights[j][3]),
                    pack_bf16(weights[j + 1][0], weights[j + 1][1]), pack_bf16(weights[j + 1][2], weights[j + 1][3])};
#pragma unroll
        for (u32 d = 0; d < DIM / 8; d += 2) {
            u32 b[4];
            load_right_down<DIM>(b, right, j * 8, d * 8);
            mma_bf16(sums[d], a, b[0], b[1]);
            mma_bf16(sums[d + 1], a, b[2], b[3]);
        }
    }
}

// Where a thread's sum i of a warp's 16 x 8 lies: in the warp's rows, and in the block's where each has its own.
DEVICE u32 row_of_warp(u32 i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
DEVICE u32 row_of(u32 i) { return threadIdx.x / 32 * 16 + row_of_warp(i); }
DEVICE u32 column_of(u32 i) { return threadIdx.x % 4 * 2 + i % 2; }

// Whether every row of `first..end` sees every key of `key..key + count`.
DEVICE bool sees_all(const Sizes& s, u32 first, u32 end, u32 key, u32 count) {
    return key + count <= s.last_key(first) + 1 && key >= s.first_key(end - 1);
}

// ---- forward ----

// Replaces scores, which `scale` (above 0) makes powers of two, by their exponentials relative to the largest so far;
// `fade` is what sums before shrink by.
template <u32 N> DEVICE void take_exponentials(f32 (&scores)[N][4], f32 scale, f32 (&top)[2], f32 (&total)[2], f32 (&fade)[2]) {
    const f32 NOTHING = bits_float(0xff800000u);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        f32 best = NOTHING, added = 0.0f;
#pragma unroll
        for (u32 j = 0; j < N; j++) best = larger(best, larger(scores[j][half * 2], scores[j][half * 2 + 1]));
        f32 new_top = larger(top[half], scale * quad_max(best));
        // Where nothing is seen yet all powers are 0, and so are all sums.
        f32 less = new_top == NOTHING ? 0.0f : new_top;
        fade[half] = power_of_two(top[half] - less);
#pragma unroll
        for (u32 j = 0; j < N; j++)
#pragma unroll
            for (u32 c = 0; c < 2; c++) {
                f32 p = power_of_two(fmaf(scale, scores[j][half * 2 + c], -less));
                scores[j][half * 2 + c] = p;
                added += p;
            }
        total[half] = total[half] * fade[half] + quad_sum(added);
        top[half] = new_top;
    }
}

// The keys that a thread's two rows see: from `first` on, and so many more. (Rows behind the last one may see others;
// nobody asks.)
struct Seen {
    u32 first[2], more[2];
    DEVICE_MEMBER void begin(const Sizes& s, u32 first_row) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 to = s.last_key(first_row + row_of_warp(half * 2));
            first[half] = s.first_before(to);
            more[half] = min(to, s.kv_len - 1) - first[half];
        }
    }
    DEVICE_MEMBER bool has(u32 i, u32 key) const { return key - first[i / 2] <= more[i / 2]; }
};

// Of scores for keys from `key` on, those of keys that a row does not see count as nothing.
template <u32 N> DEVICE void see(f32 (&scores)[N][4], const Seen& seen, u32 key) {
#pragma unroll
    for (u32 j = 0; j < N; j++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            scores[j][i] = seen.has(i, key + j * 8 + column_of(i)) ? scores[j][i] : bits_float(0xff800000u);
}

// Queries that lie in memory, as all keys do.
struct StoredQueries {
    const bf16* q;
    // Whether the last key and its value are not where the others are.
    static const bool HAS_NEWEST = false;
    template <u32 DIM, u32 ROWS> DEVICE_MEMBER void copy(unsigned char* tile, const Sizes& s, u32 first) const { copy_rows<ROWS, DIM>(tile, q, s, first, s.head_dim); }
    template <u32 DIM> DEVICE_MEMBER void make(unsigned char*, u32, bool, const Sizes&) const {}
    template <u32 DIM> DEVICE_MEMBER void put_newest(unsigned char*, u32, const Sizes&) const {}
};

// Rows of a block that are few, and how many of a tile's keys each warp has then.
const u32 FEW_OWN = 16, KEYS_OF_WARP = KEYS * 32 / THREADS;

// What becomes of sums.
struct Output {
    const f32* sinks;
    bf16* o;
    f32* lse;
    const Parts& parts;
    u32 part, end;
    const Sizes& s;
    // Sums of two of a thread's rows, of 8 N columns from `column` on; `is_first` also writes what belongs to a row
    // and not to its columns.
    template <u32 N> DEVICE_MEMBER void write(const f32 (&sums)[N][4], f32 (&top)[2], f32 (&total)[2], u32 first, u32 column, bool is_first) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 r = first + row_of_warp(half * 2);
            if (r < end) write_row(sums, half, top[half], total[half], r, column, is_first && threadIdx.x % 4 == 0);
        }
    }
    template <u32 N> DEVICE_MEMBER void write_row(const f32 (&sums)[N][4], u32 half, f32 top, f32 total, u32 r, u32 column, bool is_first) const {
        u32 g = blockIdx.y;
        if (parts.count > 1) {
            f32* own = parts.of(s, r, part);
#pragma unroll
            for (u32 d = 0; d < N; d++) {
                u32 at = column + d * 8 + column_of(0);
                if (at < s.value_dim) *(float2*)(own + at) = make_float2(sums[d][half * 2], sums[d][half * 2 + 1]);
            }
            if (is_first) *(float2*)(own + s.value_dim) = make_float2(top, total);
            return;
        }
        f32 factor = 1.0f;
        if (sinks) factor = add_sink(sinks[g * s.group() + s.head(r)], top, total);
        factor /= total;
        u64 to = s.place(blockIdx.z, g, r) * s.value_dim;
#pragma unroll
        for (u32 d = 0; d < N; d++) {
            u32 at = column + d * 8 + column_of(0);
            if (at < s.value_dim) *(u32*)(o + to + at) = pack_bf16(sums[d][half * 2] * factor, sums[d][half * 2 + 1] * factor);
        }
        if (is_first) lse[s.lse_place(blockIdx.z, g, r)] = top * LN_2 + logf(total);
    }
};

// Joins what all warps have of the same rows, each of its keys, in `shared`, and writes a quarter of the columns
// each.
template <u32 DIM> DEVICE void write_joined(f32 (&sums)[DIM / 8][4], f32 (&top)[2], f32 (&total)[2], f32* shared, const Output& output) {
    const u32 WARPS = THREADS / 32, STRIDE = DIM + 8, EACH = DIM / 8 / WARPS;
    u32 warp = threadIdx.x / 32, rows = output.end;
    f32 *tops = shared, *totals = tops + WARPS * FEW_OWN, *all = totals + WARPS * FEW_OWN, joined[EACH][4] = {};
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 r = row_of_warp(half * 2);
        if (threadIdx.x % 4 == 0) {
            tops[warp * FEW_OWN + r] = top[half];
            totals[warp * FEW_OWN + r] = total[half];
        }
        f32* own = all + (warp * FEW_OWN + r) * STRIDE + column_of(0);
#pragma unroll
        for (u32 d = 0; d < DIM / 8; d++)
            if (r < rows) *(float2*)(own + d * 8) = make_float2(sums[d][half * 2], sums[d][half * 2 + 1]);
    }
    __syncthreads();
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 r = row_of_warp(half * 2);
        if (r >= rows) continue;
        top[half] = bits_float(0xff800000u);
        total[half] = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) top[half] = larger(top[half], tops[w * FEW_OWN + r]);
        // Where nothing is seen all sums are 0.
        f32 less = top[half] == bits_float(0xff800000u) ? 0.0f : top[half];
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            f32 fade = power_of_two(tops[w * FEW_OWN + r] - less);
            total[half] = fmaf(fade, totals[w * FEW_OWN + r], total[half]);
            const f32* from = all + (w * FEW_OWN + r) * STRIDE + warp * EACH * 8 + column_of(0);
#pragma unroll
            for (u32 d = 0; d < EACH; d++) {
                float2 two = *(const float2*)(from + d * 8);
                joined[d][half * 2] = fmaf(fade, two.x, joined[d][half * 2]);
                joined[d][half * 2 + 1] = fmaf(fade, two.y, joined[d][half * 2 + 1]);
            }
        }
    }
    output.write(joined, top, total, 0, warp * EACH * 8, warp == 0);
}

template <u32 DIM, bool ARE_FEW, typename Queries>
DEVICE void forward(const Queries& queries, const bf16* k, const bf16* v, const f32* sinks, bf16* o, f32* lse, const Parts& parts, const Sizes& s) {
    SHARED(shared);
    const u32 BYTES = KEYS * DIM * 2, ROWS = ARE_FEW ? FEW_OWN : OWN, EACH = ARE_FEW ? KEYS_OF_WARP : KEYS;
    u32 part = blockIdx.x % parts.count, first = block_from_last(parts.count) * ROWS, end = min(first + ROWS, s.rows());
    u32 warp_row = ARE_FEW ? 0 : threadIdx.x / 32 * 16, warp_key = ARE_FEW ? threadIdx.x / 32 * KEYS_OF_WARP : 0;
    unsigned char *q_tile = shared, *tiles = shared + ROWS * DIM * 2;
    u32 low = s.first_key(first) / KEYS * KEYS + part * parts.keys, high = min(s.last_key(end - 1) + 1, s.kv_len);
    if (parts.count > 1) high = min(high, low + parts.keys);
    Sizes there = s;
    if (Queries::HAS_NEWEST) there.kv_len--;
    auto copy = [&](u32 key) { copy_next<KEYS, DIM>(tiles, k, v, there, key, high); };
    queries.template copy<DIM, ROWS>(q_tile, s, first);
    copy(low);
    queries.template make<DIM>(q_tile, part, low < high && high == s.kv_len, s);
    f32 sums[DIM / 8][4] = {}, top[2] = {bits_float(0xff800000u), bits_float(0xff800000u)}, total[2] = {};
    Seen seen;
    seen.begin(s, first + warp_row);
    // With few queries some warps have no rows.
    bool has_rows = first + warp_row < end;
    for (u32 key = low; key < high; key += KEYS) {
        copy(key + KEYS);
        copy_wait<1>();
        __syncthreads();
        unsigned char* k_tile = tiles + key / KEYS % 2 * 2 * BYTES;
        if (Queries::HAS_NEWEST && there.kv_len - key < KEYS) {
            queries.template put_newest<DIM>(k_tile, there.kv_len - key, s);
            __syncthreads();
        }
        if (has_rows) {
            f32 scores[EACH / 8][4] = {}, fade[2];
            const unsigned char* own_keys = k_tile + warp_key * DIM * 2;
            multiply_across<DIM>(scores, q_tile, warp_row, own_keys);
            // What is seen of all keys by all rows is asked once and not of each score.
            if (!sees_all(s, first, end, key, KEYS)) see(scores, seen, key + warp_key);
            take_exponentials(scores, s.scale * LOG2_E, top, total, fade);
#pragma unroll
            for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) sums[d][i] *= fade[i / 2];
            multiply_down<DIM>(sums, scores, own_keys + BYTES);
        }
        __syncthreads();
    }
    copy_wait<0>();
    Output output = {sinks, o, lse, parts, part, end, s};
    if constexpr (ARE_FEW) write_joined<DIM>(sums, top, total, (f32*)tiles, output);
    else output.write(sums, top, total, first + warp_row, 0, true);
}
