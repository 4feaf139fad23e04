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

DEVICE float4 four_of(const void* data, u32 is_bf16, u64 at) {
    if (!is_bf16) return *(const float4*)((const f32*)data + at);
    uint2 pairs = *(const uint2*)((const bf16*)data + at);
    return make_float4(bits_float(pairs.x << 16), bits_float(pairs.x & 0xffff0000u), bits_float(pairs.y << 16), bits_float(pairs.y & 0xffff0000u));
}
DEVICE void put_four(void* to, u32 is_bf16, u64 at, float4 x) {
    if (is_bf16) *(uint2*)((bf16*)to + at) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
    else *(float4*)((f32*)to + at) = x;
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
            float4 v = four_of(n.x, n.x_bf16, (u64)r * width + i);
            sums[r] = fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sums[r]))));
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
            float4 v = four_of(n.x, n.x_bf16, at), w = four_of(n.weight, 0, i);
            v = make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
            if (n.y_bf16) v = make_float4(rounded(v.x, 1), rounded(v.y, 1), rounded(v.z, 1), rounded(v.w, 1));
            if (is_own) put_four(n.y, n.y_bf16, at, v);
            put_four(to, to_bf16, at, v);
        }
    }
    __syncthreads();
}
