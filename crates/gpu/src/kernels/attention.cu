// Grouped-query causal attention, block by block (FlashAttention, 2205.14135 and 2307.08691): see attention.rs for
// the shapes.
//
// All queries that share a key head, by position and then by head, are the rows of one matrix; a block takes 32 of
// them, or 32 keys. Four lanes have a row (or a key): each every fourth score and every fourth element of a head.
// Arithmetic is f32.

const u32 ROWS = 32, KEYS = 32, THREADS = 128, SCORES = KEYS + 1;

struct Values {
    const void* data;
    u32 is_bf16;
    DEVICE_MEMBER f32 at(u64 i) const { return load_any(data, is_bf16, i); }
};

// Rows of queries (or of what has their shape) into shared memory, zeros behind the last one. A row of the tile has
// dim + 1 places.
DEVICE void load_rows(f32* to, Values from, const Sizes& s, u32 batch, u32 g, u32 first, u32 dim) {
    for (u32 i = threadIdx.x; i < ROWS * dim; i += THREADS) {
        u32 r = first + i / dim;
        to[i / dim * (dim + 1) + i % dim] = r < s.rows() ? from.at(s.place(batch, g, r) * dim + i % dim) : 0.0f;
    }
}
DEVICE void load_keys(f32* to, Values from, const Sizes& s, u32 batch, u32 g, u32 first, u32 dim) {
    for (u32 i = threadIdx.x; i < KEYS * dim; i += THREADS) {
        u32 key = first + i / dim;
        to[i / dim * (dim + 1) + i % dim] = key < s.kv_len ? from.at(s.key_place(batch, g, key) * dim + i % dim) : 0.0f;
    }
}

// The next keys and their values in place of those before, which no thread needs any more after that.
DEVICE void next_keys(f32* k_tile, Values k, f32* v_tile, Values v, const Sizes& s, u32 batch, u32 g, u32 first) {
    __syncthreads();
    load_keys(k_tile, k, s, batch, g, first, s.head_dim);
    load_keys(v_tile, v, s, batch, g, first, s.value_dim);
    __syncthreads();
}

DEVICE f32 dot(const f32* a, const f32* b, u32 len) {
    f32 sum = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < len; i++) sum = fmaf(a[i], b[i], sum);
    return sum;
}

// A lane's every fourth element: sums += factor row.
template <u32 DIM> DEVICE void add_scaled(f32 (&sums)[DIM / 4], f32 factor, const f32* row, u32 len) {
    u32 lane = threadIdx.x % 4;
#pragma unroll
    for (u32 i = 0; i < DIM / 4; i++)
        if (lane + 4 * i < len) sums[i] = fmaf(factor, row[lane + 4 * i], sums[i]);
}

// Keys that any row of `first..end` sees: from a multiple of KEYS on.
DEVICE void key_range(const Sizes& s, u32 first, u32 end, u32& low, u32& high) {
    low = s.first_key(first) / KEYS * KEYS;
    high = min(s.last_key(end - 1) + 1, s.kv_len);
}

