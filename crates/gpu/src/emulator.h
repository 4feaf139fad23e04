// Runs kernel sources on the host's processor, for tests: a block's threads are fibers of one thread that take turns
// at barriers and at operations of a warp. Found here: wrong results, threads that do not meet at a barrier or a warp
// operation, reads of shared memory before it is written (it starts as NaN), missing waits for asynchronous copies
// (they arrive at the wait), and, by a second order of the threads, most missing barriers. Not found: anything about
// speed, or about memory ordering.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <ucontext.h>

#define EMULATED 1
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL(max_threads) static void
#define KERNEL_OF_TWO(max_threads) KERNEL(max_threads)
#define SHARED(name) unsigned char* const name = emulator::running->shared
#define __shared__ static thread_local
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

struct Size { u32 x, y, z; };

constexpr int WARP = 32, MAX_THREADS = 1024;
constexpr size_t STACK = 128 << 10;

enum State { READY, AT_BARRIER, AT_PHASE, IN_WARP, DONE };

struct Copy { void* to; const void* from; bool is_there; };

// A barrier whose phases count arrivals, in eight bytes of shared memory.
struct Phases { u16 arrivals, left; u32 phase; };

// A tensor's map: what the host's twin of the driver's function writes (`emulated.rs`), of elements of two bytes.
struct Map { u64 address; u32 columns, rows, matrices, box_rows, box_blocks; };
// What a phase waits for besides arrivals: tensor copies, and the bytes that it was told to expect.
struct Box { unsigned char* to; Map map; u32 x, y, z; };
struct Expected { const void* barrier; u32 bytes = 0; std::vector<Box> boxes; };

// A product that is under way: where its sums are, how many columns, the descriptors of what is multiplied, and
// whether that are bytes (E4M3, else bf16).
struct Product { float* sums; u32 columns; u64 a, b; bool a_major, b_major, are_bytes, adds; };

struct Fiber {
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t entry;
    jmp_buf at;
    bool is_started = false;
    State state = DONE;
    std::vector<std::vector<Copy>> copies;
    // Whether copies arrived that products may not read yet.
    bool has_unseen_copies = false;
    std::vector<std::vector<Product>> products;
    const Phases* phases = nullptr;
    u32 parity = 0;
    bool may_go_on() const { return state == READY || (state == AT_PHASE && (phases->phase & 1) != parity); }
};

struct Warp {
    const void* in[WARP];
    void* out[WARP];
    int operation, arrived;
};

struct Call {
    virtual void run() = 0;
    virtual ~Call() {}
};

// What one thread of the host runs at a time.
struct Machine {
    std::vector<std::unique_ptr<Fiber>> fibers;
    Warp warps[MAX_THREADS / WARP];
    std::vector<unsigned char> memory;
    std::vector<Expected> expected;
    unsigned char* shared = nullptr;
    u32 shared_bytes = 0;
    Size block_index, block_size, grid_size, thread_index;
    Call* call = nullptr;
    int current = 0;
    jmp_buf scheduler;
    ucontext_t first;
    std::string error;
};

inline thread_local std::unique_ptr<Machine> machine;
inline thread_local Machine* running = nullptr;

inline void leave(State state) {
    Machine& m = *running;
    Fiber& fiber = *m.fibers[m.current];
    fiber.state = state;
    if (_setjmp(fiber.at) == 0) _longjmp(m.scheduler, 1);
}

inline void fiber_main() {
    for (;;) {
        running->call->run();
        leave(DONE);
    }
}

inline void fail(const std::string& what) {
    Machine& m = *running;
    if (m.error.empty()) m.error = what;
    leave(DONE);
}

inline void enter(int thread) {
    Machine& m = *running;
    Fiber& fiber = *m.fibers[thread];
    m.current = thread;
    m.thread_index = {thread % m.block_size.x, thread / m.block_size.x % m.block_size.y, thread / m.block_size.x / m.block_size.y};
    if (_setjmp(m.scheduler) != 0) return;
    if (fiber.is_started) _longjmp(fiber.at, 1);
    fiber.is_started = true;
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = fiber.stack.get();
    fiber.entry.uc_stack.ss_size = STACK;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, fiber_main, 0);
    setcontext(&fiber.entry);
}

