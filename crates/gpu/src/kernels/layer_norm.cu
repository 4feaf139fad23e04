// y = (x - mean) / std * weight + bias. See layer_norm.rs for the formulas. Elements go by fours where rows are whole
// vectors.

// A warp a row. `statistics` [rows, 2] are the mean and one over the deviation.
template <u32 N, typename X, typename Y>
DEVICE void forward(const X* __restrict__ x, const f32* __restrict__ weight, const f32* __restrict__ bias, f32 eps, Y* __restrict__ y,
                    f32* __restrict__ statistics, u32 rows, u32 width) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += (u64)row * width;
    y += (u64)row * width;
    f32 sum = 0.0f, squares = 0.0f;
#pragma unroll 4
    for (u32 i = lane * N; i < width; i += 32 * N) {
        Few<N> v = few<N>(x + i);
#pragma unroll
        for (u32 j = 0; j < N; j++) sum += v.x[j];
    }
    f32 mean = warp_sum(sum) / (f32)width;
#pragma unroll 4
    for (u32 i = lane * N; i < width; i += 32 * N) {
        Few<N> v = few<N>(x + i);
#pragma unroll
        for (u32 j = 0; j < N; j++) squares = fmaf(v.x[j] - mean, v.x[j] - mean, squares);
    }
    f32 scale = 1.0f / sqrtf(warp_sum(squares) / (f32)width + eps);
    if (lane == 0) {
        statistics[2 * row] = mean;
        statistics[2 * row + 1] = scale;
    }
#pragma unroll 4
    for (u32 i = lane * N; i < width; i += 32 * N) {
        Few<N> v = few<N>(x + i), w = few<N>(weight + i), b = few<N>(bias + i);
#pragma unroll
        for (u32 j = 0; j < N; j++) v.x[j] = fmaf((v.x[j] - mean) * scale, w.x[j], b.x[j]);
        put(y + i, v);
    }
}

const u32 ROWS_EACH = 16, WARPS = 8;

// A block has 16 rows: first its warps take two each and find what the rows' gradients are shifted by, then each
// thread goes down its columns, which adds the gradients of weight and bias up in registers, for its rows of
// `weights` and `biases`.
template <u32 N, typename X, typename Y>
DEVICE void backward(const Y* __restrict__ dy, const X* __restrict__ x, const f32* __restrict__ weight,
                     const f32* __restrict__ statistics, f32* __restrict__ dx, f32* __restrict__ weights, f32* __restrict__ biases,
                     u32 rows, u32 width) {
    __shared__ f32 shifts[ROWS_EACH], slopes[ROWS_EACH];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * ROWS_EACH, count = min(rows - first, ROWS_EACH);
    dy += (u64)first * width;
    x += (u64)first * width;
    dx += (u64)first * width;
    statistics += 2 * (u64)first;
    for (u32 row = warp; row < count; row += WARPS) {
        u64 at = (u64)row * width;
        f32 mean = statistics[2 * row], scale = statistics[2 * row + 1], shift = 0.0f, slope = 0.0f;
#pragma unroll 4
        for (u32 i = lane * N; i < width; i += 32 * N) {
            Few<N> d = few<N>(dy + at + i), v = few<N>(x + at + i), w = few<N>(weight + i);
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                f32 g = d.x[j] * w.x[j];
                shift += g;
                slope = fmaf(g, (v.x[j] - mean) * scale, slope);
            }
        }
        shift = warp_sum(shift);
        slope = warp_sum(slope);
        if (lane == 0) {
            shifts[row] = shift / (f32)width;
            slopes[row] = slope / (f32)width;
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x * N; i < width; i += 256 * N) {
        Few<N> of_weight = {}, of_bias = {}, w = few<N>(weight + i);
#pragma unroll 4
        for (u32 row = 0; row < count; row++) {
            u64 at = (u64)row * width + i;
            Few<N> d = few<N>(dy + at), v = few<N>(x + at), own;
            f32 mean = statistics[2 * row], scale = statistics[2 * row + 1], shift = shifts[row], slope = slopes[row];
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                f32 n = (v.x[j] - mean) * scale;
                own.x[j] = scale * (d.x[j] * w.x[j] - shift - n * slope);
                of_weight.x[j] = fmaf(d.x[j], n, of_weight.x[j]);
                of_bias.x[j] += d.x[j];
            }
            put(dx + at, own);
        }
        put(weights + (u64)blockIdx.x * width + i, of_weight);
        put(biases + (u64)blockIdx.x * width + i, of_bias);
    }
}

#define DEFINE(X, Y)                                                                                                          \
    KERNEL(256) layer_norm_##X##_##Y(const X* x, const f32* weight, const f32* bias, f32 eps, Y* y, f32* statistics,          \
                                     u32 rows, u32 width) {                                                                   \
        if (width % 4 == 0) forward<4>(x, weight, bias, eps, y, statistics, rows, width);                                     \
        else forward<1>(x, weight, bias, eps, y, statistics, rows, width);                                                    \
    }                                                                                                                         \
    KERNEL(256) layer_norm_backward_##X##_##Y(const Y* dy, const X* x, const f32* weight, const f32* statistics, f32* dx,     \
                                              f32* weights, f32* biases, u32 rows, u32 width) {                               \
        if (width % 4 == 0) backward<4>(dy, x, weight, statistics, dx, weights, biases, rows, width);                         \
        else backward<1>(dy, x, weight, statistics, dx, weights, biases, rows, width);                                        \
    }
DEFINE(f32, f32)
DEFINE(f32, bf16)
DEFINE(bf16, f32)
DEFINE(bf16, bf16)
