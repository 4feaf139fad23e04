// What the machine can do at best: products on registers alone, and reading memory.

const u32 SUMS = 8;

// Each thread: `steps` rounds of 8 independent multiply-adds.
KERNEL(256) multiply_adds(f32* results, u32 steps, f32 factor, f32 term) {
    f32 sums[SUMS];
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) sums[i] = term + (f32)threadIdx.x;
#pragma unroll 4
    for (u32 step = 0; step < steps; step++)
#pragma unroll
        for (u32 i = 0; i < SUMS; i++) sums[i] = fmaf(sums[i], factor, term);
    f32 total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) total += sums[i];
    results[(u64)blockIdx.x * blockDim.x + threadIdx.x] = total;
}

// Each warp: `steps` rounds of 8 independent products of 16 x 8 x 16 by mma.sync, of random numbers of size 0.5 to 1
// and either sign: zeros would need less power.
KERNEL(256) matrix_products(f32* results, u32 steps) {
    f32 sums[SUMS][4] = {};
    u32 a[4], b[2];
#pragma unroll
    for (u32 i = 0; i < 4; i++) a[i] = (mixed(6 * threadIdx.x + i) & 0x807f807fu) | 0x3f003f00u;
#pragma unroll
    for (u32 i = 0; i < 2; i++) b[i] = (mixed(6 * threadIdx.x + 4 + i) & 0x807f807fu) | 0x3f003f00u;
#pragma unroll 4
    for (u32 step = 0; step < steps; step++)
#pragma unroll
        for (u32 i = 0; i < SUMS; i++) mma_bf16(sums[i], a, b[0], b[1]);
    f32 total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) total += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    results[(u64)blockIdx.x * blockDim.x + threadIdx.x] = total;
}

// Sums `len` vectors of 16 bytes, as whole numbers.
KERNEL(256) read_memory(const uint4* data, u32* results, u32 len) {
    u32 sum = 0;
#pragma unroll 4
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < len; i += (u64)gridDim.x * blockDim.x) {
        uint4 x = data[i];
        sum += x.x ^ x.y ^ x.z ^ x.w;
    }
    results[(u64)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Copies `len` vectors of 16 bytes.
KERNEL(256) copy_memory(const uint4* from, uint4* to, u32 len) {
#pragma unroll 4
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < len; i += (u64)gridDim.x * blockDim.x) to[i] = from[i];
}
