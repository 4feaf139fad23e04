// What the last of some blocks to be done does with what all of them have made.

// Whether all other ones of `count` blocks are done with what they wrote before, which then can be read. `arrived` is
// 0 before and after. One thread's fences are the block's, which has met before and meets after them (PTX, "causality
// order"): all threads' take longer.
DEVICE bool is_last_block(u32* arrived, u32 count) {
    __shared__ u32 is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(arrived, 1u) == count - 1;
        if (is_last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}
