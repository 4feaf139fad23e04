// y = x / rms(x) * weight, a warp a row. See rms_norm.rs for the formulas.

template <typename X, typename Y>
DEVICE void forward(const X* __restrict__ x, const f32* __restrict__ weight, f32 eps, Y* __restrict__ y,
                    f32* __restrict__ inv_rms, u32 rows, u32 width) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += (u64)row * width;
    y += (u64)row * width;
    f32 sum = 0.0f;
    for (u32 i = lane; i < width; i += 32) sum = fmaf(load(x[i]), load(x[i]), sum);
    f32 scale = 1.0f / sqrtf(warp_sum(sum) / (f32)width + eps);
    if (lane == 0) inv_rms[row] = scale;
    for (u32 i = lane; i < width; i += 32) store(y[i], load(x[i]) * scale * weight[i]);
}

// A warp takes `rows_each` rows one after the other and adds their part of the weight's gradient up in its row of `partials`.
template <typename X, typename Y>
DEVICE void backward(const Y* __restrict__ dy, const X* __restrict__ x, const f32* __restrict__ weight,
                     const f32* __restrict__ inv_rms, f32* __restrict__ dx, f32* __restrict__ partials, u32 rows, u32 width,
                     u32 rows_each) {
    u32 part = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    u32 first = part * rows_each, end = min(first + rows_each, rows);
    if (first >= rows) return;
    partials += (u64)part * width;
    for (u32 i = lane; i < width; i += 32) partials[i] = 0.0f;
    for (u32 row = first; row < end; row++) {
        u64 at = (u64)row * width;
        f32 sum = 0.0f;
        for (u32 i = lane; i < width; i += 32) sum = fmaf(load(dy[at + i]) * weight[i], load(x[at + i]), sum);
        f32 scale = inv_rms[row];
        f32 shift = warp_sum(sum) / (f32)width * scale * scale;
        for (u32 i = lane; i < width; i += 32) {
            f32 d = load(dy[at + i]), v = load(x[at + i]);
            dx[at + i] = scale * (d * weight[i] - v * shift);
            partials[i] = fmaf(d, v * scale, partials[i]);
        }
    }
}

// total[i] (+)= the sum of partials[:, i], in order.
KERNEL(256) rms_norm_add_partials(const f32* __restrict__ partials, f32* __restrict__ total, u32 parts, u32 width, u32 replace) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    f32 sum = replace ? 0.0f : total[i];
    for (u32 part = 0; part < parts; part++) sum += partials[(u64)part * width + i];
    total[i] = sum;
}

#define DEFINE(X, Y)                                                                                                          \
    KERNEL(256) rms_norm_##X##_##Y(const X* x, const f32* weight, f32 eps, Y* y, f32* inv_rms, u32 rows, u32 width) {         \
        forward(x, weight, eps, y, inv_rms, rows, width);                                                                     \
    }                                                                                                                         \
    KERNEL(256) rms_norm_backward_##X##_##Y(const Y* dy, const X* x, const f32* weight, const f32* inv_rms, f32* dx,          \
                                            f32* partials, u32 rows, u32 width, u32 rows_each) {                              \
        backward(dy, x, weight, inv_rms, dx, partials, rows, width, rows_each);                                               \
    }
DEFINE(f32, f32)
DEFINE(f32, bf16)
DEFINE(bf16, f32)
DEFINE(bf16, bf16)
