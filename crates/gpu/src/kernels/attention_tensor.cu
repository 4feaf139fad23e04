// Attention of bf16 tensors on tensor cores (attention_forward.cuh), and its gradients.

KERNEL(32) attention_tensor_join(f32* data, u32 count, const f32* sinks, bf16* o, f32* lse, SIZES) {
    join_parts<8>(data, count, sinks, o, lse, THE_SIZES);
}

// ---- backward ----

// The softmax's weight of a score, from the log-sum of its row in powers of two.
DEVICE f32 weight(const Sizes& s, f32 score, f32 row_lse) { return power_of_two(fmaf(s.scale * LOG2_E, score, -row_lse)); }

// Writes a warp's 16 rows times `factor`; `to(i)` is where the row of sum i begins, or null.
template <u32 DIM, typename To> DEVICE void write_sums(const f32 (&sums)[DIM / 8][4], f32 factor, u32 dim, To to) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        f32* row = to(row_of(half * 2));
        if (!row) continue;
#pragma unroll
        for (u32 d = 0; d < DIM / 8; d++) {
            u32 column = d * 8 + column_of(0);
            if (column < dim) *(float2*)(row + column) = make_float2(sums[d][half * 2] * factor, sums[d][half * 2 + 1] * factor);
        }
    }
}

template <u32 DIM>
DEVICE void backward_queries(const bf16* d_o, const bf16* q, const bf16* k, const bf16* v, const f32* lse, const f32* delta, f32* dq,
                             const Sizes& s) {
    SHARED(shared);
    const u32 BYTES = KEYS_BACK * DIM * 2;
    u32 g = blockIdx.y, first = block_from_last(1) * OWN, end = min(first + OWN, s.rows()), warp_row = threadIdx.x / 32 * 16;
    unsigned char *q_tile = shared, *d_o_tile = shared + OWN * DIM * 2, *tiles = d_o_tile + OWN * DIM * 2;
    u32 low = s.first_key(first) / KEYS_BACK * KEYS_BACK, high = min(s.last_key(end - 1) + 1, s.kv_len);
    auto copy = [&](u32 key) { copy_next<KEYS_BACK, DIM>(tiles, k, v, s, key, high); };
    copy_rows_of_both<OWN, DIM>(q_tile, q, d_o, s, first, s.rows());
    copy(low);
    f32 sums[DIM / 8][4] = {}, own_lse[2], own_delta[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 r = first + row_of(half * 2);
        own_lse[half] = r < end ? LOG2_E * lse[s.lse_place(blockIdx.z, g, r)] : 0.0f;
        own_delta[half] = r < end ? delta[s.lse_place(blockIdx.z, g, r)] : 0.0f;
    }
    Seen seen;
    seen.begin(s, first + warp_row);
    for (u32 key = low; key < high; key += KEYS_BACK) {
        copy(key + KEYS_BACK);
        copy_wait<1>();
        __syncthreads();
        const unsigned char* k_tile = tiles + key / KEYS_BACK % 2 * 2 * BYTES;
        f32 scores[KEYS_BACK / 8][4] = {}, slopes[KEYS_BACK / 8][4] = {};
        multiply_across<DIM>(scores, q_tile, warp_row, k_tile);
        multiply_across<DIM>(slopes, d_o_tile, warp_row, k_tile + BYTES);
        // Rows behind the last one have slopes of 0: zeros times zeros.
#pragma unroll
        for (u32 j = 0; j < KEYS_BACK / 8; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) slopes[j][i] = weight(s, scores[j][i], own_lse[i / 2]) * (slopes[j][i] - own_delta[i / 2]);
        if (!sees_all(s, first, end, key, KEYS_BACK))
#pragma unroll
            for (u32 j = 0; j < KEYS_BACK / 8; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) slopes[j][i] = seen.has(i, key + j * 8 + column_of(i)) ? slopes[j][i] : 0.0f;
        multiply_down<DIM>(sums, slopes, k_tile);
        __syncthreads();
    }
    copy_wait<0>();
    write_sums<DIM>(sums, s.scale, s.head_dim, [&](u32 row) {
        return first + row < end ? dq + s.place(blockIdx.z, g, first + row) * s.head_dim : nullptr;
    });
}