// Runs one block; threads take turns from the first or, `reversed`, from the last.
inline void run_block(int threads, size_t shared_bytes, bool reversed) {
    Machine& m = *running;
    memset(m.shared, 0xff, shared_bytes);
    m.expected.clear();
    for (int w = 0; w < threads / WARP; w++) m.warps[w].arrived = 0;
    for (int t = 0; t < threads; t++) {
        m.fibers[t]->state = READY;
        m.fibers[t]->copies.assign(1, {});
        m.fibers[t]->products.assign(1, {});
        m.fibers[t]->has_unseen_copies = false;
    }
    for (;;) {
        bool moved = false;
        for (int i = 0; i < threads; i++) {
            int t = reversed ? threads - 1 - i : i;
            if (!m.fibers[t]->may_go_on()) continue;
            moved = true;
            enter(t);
            if (!m.error.empty()) return;
        }
        if (moved) continue;
        int waiting = 0, done = 0;
        for (int t = 0; t < threads; t++) {
            waiting += m.fibers[t]->state == AT_BARRIER;
            done += m.fibers[t]->state == DONE;
        }
        if (done == threads) return;
        if (waiting != threads) {
            m.error = "of " + std::to_string(threads) + " threads " + std::to_string(waiting) + " wait at a barrier, " +
                      std::to_string(done) + " are done and the others wait for lanes of their warp or a phase";
            return;
        }
        for (int t = 0; t < threads; t++) m.fibers[t]->state = READY;
    }
}

inline const char* run(Call& call, const u32* grid, u32 threads, u32 shared_bytes, bool reversed) {
    static thread_local std::string error;
    if (threads % WARP != 0 || threads > MAX_THREADS || threads == 0) return "a block is not of 1 to 32 whole warps";
    if (!machine) machine.reset(new Machine);
    Machine& m = *machine;
    running = &m;
    while (m.fibers.size() < threads) m.fibers.emplace_back(new Fiber);
    m.memory.resize(shared_bytes + 2048);
    m.shared_bytes = shared_bytes;
    m.shared = (unsigned char*)(((uintptr_t)m.memory.data() + 1023) & ~(uintptr_t)1023);
    m.grid_size = {grid[0], grid[1], grid[2]};
    m.block_size = {threads, 1, 1};
    m.call = &call;
    u64 blocks = (u64)grid[0] * grid[1] * grid[2];
    for (u64 i = 0; i < blocks && m.error.empty(); i++) {
        u64 b = reversed ? blocks - 1 - i : i;
        m.block_index = {(u32)(b % grid[0]), (u32)(b / grid[0] % grid[1]), (u32)(b / grid[0] / grid[1])};
        run_block(threads, shared_bytes, reversed);
    }
    error = m.error;
    // Fibers that an error left in the middle are of no use any more.
    if (!error.empty()) machine.reset();
    return error.empty() ? nullptr : error.c_str();
}

// The whole warp does `f` once, with what every lane brought and where every lane expects its result.
template <typename In, typename Out, typename F> inline Out with_warp(int operation, In in, F f) {
    Machine& m = *running;
    Warp& warp = m.warps[m.current / WARP];
    int lane = m.current % WARP;
    Out out{};
    warp.in[lane] = &in;
    warp.out[lane] = &out;
    if (warp.arrived > 0 && warp.operation != operation) fail("lanes of a warp are at different operations");
    warp.operation = operation;
    if (++warp.arrived < WARP) {
        leave(IN_WARP);
        return out;
    }
    f((const In* const*)warp.in, (Out* const*)warp.out);
    warp.arrived = 0;
    for (int i = 0; i < WARP; i++) m.fibers[m.current / WARP * WARP + i]->state = READY;
    return out;
}