// DIM is at least the larger head, a multiple of 4. sinks may be null.
template <u32 DIM>
DEVICE void forward(Values q, Values k, Values v, const f32* sinks, void* o, u32 o_bf16, f32* lse, const Sizes& s) {
    SHARED(shared);
    u32 g = blockIdx.y, batch = blockIdx.z, first = blockIdx.x * ROWS, end = min(first + ROWS, s.rows());
    f32* q_tile = (f32*)shared;
    f32* k_tile = q_tile + ROWS * (s.head_dim + 1);
    f32* v_tile = k_tile + KEYS * (s.head_dim + 1);
    f32* scores = v_tile + KEYS * (s.value_dim + 1);
    u32 row = threadIdx.x / 4, lane = threadIdx.x % 4, r = first + row;
    f32 sums[DIM / 4] = {}, top = bits_float(0xff800000u), total = 0.0f;
    load_rows(q_tile, q, s, batch, g, first, s.head_dim);
    u32 low, high;
    key_range(s, first, end, low, high);
    for (u32 key = low; key < high; key += KEYS) {
        next_keys(k_tile, k, v_tile, v, s, batch, g, key);
        f32 best = bits_float(0xff800000u);
#pragma unroll 1
        for (u32 j = 0; j < KEYS / 4; j++) {
            u32 c = lane + 4 * j;
            bool is_seen = r < end && key + c < s.kv_len && s.sees(r, key + c);
            f32 score = is_seen ? s.scale * dot(q_tile + row * (s.head_dim + 1), k_tile + c * (s.head_dim + 1), s.head_dim) : bits_float(0xff800000u);
            scores[row * SCORES + c] = score;
            best = larger(best, score);
        }
        best = quad_max(best);
        f32 new_top = larger(top, best);
        bool is_empty = new_top == bits_float(0xff800000u);
        f32 fade = is_empty ? 1.0f : expf(top - new_top), added = 0.0f;
#pragma unroll
        for (u32 j = 0; j < KEYS / 4; j++) {
            f32& score = scores[row * SCORES + lane + 4 * j];
            f32 p = is_empty ? 0.0f : expf(score - new_top);
            score = p;
            added += p;
        }
        total = total * fade + quad_sum(added);
        top = new_top;
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < DIM / 4; i++) sums[i] *= fade;
#pragma unroll 1
        for (u32 c = 0; c < KEYS; c++) add_scaled<DIM>(sums, scores[row * SCORES + c], v_tile + c * (s.value_dim + 1), s.value_dim);
        __syncwarp();
    }
    if (r >= end) return;
    if (sinks) {
        f32 sink = sinks[g * s.group() + s.head(r)], new_top = sink > top ? sink : top, fade = expf(top - new_top);
        total = total * fade + expf(sink - new_top);
        top = new_top;
        for (u32 i = 0; i < DIM / 4; i++) sums[i] *= fade;
    }
    u64 to = s.place(batch, g, r) * s.value_dim;
#pragma unroll
    for (u32 i = 0; i < DIM / 4; i++) {
        u32 column = lane + 4 * i;
        if (column >= s.value_dim) continue;
        f32 x = sums[i] / total;
        if (o_bf16) store(((bf16*)o)[to + column], x);
        else ((f32*)o)[to + column] = x;
    }
    if (lane == 0) lse[s.lse_place(batch, g, r)] = top + logf(total);
}

// delta [batch, H, seq_len] = the sum over a head of d_o o; a warp a head of a query, in the order of o.
KERNEL(128) attention_delta(const void* d_o, u32 d_o_bf16, const void* o, u32 o_bf16, f32* delta, u32 seq_len, u32 heads, u32 dim, u32 rows) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    Values a = {d_o, d_o_bf16}, b = {o, o_bf16};
    f32 sum = 0.0f;
    for (u32 i = lane; i < dim; i += 32) sum = fmaf(a.at((u64)row * dim + i), b.at((u64)row * dim + i), sum);
    sum = warp_sum(sum);
    u32 head = row % heads, query = row / heads % seq_len, batch = row / heads / seq_len;
    if (lane == 0) delta[((u64)batch * heads + head) * seq_len + query] = sum;
}

