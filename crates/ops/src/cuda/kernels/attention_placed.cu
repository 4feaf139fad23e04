// Attention of one new token of each sequence, with what becomes of its projections before (place_heads.cu): a kernel less for a step of decoding
// to wait for. A block makes the queries that share its key head, and the new key and value, which only the block that sees them writes.

// What place_heads.cu has, of bf16.
struct PlacedQueries {
    const bf16 *q, *k, *v;
    bf16 *queries, *keys, *values;
    const f32 *q_norm, *k_norm;
    u32 q_norm_width, k_norm_width;
    f32 eps;
    Angles angles;
    static const bool HAS_NEWEST = true;

    // In shared memory behind the tiles: the new value, the queries and the key of the key head in f32, and what norms make of each of them.
    template <u32 DIM> static DEVICE_MEMBER bf16* own_value() {
        SHARED(shared);
        return (bf16*)(shared + (OWN + 4 * KEYS) * DIM * 2);
    }
    template <u32 DIM> static DEVICE_MEMBER f32* own_rows(const Sizes& s) { return (f32*)(own_value<DIM>() + s.value_dim); }

    // Where head `head` of the block's begins in its projection, the key's being the last.
    DEVICE_MEMBER u64 place(u32 head, const Sizes& s) const {
        u32 heads = head < s.group() ? s.heads : s.kv_heads;
        return ((u64)blockIdx.z * heads + (head < s.group() ? blockIdx.y * s.group() + head : blockIdx.y)) * s.head_dim;
    }

    // The sum of squares from a thread's first four on, every `step`; orders are those of place_heads.cu.
    static DEVICE_MEMBER f32 squares(const bf16* x, u32 first, u32 width, u32 step) {
        f32 sum = 0.0f;
        for (u32 i = first; i < width; i += step) sum = add_squares(sum, few<4>(x + i));
        return sum;
    }

    // What a norm of whole rows multiplies with: each thread has what two of 256 would have.
    DEVICE_MEMBER f32 scale_of_row(const bf16* x, u32 width) const {
        __shared__ f32 sums[8];
        __syncthreads();
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            f32 sum = warp_sum(squares(x, (threadIdx.x + half * THREADS) * 4, width, 8 * THREADS));
            if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32 + half * 4] = sum;
        }
        __syncthreads();
        f32 sum = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < 8; warp++) sum += sums[warp];
        return scale_of(sum, width, eps);
    }

    // Those of heads `first..end`, whose norm has this weight, if any.
    DEVICE_MEMBER void make_scales(f32* scales, u32 first, u32 end, const bf16* x, const f32* norm, u32 norm_width, u32 width, const Sizes& s) const {
        if (norm && norm_width == width) {
            f32 scale = scale_of_row(x + (u64)blockIdx.z * width, width);
            for (u32 head = first + threadIdx.x; head < end; head += THREADS) scales[head] = scale;
            return;
        }
        if (!norm) return;
        for (u32 head = first + threadIdx.x / 32; head < end; head += THREADS / 32) {
            f32 sum = warp_sum(squares(x + place(head, s), threadIdx.x % 32 * 4, s.head_dim, 128));
            if (threadIdx.x % 32 == 0) scales[head] = scale_of(sum, s.head_dim, eps);
        }
    }

    template <u32 DIM> DEVICE_MEMBER void copy(unsigned char*, const Sizes&, u32) const {}

    // Fills the tile of queries, and writes them if this is the first part of the keys; the new key and value are written if it sees them.
    template <u32 DIM> DEVICE_MEMBER void make(unsigned char* tile, u32 part, bool sees_newest, const Sizes& s) const {
        u32 group = s.group(), heads = group + 1, dim = s.head_dim, q_width = s.heads * dim, k_width = s.kv_heads * dim;
        f32 *rows = own_rows<DIM>(s), *scales = rows + heads * dim;
        make_scales(scales, 0, group, q, q_norm, q_norm_width, q_width, s);
        make_scales(scales, group, heads, k, k_norm, k_norm_width, k_width, s);
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
        Angles own = angles_of(angles, positions[blockIdx.z], head_dim, start, half, is_interleaved);                                   \
        PlacedQueries made = {q, k, v, queries, keys, values, q_norm, k_norm, q_norm_width, k_norm_width, eps, own};                    \
        forward<DIM>(made, keys, values, sinks, o, lse, Parts{parts, count, keys_each}, THE_SIZES);                                     \
    }
DEFINE(64)
DEFINE(128)
