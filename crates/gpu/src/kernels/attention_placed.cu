// Attention of one new token of each sequence, with what becomes of its projections before (qkv_norm_rope_append.cu):
// a kernel less for a step of decoding to wait for. A block makes the queries that share its key head, and the new
// key and value, which only the block that sees them writes.

// What qkv_norm_rope_append.cu has, of bf16.
struct PlacedQueries {
    const bf16 *q, *k, *v;
    bf16 *queries, *keys, *values;
    const f32 *q_norm, *k_norm;
    u32 q_norm_width, k_norm_width;
    f32 eps;
    Angles angles;
    static const bool HAS_NEWEST = true;

    // In shared memory behind the tiles: the new value, the queries and the key of the key head in f32, and what
    // norms make of each of them.
    template <u32 DIM> static DEVICE_MEMBER bf16* own_value() {
        SHARED(shared);
        return (bf16*)(shared + (FEW_OWN + 4 * KEYS) * DIM * 2);
    }
    template <u32 DIM> static DEVICE_MEMBER f32* own_rows(const Sizes& s) { return (f32*)(own_value<DIM>() + s.value_dim); }

    // Where head `head` of the block's begins in its projection, the key's being the last.
    DEVICE_MEMBER u64 place(u32 head, const Sizes& s) const {
        u32 heads = head < s.group() ? s.heads : s.kv_heads;
        return ((u64)blockIdx.z * heads + (head < s.group() ? blockIdx.y * s.group() + head : blockIdx.y)) * s.head_dim;
    }

    // The sum of squares from a thread's first four on, every `step`; orders are those of qkv_norm_rope_append.cu.
    static DEVICE_MEMBER f32 squares(const bf16* x, u32 first, u32 width, u32 step) {
        f32 sum = 0.0f;
        for (u32 i = first; i < width; i += step) sum = add_squares(sum, few<4>(x + i));
        return sum;
    }

    // What norms of whole rows multiply with, of a row of queries and one of keys (none has no width): each thread
    // has what two of 256 would have, and loads of both rows are under way together.
    DEVICE_MEMBER float2 scales_of_rows(u32 q_width, u32 k_width) const {
        __shared__ f32 of_warps[2][8];
        const bf16* rows[2] = {q + (u64)blockIdx.z * q_width, k + (u64)blockIdx.z * k_width};
        u32 widths[2] = {q_width, k_width};
        f32 sums[2][2] = {};
        for (u32 start = threadIdx.x * 4; start < max(q_width, k_width); start += 8 * THREADS)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 at = start + i % 2 * 4 * THREADS;
                if (at < widths[i / 2]) sums[i / 2][i % 2] = add_squares(sums[i / 2][i % 2], few<4>(rows[i / 2] + at));
            }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            f32 sum = warp_sum(sums[i / 2][i % 2]);
            if (threadIdx.x % 32 == 0) of_warps[i / 2][threadIdx.x / 32 + i % 2 * 4] = sum;
        }
        __syncthreads();
        f32 all[2] = {};