inline u16 half_at(const void* row, int i) { return ((const u16*)row)[i]; }
inline float widen_half(u16 x) {
    int exponent = x >> 10 & 31, mantissa = x & 1023;
    float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp((float)mantissa, -24)
                                 : std::ldexp((float)(mantissa + 1024), exponent - 25);
    return x & 0x8000 ? -size : size;
}
inline float widen(u16 x) {
    u32 bits = (u32)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

inline float decode_e4m3(int x) {
    int exponent = x >> 3 & 15, mantissa = x & 7;
    float size = exponent == 15 && mantissa == 7 ? NAN : exponent == 0 ? std::ldexp((float)mantissa, -9) : std::ldexp((float)(mantissa + 8), exponent - 10);
    return x & 0x80 ? -size : size;
}

struct E4m3 {
    float values[256];
    E4m3() { for (int i = 0; i < 256; i++) values[i] = decode_e4m3(i); }
};
inline const E4m3 e4m3;

// The kernel `f` with the arguments that `args` points to, one each. Kinds: p pointer, u integer of 32 bits, l of 64,
// f float.
template <typename... A> struct KernelCall : Call {
    void (*f)(A...);
    void** args;
    KernelCall(void (*f)(A...), void** args) : f(f), args(args) {}
    template <size_t... I> void go(std::index_sequence<I...>) { f(*(std::remove_cv_t<A>*)args[I]...); }
    void run() override { go(std::index_sequence_for<A...>{}); }
};
template <typename A> constexpr char kind() {
    return std::is_pointer_v<A> ? 'p' : std::is_floating_point_v<A> ? 'f' : sizeof(A) == 8 ? 'l' : 'u';
}
template <typename... A>
inline const char* launch(void (*f)(A...), const u32* grid, u32 threads, u32 shared_bytes, void** args, const char* kinds, u32 reversed) {
    static const char expected[] = {kind<A>()..., 0};
    if (strcmp(expected, kinds) != 0) return "the arguments are of other kinds than the kernel's parameters";
    KernelCall<A...> call(f, args);
    return run(call, grid, threads, shared_bytes, reversed != 0);
}

}  // namespace emulator

#define EMULATED_KERNEL(name)                                                                                                \
    extern "C" const char* emulated_##name(const u32* grid, u32 threads, u32 shared, void** args, const char* kinds, u32 r) { \
        return emulator::launch(&name, grid, threads, shared, args, kinds, r);                                               \
    }

#define threadIdx (emulator::running->thread_index)
#define blockIdx (emulator::running->block_index)
#define blockDim (emulator::running->block_size)
#define gridDim (emulator::running->grid_size)

static inline void __syncthreads() { emulator::leave(emulator::AT_BARRIER); }
static inline void __syncwarp() {
    emulator::with_warp<int, int>(1, 0, [](const int* const*, int* const*) {});
}
static inline void __threadfence() {}

template <typename T> static inline T from_lane(T x, int lane) {
    struct In { T x; int lane; };
    return emulator::with_warp<In, T>(2, In{x, lane}, [](const In* const* in, T* const* out) {
        for (int i = 0; i < 32; i++) *out[i] = in[in[i]->lane & 31]->x;
    });
}
template <typename T> static inline T from_lane_xor(T x, int mask) {
    return from_lane(x, (int)(emulator::running->current % 32) ^ mask);
}
template <typename T> static inline T from_lane_below(T x, int delta) {
    int lane = emulator::running->current % 32;
    return from_lane(x, lane >= delta ? lane - delta : lane);
}
static inline u32 lanes_where(bool x) {
    return emulator::with_warp<bool, u32>(3, x, [](const bool* const* in, u32* const* out) {
        u32 all = 0;
        for (int i = 0; i < 32; i++) all |= (u32)*in[i] << i;
        for (int i = 0; i < 32; i++) *out[i] = all;
    });
}
static inline u32 lanes_like(u32 x) {
    return emulator::with_warp<u32, u32>(4, x, [](const u32* const* in, u32* const* out) {
        for (int i = 0; i < 32; i++)
            for (int j = 0; j < 32; j++) *out[i] |= (u32)(*in[i] == *in[j]) << j;
    });
}

static inline u32 warp_greatest_of(u32 x) {
    return emulator::with_warp<u32, u32>(8, x, [](const u32* const* in, u32* const* out) {
        u32 y = *in[0];
        for (int i = 1; i < 32; i++) y = *in[i] > y ? *in[i] : y;
        for (int i = 0; i < 32; i++) *out[i] = y;
    });
}
static inline u32 warp_least_of(u32 x) { return ~warp_greatest_of(~x); }

