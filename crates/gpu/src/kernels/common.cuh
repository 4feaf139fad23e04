// What every kernel source begins with: types, conversions, and the few instructions that CUDA C++ has no name for.
// Nothing is included, so that NVRTC needs no header files. The emulator (emulator.h) has a twin of each function in
// the first half.
#ifndef EMULATED

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define KERNEL(max_threads) extern "C" __global__ void __launch_bounds__(max_threads)
// Two blocks are to be on a multiprocessor at a time.
#define KERNEL_OF_TWO(max_threads) extern "C" __global__ void __launch_bounds__(max_threads, 2)
// The dynamic shared memory of a block, aligned for vectors and tensor copies.
#define SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }

template <typename T> DEVICE T from_lane(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
template <typename T> DEVICE T from_lane_xor(T x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
template <typename T> DEVICE T from_lane_below(T x, int delta) { return __shfl_up_sync(0xffffffffu, x, delta); }
DEVICE u32 lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE u32 lanes_like(u32 x) { return __match_any_sync(0xffffffffu, x); }

// The greatest and the least of a warp's numbers, in every lane.
DEVICE u32 warp_greatest_of(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
DEVICE u32 warp_least_of(u32 x) { return __reduce_min_sync(0xffffffffu, x); }

// Bytes of shared memory that the launch gave the block.
DEVICE u32 shared_bytes() {
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// c += a b over a warp: a is 16 x 16 and b is 16 x 8 (bf16, the fragments of PTX's m16n8k16), c is 16 x 8 in f32.
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements: lane 8 i + j names row j of matrix i.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// The same, each matrix transposed.
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// An f16 by its bits.
DEVICE float half_value(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// To the nearest, ties to even; NaN stays NaN. One instruction for two of them, of which plain arithmetic takes
// fifteen.
DEVICE u16 round_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// a b + c for both halves of words of two bf16 numbers.
DEVICE u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// `x & MASK | bits` as one instruction, for which `bits`, a constant, has to be in a register.
template <u32 MASK> DEVICE u32 masked_with(u32 x, u32 bits) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "n"(MASK), "r"(bits));
    return y;
}

// Of the bytes of `low` and `high`, numbered 0 to 7, those that the selector's four lowest digits name.
DEVICE u32 bytes_named(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// One over x, to two units in the last place: a division asks for the few numbers with which that is harder, and
// waits for the answer.
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// One over the root of x, to two units in the last place: a root and a division have fifty instructions.
DEVICE float one_over_root(float x) {
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two to the power of x, to two units in the last place; what is below normal floats is 0.
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// An address that comes from memory is one of global memory, which the compiler cannot know: it would load in a way
// that takes any.
DEVICE void is_global(const void* at) { __builtin_assume(__isGlobal(at)); }

// The same, only where it is asked for: the compiler does not work it out ahead of a choice.
DEVICE float power_of_two_if_asked(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger one, or NaN if either is.
DEVICE float larger(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Asks for the line at `at`, which is there, to be in the second-level cache soon.
DEVICE void ask_for(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// A number that other blocks change meanwhile, and so many nanoseconds in which a thread does nothing, about.
DEVICE u32 read_now(const u32* at) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
DEVICE void nap(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// What every kernel begins with (sources.rs puts it there): the blocks of a kernel that follows may come as soon as
// there is room for them, and this one's wait until all that is written before them is there (PTX, "griddepcontrol").
// It does nothing where the driver was not told that kernels may overlap so.
DEVICE void after_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, and the warp asks for `bytes` from `from` on meanwhile, which nobody writes while kernels read them.
DEVICE void after_earlier_asking(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (u32 at = threadIdx.x % 32 * 128; at < bytes; at += 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)from + at));
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Copies 16 bytes from global to shared memory without waiting; zeros if not `is_there` (`from` is not read then).
DEVICE void copy_async(void* to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
// How copies are cached of what nobody reads again soon: it leaves the second-level cache before what every step
// needs, such as instructions.
DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Copies 16 bytes that are there to an address of shared memory. The second-level cache gets the whole line from
// memory at once. (An H100, weights of OLMoE's experts: 2.87 to 2.97 TB/s; blocks of four bits, which lines of
// weights share 128 bytes of, 3% as well.)
DEVICE void copy_async_cached(u32 to, const void* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "l"(policy) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread's copies are under way.
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

#endif

typedef float f32;
struct bf16 { u16 bits; };

DEVICE float load(float x) { return x; }
DEVICE float load(bf16 x) { return bits_float((u32)x.bits << 16); }

DEVICE void store(float& to, float x) { to = x; }
DEVICE void store(bf16& to, float x) { to.bits = round_bf16(x); }
// As a bf16 number would be, if it is to be one.
DEVICE f32 rounded(f32 x, u32 is_rounded) {
    if (!is_rounded) return x;
    bf16 y;
    store(y, x);
    return load(y);
}

// Any float type, known at run time.
DEVICE f32 load_any(const void* p, u32 is_bf16, u64 i) { return is_bf16 ? load(((const bf16*)p)[i]) : ((const f32*)p)[i]; }
DEVICE void store_any(void* p, u32 is_bf16, u64 i, f32 x) {
    if (is_bf16) store(((bf16*)p)[i], x);
    else ((f32*)p)[i] = x;
}

// What kernels are told of numbers that are bf16 in the order of blocks' levels (small_m_gemm.cuh), and where of each
// 32 the element of a column is: a lane's four of the first 16 and four of the others are neighbours, of four in
// pairs (0, 2), (1, 3).
const u32 IN_LEVELS = 2;
DEVICE u32 place_in_levels(u32 column) {
    return (column & ~31u) | (column & 12) << 1 | (column & 16) >> 2 | (column & 1) << 1 | (column & 2) >> 1;
}

// Eight bf16 numbers.
DEVICE void unpack(f32 (&x)[8], uint4 words) {
    u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        x[2 * i] = bits_float(pairs[i] << 16);
        x[2 * i + 1] = bits_float(pairs[i] & 0xffff0000u);
    }
}

// 8 elements from `at` on, a multiple of 8.
DEVICE void load_vector(f32 (&x)[8], const void* data, u32 is_bf16, u64 at) {
    if (is_bf16) return unpack(x, *(const uint4*)((const bf16*)data + at));
    const float4* from = (const float4*)((const f32*)data + at);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float4 four = from[i];
        x[4 * i] = four.x;
        x[4 * i + 1] = four.y;
        x[4 * i + 2] = four.z;
        x[4 * i + 3] = four.w;
    }
}

// Eight numbers as bf16.
DEVICE uint4 packed(const f32 (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

DEVICE void store_vector(void* to, u32 is_bf16, u64 at, const f32 (&x)[8]) {
    if (is_bf16) {
        *(uint4*)((bf16*)to + at) = packed(x);
        return;
    }
    float4* four = (float4*)((f32*)to + at);
    four[0] = make_float4(x[0], x[1], x[2], x[3]);
    four[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Bits that look random, of a number.
DEVICE u32 mixed(u32 x) {
    x = (x + 1) * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    return x ^ x >> 13;
}

// Sums and maxima over a warp, the same in every lane and in the same order always.
template <typename T> DEVICE T warp_sum(T x) {
    for (int mask = 16; mask > 0; mask >>= 1) x += from_lane_xor(x, mask);
    return x;
}
DEVICE float warp_max(float x) {
    for (int mask = 16; mask > 0; mask >>= 1) {
        x = larger(x, from_lane_xor(x, mask));
    }
    return x;
}

// The largest whole number of a warp.
template <typename T> DEVICE T warp_largest(T x) {
    for (int mask = 16; mask > 0; mask >>= 1) {
        T other = from_lane_xor(x, mask);
        x = other > x ? other : x;
    }
    return x;
}

// A whole number in the order of the float, the same for both zeros; NaN gets 0, the least.
DEVICE u32 ordered(f32 x) {
    if (x != x) return 0;
    u32 bits = float_bits(x + 0.0f);
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

// The sum of `own` over the lanes up to this one.
template <typename T> DEVICE T warp_sum_up_to(T own) {
    for (int delta = 1; delta < 32; delta *= 2) {
        T other = from_lane_below(own, delta);
        if (threadIdx.x % 32 >= (u32)delta) own += other;
    }
    return own;
}

// The sum of `own` over the threads of a block of whole warps that come before this one; `all` is that over all.
template <typename T> DEVICE T sum_below(T own, T& all) {
    __shared__ T warps[32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T sum = warp_sum_up_to(own), below = 0;
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    all = 0;
    for (u32 w = 0; w < blockDim.x / 32; w++) {
        if (w < warp) below += warps[w];
        all += warps[w];
    }
    __syncthreads();
    return below + sum - own;
}

// The sum over a block of whole warps (at most 32), the same in every thread. All threads of the block take part.
DEVICE float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.0f;
    for (u32 i = 0; i < blockDim.x / 32; i++) total += sums[i];
    return total;
}
