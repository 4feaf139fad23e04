// What the last of some blocks to be done does with what all of them have made.

// Whether all other ones of `count` blocks are done with what they wrote before, which then can be read. `arrived` is 0 before and after.
DEVICE bool is_last_block(u32* arrived, u32 count) {
    __shared__ u32 is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrived, 1u) == count - 1;
        if (is_last) *arrived = 0;
    }
    __syncthreads();
    if (is_last) __threadfence();
    return is_last;
}