static inline u32 float_bits(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
static inline float bits_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 __popc(u32 x) { return __builtin_popcount(x); }
static inline int __ffs(u32 x) { return __builtin_ffs(x); }
static inline int __clz(u32 x) { return x == 0 ? 32 : __builtin_clz(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// Fibers take turns, so a plain sum is one step.
template <typename T> static inline T atomicAdd(T* to, T x) { T old = *to; *to += x; return old; }
template <typename T> static inline T __ldg(const T* p) { return *p; }
static inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
static inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

// PTX, "Matrix fragments for mma.m16n8k16": group = lane / 4, pair = lane % 4; a's registers are rows (group, group +
// 8) by columns 2 pair + (0, 1), then the same 8 columns on; b's are rows 2 pair + (0, 1), then 8 rows on, of column
// group.
static inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct In { u32 a[4], b[2]; float c[4]; };
    struct Out { float c[4]; };
    In in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    Out result = emulator::with_warp<In, Out>(5, in, [](const In* const* in, Out* const* out) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, pair = lane % 4;
            for (int r = 0; r < 4; r++)
                for (int h = 0; h < 2; h++)
                    a[group + r % 2 * 8][pair * 2 + h + r / 2 * 8] = emulator::widen((u16)(in[lane]->a[r] >> (16 * h)));
            for (int r = 0; r < 2; r++)
                for (int h = 0; h < 2; h++) b[pair * 2 + h + r * 8][group] = emulator::widen((u16)(in[lane]->b[r] >> (16 * h)));
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float sum = in[lane]->c[i];
                for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
                out[lane]->c[i] = sum;
            }
    });
    for (int i = 0; i < 4; i++) c[i] = result.c[i];
}

static inline float half_value(u16 bits) { return emulator::widen_half(bits); }

static inline float one_over_root(float x) { return 1.0f / sqrtf(x); }
static inline float reciprocal(float x) { return 1.0f / x; }
static inline float power_of_two(float x) { return exp2f(x); }
static inline float power_of_two_if_asked(float x) { return power_of_two(x); }
static inline float larger(float x, float y) { return x != x || y != y ? NAN : x > y ? x : y; }
static inline void ask_for(const void*) {}
// Blocks run one after the other: nobody changes anything meanwhile.
static inline u32 read_now(const u32* at) { return *at; }
static inline void nap(u32) {}
static inline void is_global(const void*) {}
static inline u16 round_bf16(float x) {
    u32 bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40);
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline u32 pack_bf16(float low, float high) { return (u32)round_bf16(low) | ((u32)round_bf16(high) << 16); }
template <u32 MASK> static inline u32 masked_with(u32 x, u32 bits) { return (x & MASK) | bits; }
static inline u32 bytes_named(u32 low, u32 high, u32 selector) {
    u64 bytes = (u64)high << 32 | low;
    u32 y = 0;
    for (int i = 0; i < 4; i++) y |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return y;
}
static inline u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
    u16 halves[2];
    for (int h = 0; h < 2; h++)
        halves[h] = round_bf16(fmaf(emulator::widen((u16)(a >> 16 * h)), emulator::widen((u16)(b >> 16 * h)), emulator::widen((u16)(c >> 16 * h))));
    return halves[0] | (u32)halves[1] << 16;
}

struct EmulatedMatrices { u32 r[4]; };
static inline void emulated_load(u32 (&r)[4], const void* row, bool transposed) {
    struct In { const void* row; bool transposed; };
    EmulatedMatrices result = emulator::with_warp<In, EmulatedMatrices>(6, In{row, transposed}, [](const In* const* in, EmulatedMatrices* const* out) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                int major = lane / 4, minor = lane % 4 * 2;
                u32 halves[2];
                for (int h = 0; h < 2; h++)
                    halves[h] = in[0]->transposed ? emulator::half_at(in[8 * i + minor + h]->row, major)
                                                  : emulator::half_at(in[8 * i + major]->row, minor + h);
                out[lane]->r[i] = halves[0] | (halves[1] << 16);
            }
    });
    for (int i = 0; i < 4; i++) r[i] = result.r[i];
    if ((uintptr_t)row % 16 != 0) emulator::fail("a row of ldmatrix is not aligned to 16 bytes");
}
static inline void load_matrices(u32 (&r)[4], const void* row) { emulated_load(r, row, false); }
static inline void load_matrices_transposed(u32 (&r)[4], const void* row) { emulated_load(r, row, true); }

// Copies arrive as late as they may: at the wait.
static inline std::vector<std::vector<emulator::Copy>>& emulator_copies() {
    return emulator::running->fibers[emulator::running->current]->copies;
}
static inline void after_earlier() {}
static inline void after_earlier_asking(const void*, u32) {}

