// The norm of few rows as the beginning of a kernel that multiplies with them: a launch of its own takes longer than all blocks doing it.

const u32 NORMED_ROWS = 8;

// As in rms_norm.cu. With no `x` there is nothing to norm.
struct Norm {
    const void* x;
    const f32* weight;
    f32 eps;
    void* y;
    f32* inv_rms;
    u32 x_bf16, y_bf16;
};

#define NORM const void *norm_x, const f32 *norm_weight, f32 norm_eps, void *norm_y, f32 *norm_inv_rms, u32 norm_x_bf16, u32 norm_y_bf16
#define THE_NORM Norm{norm_x, norm_weight, norm_eps, norm_y, norm_inv_rms, norm_x_bf16, norm_y_bf16}

DEVICE Few<4> four_of(const void* data, u32 is_bf16, u64 at) {
    return is_bf16 ? few<4>((const bf16*)data + at) : few<4>((const f32*)data + at);
}
DEVICE void put_four(void* to, u32 is_bf16, u64 at, const Few<4>& four) {
    if (is_bf16) put((bf16*)to + at, four);
    else put((f32*)to + at, four);
}

// Writes the `rows` normed rows of whole fours to shared memory, as bf16 or f32, and those that are this block's to y: the numbers are
// those of y, and sums are taken in the order of rms_norm.cu. A whole block of 256 threads, which then all see them.
DEVICE void norm_rows(const Norm& n, void* to, u32 to_bf16, u32 rows, u32 width) {
    __shared__ f32 of_warps[NORMED_ROWS][8];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    f32 sums[NORMED_ROWS] = {};
    for (u32 i = threadIdx.x * 4; i < width; i += 1024)
#pragma unroll
        for (u32 r = 0; r < NORMED_ROWS; r++) {
            if (r >= rows) break;
            Few<4> v = four_of(n.x, n.x_bf16, (u64)r * width + i);
#pragma unroll
            for (u32 j = 0; j < 4; j++) sums[r] = fmaf(v.x[j], v.x[j], sums[r]);
        }
#pragma unroll
    for (u32 r = 0; r < NORMED_ROWS; r++) {
        if (r >= rows) break;
        f32 sum = warp_sum(sums[r]);
        if (lane == 0) of_warps[r][warp] = sum;
    }
    __syncthreads();
    for (u32 r = 0; r < rows; r++) {
        f32 sum = 0.0f;
#pragma unroll
        for (u32 w = 0; w < 8; w++) sum += of_warps[r][w];
        f32 scale = 1.0f / sqrtf(sum / (f32)width + n.eps);
        bool is_own = blockIdx.y == 0 && r % gridDim.x == blockIdx.x;
        if (is_own && threadIdx.x == 0) n.inv_rms[r] = scale;
        for (u32 i = threadIdx.x * 4; i < width; i += 1024) {
            u64 at = (u64)r * width + i;
            Few<4> v = four_of(n.x, n.x_bf16, at), w = few<4>(n.weight + i);
#pragma unroll
            for (u32 j = 0; j < 4; j++) v.x[j] = rounded(v.x[j] * scale * w.x[j], n.y_bf16);
            if (is_own) put_four(n.y, n.y_bf16, at, v);
            put_four(to, to_bf16, at, v);
        }
    }
    __syncthreads();
}
