// What Hopper's tensor cores can do at best: products straight from shared memory.

// Each group of four warps (two a block): `steps` rounds of products 64 x 256 x 64, as in grouped_hopper.cu, of pairs of 1 and 0.
KERNEL(256) hopper_matrix_products(f32* results, u32 steps, u32 pair) {
    SHARED(shared);
    const u32 DEPTH = 64, BYTES = (128 + 256) * DEPTH * 2;
    for (u32 i = threadIdx.x; i < BYTES / 4; i += 256) ((u32*)shared)[i] = pair;
    products_may_read();
    __syncthreads();
    const unsigned char *a = shared + threadIdx.x / 128 * (64 * DEPTH * 2), *b = shared + 128 * DEPTH * 2;
    f32 sums[128] = {};
    for (u32 step = 0; step < steps; step++) {
        wgmma_begin();
#pragma unroll
        for (u32 i = 0; i < DEPTH / 16; i++) wgmma<true, true>(sums, descriptor(a + i * 32, 1024, 16), descriptor(b + i * 32, 1024, 16));
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_sums_are_there(sums);
    f32 total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 128; i++) total += sums[i];
    results[(u64)blockIdx.x * blockDim.x + threadIdx.x] = total;
}

// The same of bytes: rounds of 64 x 128 x 128, as in grouped_fp8.cu without scales, of 1 and three 0.
KERNEL(256) hopper_byte_products(f32* results, u32 steps, u32 four) {
    SHARED(shared);
    const u32 LINE = 128, BYTES = (128 + 128) * LINE;
    for (u32 i = threadIdx.x; i < BYTES / 4; i += 256) ((u32*)shared)[i] = four;
    products_may_read();
    __syncthreads();
    const unsigned char *a = shared + threadIdx.x / 128 * (64 * LINE), *b = shared + 128 * LINE;
    f32 sums[64] = {};
    for (u32 step = 0; step < steps; step++) {
        wgmma_begin();
#pragma unroll
        for (u32 i = 0; i < LINE / 32; i++) wgmma_e4m3<true>(sums, descriptor(a + i * 32, 1024, 16), descriptor(b + i * 32, 1024, 16));
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_sums_are_there(sums);
    f32 total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 64; i++) total += sums[i];
    results[(u64)blockIdx.x * blockDim.x + threadIdx.x] = total;
}