static inline void copy_async(void* to, const void* from, bool is_there) {
    if ((uintptr_t)to % 16 != 0 || (is_there && (uintptr_t)from % 16 != 0)) emulator::fail("a copy is not aligned to 16 bytes");
    emulator_copies().back().push_back({to, from, is_there});
}
static inline u64 read_once() { return 0; }
static inline void copy_async_cached(u32 to, const void* from, u64) { copy_async(emulator::running->shared + to, from, true); }
static inline void copy_commit() { emulator_copies().emplace_back(); }
template <int N> static inline void copy_wait() {
    auto& groups = emulator_copies();
    while (groups.size() > N + 1) {
        for (const auto& copy : groups.front()) {
            if (copy.is_there) memcpy(copy.to, copy.from, 16);
            else memset(copy.to, 0, 16);
        }
        emulator::running->fibers[emulator::running->current]->has_unseen_copies |= !groups.front().empty();
        groups.erase(groups.begin());
    }
}

// ---- Hopper's (hopper.cuh) ----

#define HOPPER_KERNEL(max_threads) KERNEL(max_threads)

static inline u32 shared_bytes() { return emulator::running->shared_bytes; }
static inline u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - emulator::running->shared); }

static inline emulator::Fiber& emulator_fiber() { return *emulator::running->fibers[emulator::running->current]; }
static inline void phases_begin(u64* barrier, u32 arrivals) {
    emulator::Phases phases{(u16)arrivals, (u16)arrivals, 0};
    memcpy(barrier, &phases, 8);
}
static inline void phases_are_there() {}
static inline void map_is_there(const void*) {}
static inline emulator::Expected& emulated_expected(const u64* barrier) {
    auto& all = emulator::running->expected;
    for (auto& expected : all)
        if (expected.barrier == barrier) return expected;
    all.push_back({barrier});
    return all.back();
}
static inline void expect_bytes(u64* barrier, u32 bytes) { emulated_expected(barrier).bytes += bytes; }
static inline void emulated_box(unsigned char* to, const emulator::Map& map, u32 x, u32 y, u32 z, u64* barrier) {
    if (shared_address(to) % 1024 != 0) emulator::fail("a box is not aligned to lines that are swapped");
    emulated_expected(barrier).boxes.push_back({to, map, x, y, z});
}
static inline void copy_box(unsigned char* to, const void* map, u32 x, u32 y, u32 z, u64* barrier) {
    const auto& of = *(const emulator::Map*)map;
    if (of.box_blocks != 1) emulator::fail("a box of several blocks of columns is copied as one of one");
    emulated_box(to, of, x, y, z, barrier);
}
static inline void copy_blocks_box(unsigned char* to, const void* map, u32 block, u32 y, u32 z, u64* barrier) {
    const auto& of = *(const emulator::Map*)map;
    if (of.box_blocks == 1) emulator::fail("a box of one block of columns is copied as one of several");
    emulated_box(to, of, block * 64, y, z, barrier);
}
// Boxes come as late as they may: when a phase waits for nothing else.
static inline void emulated_boxes(const u64* barrier) {
    auto& expected = emulated_expected(barrier);
    for (const auto& box : expected.boxes) {
        const auto& map = box.map;
        expected.bytes -= map.box_blocks * map.box_rows * 128;
        for (u32 i = 0; i < map.box_blocks * map.box_rows * 64; i++) {
            u32 at = i * 2, line = i / 64, row = box.y + line % map.box_rows, column = box.x + line / map.box_rows * 64 + i % 64;
            bool is_there = row < map.rows && column < map.columns && box.z < map.matrices;
            u64 from = ((u64)box.z * map.rows + row) * map.columns + column;
            *(u16*)(box.to + (at ^ (at >> 7 & 7) << 4)) = is_there ? ((const u16*)map.address)[from] : 0;
        }
    }
    if (expected.bytes != 0) emulator::fail("a phase expects other bytes than its tensor copies bring");
    expected = {barrier};
}
// A lane may speak for its warp.
static inline void phase_arrive(u64* barrier) {
    emulator::Machine& m = *emulator::running;
    for (int i = 0; i < emulator::WARP; i++)
        if (m.fibers[m.current / emulator::WARP * emulator::WARP + i]->has_unseen_copies)
            emulator::fail("products may not read copies yet that a phase says are there");
    auto& phases = *(emulator::Phases*)barrier;
    if (--phases.left > 0) return;
    emulated_boxes(barrier);
    phases.left = phases.arrivals;
    phases.phase++;
}
static inline void phase_wait(u64* barrier, u32 parity) {
    emulator::Fiber& fiber = emulator_fiber();
    fiber.phases = (const emulator::Phases*)barrier;
    fiber.parity = parity;
    if ((fiber.phases->phase & 1) == parity) emulator::leave(emulator::AT_PHASE);
}
static inline void products_may_read() { emulator_fiber().has_unseen_copies = false; }
template <u32 N> static inline void give_registers() {}
template <u32 N> static inline void take_registers() {}