// A block has 64 keys, also those behind the last one, which get zeros; it goes through all rows that see any. Scores
// lie transposed: a warp's 16 keys by rows.
template <u32 DIM>
DEVICE void backward_keys(const bf16* d_o, const bf16* q, const bf16* k, const bf16* v, const f32* lse, const f32* delta, f32* dk,
                          f32* dv, const Sizes& s) {
    SHARED(shared);
    __shared__ f32 log_sums[2][ROWS_BACK], deltas[2][ROWS_BACK];
    // The keys that rows see: from these on, and so many more; none behind the last row.
    __shared__ u32 first_keys[2][ROWS_BACK], more_keys[2][ROWS_BACK];
    const u32 BYTES = ROWS_BACK * DIM * 2;
    u32 g = blockIdx.y, first = blockIdx.x * OWN, warp_row = threadIdx.x / 32 * 16;
    unsigned char *k_tile = shared, *v_tile = shared + OWN * DIM * 2, *tiles = v_tile + OWN * DIM * 2;
    // Queries that see the first key or a later one of these: from this position on.
    u32 offset = s.kv_len - s.seq_len, low = (first > offset ? first - offset : 0) * s.group(), high = s.rows();
    auto is_passed = [&](u32 start) { return start >= high || (s.window && s.first_key(start) > first + OWN - 1); };
    auto copy = [&](u32 start, u32 step) {
        if (!is_passed(start)) {
            unsigned char* to = tiles + step % 2 * 2 * BYTES;
            copy_rows_of_both<ROWS_BACK, DIM>(to, q, d_o, s, start, high);
            u32 r = start + threadIdx.x;
            if (threadIdx.x < ROWS_BACK) {
                u64 at = s.lse_place(blockIdx.z, g, r);
                log_sums[step % 2][threadIdx.x] = r < high ? LOG2_E * lse[at] : 0.0f;
                deltas[step % 2][threadIdx.x] = r < high ? delta[at] : 0.0f;
                first_keys[step % 2][threadIdx.x] = r < high ? s.first_key(r) : 0xffffffffu;
                more_keys[step % 2][threadIdx.x] = r < high ? s.last_key(r) - s.first_key(r) : 0;
            }
        }
        copy_commit();
    };
    copy_keys<OWN, DIM>(k_tile, k, s, first, s.head_dim);
    copy_keys<OWN, DIM>(v_tile, v, s, first, s.value_dim);
    copy(low, 0);
    f32 dk_sums[DIM / 8][4] = {}, dv_sums[DIM / 8][4] = {};
    for (u32 start = low, step = 0; !is_passed(start); start += ROWS_BACK, step++) {
        copy(start + ROWS_BACK, step + 1);
        copy_wait<1>();
        __syncthreads();
        const unsigned char* q_tile = tiles + step % 2 * 2 * BYTES;
        f32 scores[ROWS_BACK / 8][4] = {}, slopes[ROWS_BACK / 8][4] = {};
        multiply_across<DIM>(scores, k_tile, warp_row, q_tile);
        multiply_across<DIM>(slopes, v_tile, warp_row, q_tile + BYTES);
        // Scores become weights, a thread's two rows of each eight at a time.
#pragma unroll
        for (u32 j = 0; j < ROWS_BACK / 8; j++) {
            u32 inside = j * 8 + column_of(0);
            float2 log_sum = *(const float2*)(log_sums[step % 2] + inside), own_delta = *(const float2*)(deltas[step % 2] + inside);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                scores[j][i] = weight(s, scores[j][i], i % 2 ? log_sum.y : log_sum.x);
                slopes[j][i] -= i % 2 ? own_delta.y : own_delta.x;
            }
        }
        // What is seen of all rows by all keys is asked once.
        if (start + ROWS_BACK > high || !sees_all(s, start, start + ROWS_BACK, first, OWN))
#pragma unroll
            for (u32 j = 0; j < ROWS_BACK / 8; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u32 inside = j * 8 + column_of(i), from_first = first + row_of(i) - first_keys[step % 2][inside];
                    scores[j][i] = from_first <= more_keys[step % 2][inside] ? scores[j][i] : 0.0f;
                }
#pragma unroll
        for (u32 j = 0; j < ROWS_BACK / 8; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) slopes[j][i] *= scores[j][i];
        multiply_down<DIM>(dv_sums, scores, q_tile + BYTES);
        multiply_down<DIM>(dk_sums, slopes, q_tile);
        __syncthreads();
    }
    copy_wait<0>();
    auto place = [&](u32 row) { return s.key_place(blockIdx.z, g, first + row); };
    write_sums<DIM>(dk_sums, s.scale, s.head_dim, [&](u32 row) {
        return first + row < s.kv_capacity ? dk + place(row) * s.head_dim : nullptr;
    });
    write_sums<DIM>(dv_sums, 1.0f, s.value_dim, [&](u32 row) {
        return first + row < s.kv_capacity ? dv + place(row) * s.value_dim : nullptr;
    });
}

#define INPUTS const bf16 *q, const bf16 *k, const bf16 *v
#define DEFINE(DIM)                                                                                                                 \
    KERNEL(128) attention_tensor_##DIM(INPUTS, const f32* sinks, bf16* o, f32* lse, f32* parts, u32 count, u32 keys, SIZES) {       \
        forward<DIM, false>(StoredQueries{q}, k, v, sinks, o, lse, Parts{parts, count, keys}, THE_SIZES);                           \
    }                                                                                                                               \
    KERNEL(128) attention_few_##DIM(INPUTS, const f32* sinks, bf16* o, f32* lse, f32* parts, u32 count, u32 keys, SIZES) {          \
        forward<DIM, true>(StoredQueries{q}, k, v, sinks, o, lse, Parts{parts, count, keys}, THE_SIZES);                            \
    }                                                                                                                               \
    KERNEL(128) attention_tensor_queries_##DIM(const bf16* d_o, INPUTS, const f32* lse, const f32* delta, f32* dq, SIZES) {         \
        backward_queries<DIM>(d_o, q, k, v, lse, delta, dq, THE_SIZES);                                                             \
    }
#define DEFINE_KEYS(DIM)                                                                                                            \
    KERNEL(128) attention_tensor_keys_##DIM(const bf16* d_o, INPUTS, const f32* lse, const f32* delta, f32* dk, f32* dv, SIZES) {   \
        backward_keys<DIM>(d_o, q, k, v, lse, delta, dk, dv, THE_SIZES);                                                            \
    }
DEFINE(64)
DEFINE(128)
DEFINE(192)
DEFINE(256)
// A thread has twice as many sums there as elsewhere: for heads of 256 there are no registers for them.
DEFINE_KEYS(64)
DEFINE_KEYS(128)
DEFINE_KEYS(192)
