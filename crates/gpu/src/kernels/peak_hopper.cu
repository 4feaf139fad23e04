// What Hopper's tensor cores can do at best: products straight from shared memory.

// Each group of four warps (two a block): `steps` rounds of four products of 64 rows by columns of which a thread has
// half as many sums, of lines of 128 bytes, random ones: with zeros a GPU needs less power, and is faster than with
// anything that is worth computing. `multiply` adds a product to the sums.
template <u32 SUMS, typename Multiply> DEVICE void products(f32* results, u32 steps, u32 any, u32 always, Multiply multiply) {
    SHARED(shared);
    const u32 LINE = 128, BYTES = (128 + 2 * SUMS) * LINE;
    for (u32 i = threadIdx.x; i < BYTES / 4; i += 256) ((u32*)shared)[i] = (mixed(i) & any) | always;
    products_may_read();
    __syncthreads();
    const unsigned char *a = shared + threadIdx.x / 128 * (64 * LINE), *b = shared + 128 * LINE;
    f32 sums[SUMS] = {};
    for (u32 step = 0; step < steps; step++) {
        wgmma_begin();
#pragma unroll
        for (u32 i = 0; i < LINE / 32; i++) multiply(sums, descriptor(a + i * 32, 1024, 16), descriptor(b + i * 32, 1024, 16));
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_sums_are_there(sums);
    f32 total = 0.0f;
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) total += sums[i];
    results[(u64)blockIdx.x * blockDim.x + threadIdx.x] = total;
}

// Products of 64 x 256 x 64 a round, as in grouped_hopper.cu, of numbers of size 0.5 to 1 and either sign.
KERNEL(256) hopper_matrix_products(f32* results, u32 steps) {
    products<128>(results, steps, 0x807f807fu, 0x3f003f00u, [](f32 (&sums)[128], u64 a, u64 b) { wgmma<true, true>(sums, a, b); });
}

// Of bytes 64 x 128 x 128, as in grouped_fp8.cu without scales, of the same.
KERNEL(256) hopper_byte_products(f32* results, u32 steps) {
    products<64>(results, steps, 0x87878787u, 0x30303030u, [](f32 (&sums)[64], u64 a, u64 b) { wgmma_e4m3<true>(sums, a, b); });
}