// An element of an operand in shared memory, by PTX's "Matrix descriptor" and the canonical layouts of lines of 128
// bytes.
static inline float emulated_element(const emulator::Product& product, u64 descriptor, bool is_major, u32 row, u32 k) {
    u32 start = (u32)(descriptor & 0x3fff) << 4, block = (u32)(descriptor >> 16 & 0x3fff) << 4, line = (u32)(descriptor >> 32 & 0x3fff) << 4;
    u32 at = is_major ? start + row / 8 * line + row % 8 * 128 + k * (product.are_bytes ? 1 : 2)
                      : start + row / 64 * block + row % 64 * 2 + k / 8 * line + k % 8 * 128;
    at ^= (at >> 7 & 7) << 4;
    const unsigned char* element = emulator::running->shared + at;
    return product.are_bytes ? emulator::e4m3.values[*element] : emulator::widen(*(const u16*)element);
}
static inline void emulated_product(const emulator::Product& product) {
    const int depth = product.are_bytes ? 32 : 16;
    int lane = emulator::running->current % 32, warp = emulator::running->current / 32 % 4;
    float a[2][32], b[32];
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < depth; k++) a[h][k] = emulated_element(product, product.a, product.a_major, warp * 16 + lane / 4 + 8 * h, k);
    for (u32 j = 0; j < product.columns / 8; j++)
        for (int i = 0; i < 2; i++) {
            for (int k = 0; k < depth; k++) b[k] = emulated_element(product, product.b, product.b_major, j * 8 + lane % 4 * 2 + i, k);
            for (int h = 0; h < 2; h++) {
                float& sum = product.sums[4 * j + 2 * h + i];
                if (!product.adds) sum = 0.0f;
                for (int k = 0; k < depth; k++) sum += a[h][k] * b[k];
            }
        }
}
// The warp's product is under way from here on.
static inline void emulated_wgmma(const emulator::Product& product) {
    struct In { u64 a, b; };
    struct None {};
    emulator::with_warp<In, None>(7, In{product.a, product.b}, [](const In* const* in, None* const*) {
        for (int lane = 0; lane < 32; lane++) {
            if (in[lane]->a != in[0]->a || in[lane]->b != in[0]->b) emulator::fail("lanes of a warp have different descriptors");
            for (u64 x : {in[lane]->a, in[lane]->b})
                if (x >> 62 != 1 || (x >> 49 & 7) != 0) emulator::fail("a descriptor is not of lines of 128 bytes");
        }
    });
    emulator_fiber().products.back().push_back(product);
}
template <bool A_MAJOR, bool B_MAJOR> static inline void wgmma(float (&c)[128], u64 a, u64 b) {
    emulated_wgmma({c, 256, a, b, A_MAJOR, B_MAJOR, false, true});
}
template <bool ADDS> static inline void wgmma_e4m3(float (&c)[64], u64 a, u64 b) {
    emulated_wgmma({c, 128, a, b, true, true, true, ADDS});
}
static inline void wgmma_begin() { __syncwarp(); }
static inline void wgmma_commit() { emulator_fiber().products.emplace_back(); }
// Products are made as late as they may be: at the wait.
template <int N> static inline void wgmma_wait() {
    auto& groups = emulator_fiber().products;
    while (groups.size() > N + 1) {
        for (const auto& product : groups.front()) emulated_product(product);
        groups.erase(groups.begin());
    }
    // The wait is the whole warp's.
    __syncwarp();
}
template <u32 N> static inline void wgmma_sums_are_there(float (&)[N]) {}