#pragma unroll
        for (u32 warp = 0; warp < 8; warp++) {
            all[0] += of_warps[0][warp];
            all[1] += of_warps[1][warp];
        }
        return make_float2(scale_of(all[0], q_width, eps), scale_of(all[1], k_width, eps));
    }

    // Those of the block's heads, whose norms have these weights, if any.
    DEVICE_MEMBER void make_scales(f32* scales, u32 q_width, u32 k_width, const Sizes& s) const {
        bool has_whole[2] = {q_norm && q_norm_width == q_width, k_norm && k_norm_width == k_width};
        float2 of_rows = make_float2(0.0f, 0.0f);
        if (has_whole[0] || has_whole[1]) of_rows = scales_of_rows(has_whole[0] ? q_width : 0, has_whole[1] ? k_width : 0);
        for (u32 head = threadIdx.x / 32; head <= s.group(); head += THREADS / 32) {
            bool is_query = head < s.group();
            f32 scale = is_query ? of_rows.x : of_rows.y;
            if ((is_query ? q_norm : k_norm) && !has_whole[is_query ? 0 : 1]) {
                f32 sum = warp_sum(squares((is_query ? q : k) + place(head, s), threadIdx.x % 32 * 4, s.head_dim, 128));
                scale = scale_of(sum, s.head_dim, eps);
            }
            if (threadIdx.x % 32 == 0) scales[head] = scale;
        }
    }

    // Asks for the norms' weights of the block's heads, or of one, which earlier kernels do not write.
    DEVICE_MEMBER void ask_for_norms(u32 group, u32 dim) const {
        u32 head = threadIdx.x * 32 / dim, at = threadIdx.x * 32 % dim;
        if (q_norm && head < group) ask_for(q_norm + (q_norm_width == dim ? at : (blockIdx.y * group + head) * dim + at));
        if (k_norm && head == 0) ask_for(k_norm + (k_norm_width == dim ? at : blockIdx.y * dim + at));
    }

    template <u32 DIM, u32 ROWS> DEVICE_MEMBER void copy(unsigned char*, const Sizes&, u32) const {}

    // Fills the tile of queries, and writes them if this is the first part of the keys; the new key and value are
    // written if it sees them.
    template <u32 DIM> DEVICE_MEMBER void make(unsigned char* tile, u32 part, bool sees_newest, const Sizes& s) const {
        u32 group = s.group(), heads = group + 1, dim = s.head_dim, q_width = s.heads * dim, k_width = s.kv_heads * dim;
        f32 *rows = own_rows<DIM>(s), *scales = rows + heads * dim;
        make_scales(scales, q_width, k_width, s);
        __syncthreads();
        for (u32 i = threadIdx.x * 4; i < heads * dim; i += 4 * THREADS) {
            u32 head = i / dim, at = i % dim;
            bool is_query = head < group;
            const f32* norm = is_query ? q_norm : k_norm;
            Few<4> x = few<4>((is_query ? q : k) + place(head, s) + at);
            if (norm) {
                bool is_whole = (is_query ? q_norm_width : k_norm_width) != dim;
                Few<4> w = few<4>(norm + at + (is_whole ? (is_query ? blockIdx.y * group + head : blockIdx.y) * dim : 0));
#pragma unroll
                for (u32 j = 0; j < 4; j++) x.x[j] = rounded(x.x[j] * scales[head] * w.x[j], 1);
            }
            put(rows + i, x);
        }
        u64 value = ((u64)blockIdx.z * s.kv_heads + blockIdx.y) * s.value_dim;
        for (u32 i = threadIdx.x * 8; i < s.value_dim; i += 8 * THREADS) *(uint4*)(own_value<DIM>() + i) = *(const uint4*)(v + value + i);
        __syncthreads();
        rotate_in_place(rows, heads * dim, angles);
        __syncthreads();
        for (u32 i = threadIdx.x; i < group * (DIM / 8); i += THREADS) {
            u32 head = i / (DIM / 8), chunk = i % (DIM / 8);
            uint4 eight = chunk * 8 < dim ? eight_of(rows + head * dim + chunk * 8) : make_uint4(0, 0, 0, 0);
            *(uint4*)(tile + spot<DIM>(head, chunk)) = eight;
            if (part == 0 && chunk * 8 < dim) *(uint4*)(queries + place(head, s) + chunk * 8) = eight;
        }
        if (!sees_newest) return;
        u64 newest = s.key_place(blockIdx.z, blockIdx.y, s.kv_len - 1);
        for (u32 i = threadIdx.x * 8; i < dim; i += 8 * THREADS) *(uint4*)(keys + newest * dim + i) = eight_of(rows + group * dim + i);
        for (u32 i = threadIdx.x * 8; i < s.value_dim; i += 8 * THREADS) *(uint4*)(values + newest * s.value_dim + i) = *(const uint4*)(own_value<DIM>() + i);
    }

    static DEVICE_MEMBER uint4 eight_of(const f32* row) {
        f32 x[8];
        load_vector(x, row, 0, 0);
        return packed(x);
    }

    // The new key and value, as row `row` of the tiles of both.
    template <u32 DIM> DEVICE_MEMBER void put_newest(unsigned char* k_tile, u32 row, const Sizes& s) const {
        const f32* key = own_rows<DIM>(s) + s.group() * s.head_dim;
        u32 chunk = threadIdx.x % (DIM / 8);
        if (threadIdx.x < DIM / 8) {
            if (chunk * 8 < s.head_dim) *(uint4*)(k_tile + spot<DIM>(row, chunk)) = eight_of(key + chunk * 8);
        } else if (threadIdx.x < 2 * (DIM / 8)) {
            unsigned char* v_tile = k_tile + KEYS * DIM * 2;
            if (chunk * 8 < s.value_dim) *(uint4*)(v_tile + spot<DIM>(row, chunk)) = *(const uint4*)(own_value<DIM>() + chunk * 8);
        }
    }
};

#define PLACED const bf16 *q, const bf16 *k, const bf16 *v, bf16 *queries, bf16 *keys, bf16 *values, const f32 *q_norm, const f32 *k_norm, \
               u32 q_norm_width, u32 k_norm_width, f32 eps, const f32 *angles, const u32 *positions, u32 start, u32 half, u32 is_interleaved
#define DEFINE(DIM)                                                                                                                     \
    KERNEL(128) attention_placed_##DIM(PLACED, const f32* sinks, bf16* o, f32* lse, f32* parts, u32 count, u32 keys_each, SIZES) {       \
        PlacedQueries made = {q, k, v, queries, keys, values, q_norm, k_norm, q_norm_width, k_norm_width, eps, Angles{}};               \
        made.ask_for_norms(heads / kv_heads, head_dim);                                                                                 \
        after_earlier();                                                                                                                \
        made.angles = angles_of(angles, positions[blockIdx.z], head_dim, start, half, is_interleaved);                                  \
        forward<DIM, true>(made, keys, values, sinks, o, lse, Parts{parts, count, keys_each}, THE_SIZES);                                     \
    }
DEFINE(64)
DEFINE(128)
