// y = x / rms(x) * weight. See rms_norm.rs for the formulas. Elements go by fours where rows are whole vectors.

// Pieces of a row that a thread keeps between its two passes over it.
const u32 HELD = 4;

// `by` threads have a row, thread `own` of them; where HOLDS they keep it, and what it is multiplied with comes
// meanwhile.
template <bool HOLDS, u32 N, typename X, typename Y, typename Sum>
DEVICE void norm_row(const X* __restrict__ x, const f32* __restrict__ weight, f32 eps, Y* __restrict__ y, f32* __restrict__ inv_rms, u32 width,
                     u32 own, u32 by, Sum sum_of) {
    Few<N> held[HOLDS ? HELD : 1], weights[HOLDS ? HELD : 1];
    f32 sum = 0.0f;
    auto add = [&](const Few<N>& v) {
#pragma unroll
        for (u32 j = 0; j < N; j++) sum = fmaf(v.x[j], v.x[j], sum);
    };
    if constexpr (HOLDS) {
#pragma unroll
        for (u32 p = 0; p < HELD; p++) {
            u32 i = (own + p * by) * N;
            held[p] = weights[p] = {};
            if (i < width) {
                held[p] = few<N>(x + i);
                weights[p] = few<N>(weight + i);
            }
        }
#pragma unroll
        for (u32 p = 0; p < HELD; p++) add(held[p]);
    } else {
#pragma unroll 4
        for (u32 i = own * N; i < width; i += by * N) add(few<N>(x + i));
    }
    f32 scale = scale_of(sum_of(sum), width, eps);
    if (own == 0) *inv_rms = scale;
    auto store = [&](u32 i, Few<N> v, const Few<N>& w) {
#pragma unroll
        for (u32 j = 0; j < N; j++) v.x[j] = v.x[j] * scale * w.x[j];
        put(y + i, v);
    };
    if constexpr (HOLDS) {
#pragma unroll
        for (u32 p = 0; p < HELD; p++)
            if ((own + p * by) * N < width) store((own + p * by) * N, held[p], weights[p]);
    } else {
#pragma unroll 4
        for (u32 i = own * N; i < width; i += by * N) store(i, few<N>(x + i), few<N>(weight + i));
    }
}

// A warp a row, or a block if there are as many blocks as rows: where rows are few, one warp would be long about it.
template <u32 N, typename X, typename Y>
DEVICE void forward(const X* __restrict__ x, const f32* __restrict__ weight, f32 eps, Y* __restrict__ y,
                    f32* __restrict__ inv_rms, u32 rows, u32 width) {
    auto of_block = [](f32 x) { return block_sum(x); };
    if (gridDim.x == rows) {
        u64 row = blockIdx.x, at = row * width;
        if (width <= HELD * 256 * N) norm_row<true, N>(x + at, weight, eps, y + at, inv_rms + row, width, threadIdx.x, 256, of_block);
        else norm_row<false, N>(x + at, weight, eps, y + at, inv_rms + row, width, threadIdx.x, 256, of_block);
        return;
    }
    u64 row = (blockIdx.x * 256 + threadIdx.x) / 32, at = row * width;
    if (row < rows) norm_row<false, N>(x + at, weight, eps, y + at, inv_rms + row, width, threadIdx.x % 32, 32, [](f32 x) { return warp_sum(x); });
}

const u32 ROWS_EACH = 16, WARPS = 8;

// A block has 16 rows: first its warps take two each and find what their gradients are shifted by, then each thread
// goes down its columns, which adds the weight's gradient up in registers, for its row of `partials`.
template <u32 N, typename X, typename Y>
DEVICE void backward(const Y* __restrict__ dy, const X* __restrict__ x, const f32* __restrict__ weight,
                     const f32* __restrict__ inv_rms, const f32* __restrict__ base, f32* __restrict__ dx, f32* __restrict__ partials, u32 rows, u32 width) {
    __shared__ f32 scales[ROWS_EACH], shifts[ROWS_EACH];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * ROWS_EACH, count = min(rows - first, ROWS_EACH);
    dy += (u64)first * width;
    x += (u64)first * width;
    dx += (u64)first * width;
    for (u32 row = warp; row < count; row += WARPS) {
        u64 at = (u64)row * width;
        f32 sum = 0.0f;
#pragma unroll 4
        for (u32 i = lane * N; i < width; i += 32 * N) {
            Few<N> d = few<N>(dy + at + i), v = few<N>(x + at + i), w = few<N>(weight + i);
#pragma unroll
            for (u32 j = 0; j < N; j++) sum = fmaf(d.x[j] * w.x[j], v.x[j], sum);
        }
        f32 scale = inv_rms[first + row];
        sum = warp_sum(sum);
        if (lane == 0) {
            scales[row] = scale;
            shifts[row] = sum / (f32)width * scale * scale;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x * N; i < width; i += 256 * N) {
        Few<N> part = {}, w = few<N>(weight + i);
#pragma unroll 4
        for (u32 row = 0; row < count; row++) {
            u64 at = (u64)row * width + i;
            Few<N> d = few<N>(dy + at), v = few<N>(x + at), own, around = {};
            if (base) around = few<N>(base + (u64)first * width + at);
            f32 scale = scales[row], shift = shifts[row];
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                own.x[j] = scale * (d.x[j] * w.x[j] - v.x[j] * shift) + around.x[j];
                part.x[j] = fmaf(d.x[j], v.x[j] * scale, part.x[j]);
            }
            put(dx + at, own);
        }
        put(partials + (u64)blockIdx.x * width + i, part);
    }
}

#define DEFINE(X, Y)                                                                                                          \
    KERNEL(256) rms_norm_##X##_##Y(const X* x, const f32* weight, f32 eps, Y* y, f32* inv_rms, u32 rows, u32 width) {         \
        if (width % 4 == 0) forward<4>(x, weight, eps, y, inv_rms, rows, width);                                              \
        else forward<1>(x, weight, eps, y, inv_rms, rows, width);                                                             \
    }                                                                                                                         \
    KERNEL(256) rms_norm_backward_##X##_##Y(const Y* dy, const X* x, const f32* weight, const f32* inv_rms, const f32* base,   \
                                            f32* dx, f32* partials, u32 rows, u32 width) {                                    \
        if (width % 4 == 0) backward<4>(dy, x, weight, inv_rms, base, dx, partials, rows, width);                             \
        else backward<1>(dy, x, weight, inv_rms, base, dx, partials, rows, width);                                            \
    }
DEFINE(f32, f32)
DEFINE(f32, bf16)
DEFINE(bf16, f32)
DEFINE(bf16, bf16)
