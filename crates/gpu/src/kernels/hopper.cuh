// Instructions of Hopper (sm_90a) alone: products by groups of four warps, straight from shared memory and without
// waiting, barriers in shared memory whose phases count arrivals and bytes, and copies of whole boxes of a tensor
// (TMA). The emulator has a twin of each function but `descriptor`.
#ifndef EMULATED

// A block has a multiprocessor to itself. Both numbers are there because registers are only handed over in kernels
// that say so (PTX, `setmaxnreg`).
#define HOPPER_KERNEL(max_threads) extern "C" __global__ void __launch_bounds__(max_threads, 1)

// A barrier whose phase is over after so many arrivals.
DEVICE void phases_begin(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void phase_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until the phase of this parity is over; phases count from 0, and the one before them, of parity 1, is over
// from the start. The thread sleeps meanwhile, for up to 10 ms a try: one that only tries again asks every 15 to 30
// clocks, and eight warps that do so take a clock in four of the pipe that copies to shared memory go through, too
// (counters of an H100: 38 tries a stage of gradients of weights).
DEVICE void phase_wait(u64* barrier, u32 parity) {
    const u32 MOST_NS = 10000000;
    u32 is_over;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(is_over) : "r"(shared_address(barrier)), "r"(parity), "r"(MOST_NS) : "memory");
    } while (!is_over);
}

// By the thread that began barriers, before the block's other threads and tensor copies use them.
DEVICE void phases_are_there() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The barrier's phase is not over before as many bytes more have come by tensor copies.
DEVICE void expect_bytes(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Before the first copy by a map that the host wrote to the GPU's memory (CUDA programming guide, "Using TMA to
// transfer multi-dimensional arrays").
DEVICE void map_is_there(const void* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// A tensor copy: the map's box from matrix z, row y, column x on goes to `to`, zeros where it is beyond the matrix. A
// row of the box is a line of 128 bytes whose chunks are swapped as `descriptor` says. The barrier gets the bytes of
// the whole box.
DEVICE void copy_box(unsigned char* to, const void* map, u32 x, u32 y, u32 z, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(shared_address(to)), "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)) : "memory");
}

// The same from block `block` of 64 columns on, for a map whose boxes have several of them: one after the other.
DEVICE void copy_blocks_box(unsigned char* to, const void* map, u32 block, u32 y, u32 z, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(shared_address(to)), "l"(map), "r"(0), "r"(y), "r"(block), "r"(z), "r"(shared_address(barrier)) : "memory");
}

// Makes this thread's writes to shared memory visible to products, which read it another way than loads do.
DEVICE void products_may_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A group of four warps gives registers back, or takes what others gave: N a thread from here on, a multiple of 8.
template <u32 N> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <u32 N> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// c += a b without waiting: a is 64 x 16 and b is 16 x 256 (bf16), as descriptors; is_major: along the depth. Warp w
// of the group has rows 16 w on; thread l of the warp has in c[4 j + 2 h + i] row l / 4 + 8 h, column 8 j + l % 4 * 2
// + i.
#define EIGHT(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
template <bool A_MAJOR, bool B_MAJOR> DEVICE void wgmma(f32 (&c)[128], u64 a, u64 b) {
    asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
                 "}, %128, %129, adds, 1, 1, %130, %131;\n}"
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56),
                   EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
                 : "l"(a), "l"(b), "n"(A_MAJOR ? 0 : 1), "n"(B_MAJOR ? 0 : 1));
}

// The same of bytes (E4M3), 64 x 32 and 32 x 128, both along the depth: c = a b, or c += a b. Columns as above.
template <bool ADDS> DEVICE void wgmma_e4m3(f32 (&c)[64], u64 a, u64 b) {
    asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, adds, 1, 1;\n}"
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
                 : "l"(a), "l"(b), "n"(ADDS ? 1 : 0));
}
#undef EIGHT

// Before the first product, and after other uses of its sums.
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of products are under way.
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// The sums are used from here on, not earlier.
template <u32 N> DEVICE void wgmma_sums_are_there(f32 (&c)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

#endif

// Where an operand lies in shared memory, from an address that is a multiple of 16 (PTX, "Matrix descriptor"): lines
// of 128 bytes whose chunks of 16 are swapped by the line's number modulo 8, eight lines to 1024 aligned bytes. Along
// the depth a line is a row's 64 elements, `line_bytes` lie between eight rows and the next, and `block_bytes` is 16.
// Across it a line is 64 rows' elements of one depth, `line_bytes` lie between eight of them and the next, and
// `block_bytes` between 64 rows and the next.
DEVICE u64 descriptor(const unsigned char* at, u32 line_bytes, u32 block_bytes) {
    return (u64)((shared_address(at) & 0x3ffff) >> 4) | (u64)(block_bytes >> 4) << 16 | (u64)(line_bytes >> 4) << 32 | 1ull << 62;
}
