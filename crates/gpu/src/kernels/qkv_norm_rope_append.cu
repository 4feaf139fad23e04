// What becomes of a layer's projections before attention: see qkv_norm_rope_append.rs. A block has the queries, the
// keys or the values of a token (blockIdx.y), and keeps their row in shared memory from the norm to the rotation.

// x / rms(x) * weight of each `norm_width` elements of the row, rounded to T.
template <u32 N, typename T>
DEVICE void norm_in_place(f32* row, const f32* weight, u32 width, u32 norm_width, f32 eps) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool has_one = norm_width == width;
    // The whole block has a row of one part, else each warp has parts of its own.
    u32 first = has_one ? 0 : warp, step = has_one ? 1 : 8, own = (has_one ? threadIdx.x : lane) * N, stride = (has_one ? 256 : 32) * N;
    for (u32 part = first; part < width / norm_width; part += step) {
        f32* x = row + part * norm_width;
        f32 sum = 0.0f;
        for (u32 i = own; i < norm_width; i += stride)
#pragma unroll
            for (u32 j = 0; j < N; j++) sum = fmaf(x[i + j], x[i + j], sum);
        sum = has_one ? block_sum(sum) : warp_sum(sum);
        f32 scale = scale_of(sum, norm_width, eps);
        for (u32 i = own; i < norm_width; i += stride) {
            Few<N> w = few<N>(weight + i);
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                T y;
                store(y, x[i + j] * scale * w.x[j]);
                x[i + j] = load(y);
            }
        }
    }
}

template <u32 N, typename T>
DEVICE void place_row(f32* row, const T* from, T* to, const f32* norm, u32 width, u32 norm_width, f32 eps, bool is_rotated, const Angles& angles) {
    for (u32 i = threadIdx.x * N; i < width; i += 256 * N) {
        Few<N> x = few<N>(from + i);
#pragma unroll
        for (u32 j = 0; j < N; j++) row[i + j] = x.x[j];
    }
    __syncthreads();
    if (norm) norm_in_place<N, T>(row, norm, width, norm_width, eps);
    __syncthreads();
    if (is_rotated) rotate_in_place(row, width, angles);
    __syncthreads();
    for (u32 i = threadIdx.x * N; i < width; i += 256 * N) {
        Few<N> x;
#pragma unroll
        for (u32 j = 0; j < N; j++) x.x[j] = row[i + j];
        put(to + i, x);
    }
}

// Rows of queries stay where they are among others; of each sequence `each` rows of keys and values go to rows from
// `held` on of the `capacity` that it has there.
#define DEFINE(T)                                                                                                                     \
    KERNEL(256) qkv_norm_rope_append_##T(const T* q, const T* k, const T* v, T* queries, T* keys, T* values, const f32* q_norm,                \
                                const f32* k_norm, u32 q_norm_width, u32 k_norm_width, f32 eps, const f32* angles,                    \
                                const u32* positions, u32 head_dim, u32 start, u32 half, u32 is_interleaved, u32 q_width,             \
                                u32 k_width, u32 v_width, u32 each, u32 capacity, u32 held) {                                         \
        SHARED(shared);                                                                                                               \
        u32 row = blockIdx.x, part = blockIdx.y, width = part == 0 ? q_width : part == 1 ? k_width : v_width;                         \
        u64 place = part == 0 ? row : (u64)(row / each) * capacity + held + row % each;                                               \
        const T* from = (part == 0 ? q : part == 1 ? k : v) + (u64)row * width;                                                       \
        T* to = (part == 0 ? queries : part == 1 ? keys : values) + place * width;                                                    \
        const f32* norm = part == 0 ? q_norm : part == 1 ? k_norm : nullptr;                                                          \
        u32 norm_width = part == 0 ? q_norm_width : k_norm_width;                                                                     \
        Angles own = angles_of(angles, positions[row], head_dim, start, half, is_interleaved);                                        \
        if (width % 4 == 0 && norm_width % 4 == 0)                                                                                    \
            place_row<4>((f32*)shared, from, to, norm, width, norm_width, eps, part < 2, own);                                        \
        else place_row<1>((f32*)shared, from, to, norm, width, norm_width, eps, part < 2, own);                                       \
    }
DEFINE(f32)
DEFINE(bf16)