// d_sinks [H] = the sinks' gradients, or added to what is there: minus the sum over queries of the sink's share of
// the softmax times `delta`. A block has a head.
KERNEL(256) attention_sinks_back(const f32* lse, const f32* delta, const f32* sinks, f32* d_sinks, u32 adds, u32 batches, u32 seq_len, u32 heads) {
    u32 head = blockIdx.x;
    f32 sum = 0.0f, sink = sinks[head];
    for (u32 batch = 0; batch < batches; batch++) {
        u64 first = ((u64)batch * heads + head) * seq_len;
        for (u32 i = threadIdx.x; i < seq_len; i += 256) sum -= expf(sink - lse[first + i]) * delta[first + i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_sinks[head] = adds ? d_sinks[head] + sum : sum;
}

// p of a score and its gradient, of a visible key; zeros otherwise.
struct Pulled {
    f32 p, ds;
};
DEVICE Pulled pull(const Sizes& s, bool is_seen, const f32* q, const f32* k, const f32* d_o, const f32* v, f32 lse, f32 delta) {
    if (!is_seen) return Pulled{0.0f, 0.0f};
    f32 p = expf(s.scale * dot(q, k, s.head_dim) - lse);
    return Pulled{p, p * (dot(d_o, v, s.value_dim) - delta)};
}

template <u32 DIM>
DEVICE void backward_queries(Values d_o, Values q, Values k, Values v, const f32* lse, const f32* delta, f32* dq, const Sizes& s) {
    SHARED(shared);
    u32 g = blockIdx.y, batch = blockIdx.z, first = blockIdx.x * ROWS, end = min(first + ROWS, s.rows());
    f32* q_tile = (f32*)shared;
    f32* d_o_tile = q_tile + ROWS * (s.head_dim + 1);
    f32* k_tile = d_o_tile + ROWS * (s.value_dim + 1);
    f32* v_tile = k_tile + KEYS * (s.head_dim + 1);
    f32* scores = v_tile + KEYS * (s.value_dim + 1);
    u32 row = threadIdx.x / 4, lane = threadIdx.x % 4, r = first + row;
    load_rows(q_tile, q, s, batch, g, first, s.head_dim);
    load_rows(d_o_tile, d_o, s, batch, g, first, s.value_dim);
    f32 own_lse = r < end ? lse[s.lse_place(batch, g, r)] : 0.0f, own_delta = r < end ? delta[s.lse_place(batch, g, r)] : 0.0f;
    f32 sums[DIM / 4] = {};
    u32 low, high;
    key_range(s, first, end, low, high);
    for (u32 key = low; key < high; key += KEYS) {
        next_keys(k_tile, k, v_tile, v, s, batch, g, key);
#pragma unroll 1
        for (u32 c = lane; c < KEYS; c += 4) {
            bool is_seen = r < end && key + c < s.kv_len && s.sees(r, key + c);
            scores[row * SCORES + c] = pull(s, is_seen, q_tile + row * (s.head_dim + 1), k_tile + c * (s.head_dim + 1),
                                            d_o_tile + row * (s.value_dim + 1), v_tile + c * (s.value_dim + 1), own_lse, own_delta).ds;
        }
        __syncwarp();
#pragma unroll 1
        for (u32 c = 0; c < KEYS; c++) add_scaled<DIM>(sums, scores[row * SCORES + c], k_tile + c * (s.head_dim + 1), s.head_dim);
        __syncwarp();
    }
    if (r >= end) return;
#pragma unroll
    for (u32 i = 0; i < DIM / 4; i++) {
        u32 column = lane + 4 * i;
        if (column < s.head_dim) dq[s.place(batch, g, r) * s.head_dim + column] = s.scale * sums[i];
    }
}

// A block has KEYS keys of a key head, also those behind the last one, which get zeros; it goes through all rows that
// see any.
template <u32 DIM>
DEVICE void backward_keys(Values d_o, Values q, Values k, Values v, const f32* lse, const f32* delta, f32* dk, f32* dv, const Sizes& s) {
    SHARED(shared);
    u32 g = blockIdx.y, batch = blockIdx.z, first = blockIdx.x * KEYS;
    f32* q_tile = (f32*)shared;
    f32* d_o_tile = q_tile + ROWS * (s.head_dim + 1);
    f32* k_tile = d_o_tile + ROWS * (s.value_dim + 1);
    f32* v_tile = k_tile + KEYS * (s.head_dim + 1);
    f32* probs = v_tile + KEYS * (s.value_dim + 1);
    f32* slopes = probs + KEYS * SCORES;
    u32 c = threadIdx.x / 4, lane = threadIdx.x % 4, key = first + c;
    load_keys(k_tile, k, s, batch, g, first, s.head_dim);
    load_keys(v_tile, v, s, batch, g, first, s.value_dim);
    f32 dk_sums[DIM / 4] = {}, dv_sums[DIM / 4] = {};
    // Queries that see the first key or a later one of these: from this position on.
    u32 offset = s.kv_len - s.seq_len, from = first > offset ? first - offset : 0;
    for (u32 start = from * s.group(); start < s.rows(); start += ROWS) {
        if (s.window && s.first_key(start) > first + KEYS - 1) break;
        __syncthreads();
        load_rows(q_tile, q, s, batch, g, start, s.head_dim);
        load_rows(d_o_tile, d_o, s, batch, g, start, s.value_dim);
        __syncthreads();
#pragma unroll 1
        for (u32 row = lane; row < ROWS; row += 4) {
            u32 r = start + row;
            bool is_seen = r < s.rows() && key < s.kv_len && s.sees(r, key);
            f32 own_lse = is_seen ? lse[s.lse_place(batch, g, r)] : 0.0f, own_delta = is_seen ? delta[s.lse_place(batch, g, r)] : 0.0f;
            Pulled pulled = pull(s, is_seen, q_tile + row * (s.head_dim + 1), k_tile + c * (s.head_dim + 1),
                                 d_o_tile + row * (s.value_dim + 1), v_tile + c * (s.value_dim + 1), own_lse, own_delta);
            probs[c * SCORES + row] = pulled.p;
            slopes[c * SCORES + row] = pulled.ds;
        }
        __syncwarp();
#pragma unroll 1
        for (u32 row = 0; row < ROWS; row++) {
            add_scaled<DIM>(dv_sums, probs[c * SCORES + row], d_o_tile + row * (s.value_dim + 1), s.value_dim);
            add_scaled<DIM>(dk_sums, slopes[c * SCORES + row], q_tile + row * (s.head_dim + 1), s.head_dim);
        }
        __syncwarp();
    }
    if (key >= s.kv_capacity) return;
#pragma unroll
    for (u32 i = 0; i < DIM / 4; i++) {
        u32 column = lane + 4 * i;
        if (column < s.head_dim) dk[s.key_place(batch, g, key) * s.head_dim + column] = s.scale * dk_sums[i];
        if (column < s.value_dim) dv[s.key_place(batch, g, key) * s.value_dim + column] = dv_sums[i];
    }
}

#define INPUTS const void *q, u32 q_bf16, const void *k, u32 k_bf16, const void *v, u32 v_bf16
#define DEFINE(DIM)                                                                                                                \
    KERNEL(128) attention_##DIM(INPUTS, const f32* sinks, void* o, u32 o_bf16, f32* lse, SIZES) {                                  \
        forward<DIM>(Values{q, q_bf16}, Values{k, k_bf16}, Values{v, v_bf16}, sinks, o, o_bf16, lse, THE_SIZES);                   \
    }                                                                                                                              \
    KERNEL(128) attention_backward_queries_##DIM(const void* d_o, u32 d_o_bf16, INPUTS, const f32* lse, const f32* delta, f32* dq, \
                                                 SIZES) {                                                                          \
        backward_queries<DIM>(Values{d_o, d_o_bf16}, Values{q, q_bf16}, Values{k, k_bf16}, Values{v, v_bf16}, lse, delta, dq,      \
                              THE_SIZES);                                                                                          \
    }                                                                                                                              \
    KERNEL(128) attention_backward_keys_##DIM(const void* d_o, u32 d_o_bf16, INPUTS, const f32* lse, const f32* delta, f32* dk,    \
                                              f32* dv, SIZES) {                                                                    \
        backward_keys<DIM>(Values{d_o, d_o_bf16}, Values{q, q_bf16}, Values{k, k_bf16}, Values{v, v_bf16}, lse, delta, dk, dv,     \
                           THE_SIZES);                                                                                             \
    }
DEFINE(64)
DEFINE(128)
DEFINE(256)
