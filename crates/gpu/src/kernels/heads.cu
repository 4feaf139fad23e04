// Products by head (heads.rs): each head multiplies columns of its own of x with rows of its own of w, for the few
// rows that a step of decoding has; with bf16 weights x is rounded. Blocks have four rows each; more rows read w
// again from the second-level cache.

const u32 AT_ONCE = 4, BLOCK_COLUMNS = 256;

// Columns from `start` on, each head's `step` after the one before's, of rows of `width`.
struct OfHeads {
    const void* data;
    u32 is_bf16, width, start, step;
    DEVICE_MEMBER u64 at(u32 row, u32 head) const { return (u64)row * width + start + head * step; }
};

// Eight numbers from `at` on, as many of them as there are, and zeros. `is_whole`: `at` is a multiple of 8.
DEVICE void load_up_to_eight(f32 (&x)[8], const OfHeads& from, u64 at, u32 count, u32 is_whole) {
    if (is_whole && count >= 8) return load_vector(x, from.data, from.is_bf16, at);
#pragma unroll
    for (u32 i = 0; i < 8; i++) x[i] = i < count ? load_any(from.data, from.is_bf16, at + i) : 0.0f;
}

#define HEADS const void *x, const void *w, void *y, u32 x_bf16, u32 w_bf16, u32 y_bf16, u32 rows, u32 num_rows, u32 is_whole, u32 x_width, \
              u32 x_start, u32 x_step, u32 w_width, u32 w_start, u32 w_step, u32 y_width, u32 y_start, u32 y_step
#define THE_X OfHeads{x, x_bf16, x_width, x_start, x_step}
#define THE_Y OfHeads{y, y_bf16, y_width, y_start, y_step}

// y_h = x_h w_h^T: a warp a column, which is one of the head's `num_rows` rows of w.
KERNEL(256) heads_nt(HEADS) {
    OfHeads of_x = THE_X, of_y = THE_Y, of_w = {w, w_bf16, w_width, 0, 0};
    u32 column = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, first = blockIdx.z * AT_ONCE;
    if (column >= num_rows) return;
    u64 of_column = (u64)(w_start + head * w_step + column) * w_width;
    f32 sums[AT_ONCE] = {};
    for (u32 k = lane * 8; k < w_width; k += 256) {
        f32 weights[8], own[8];
        load_up_to_eight(weights, of_w, of_column + k, w_width - k, is_whole);
#pragma unroll
        for (u32 r = 0; r < AT_ONCE; r++) {
            if (first + r >= rows) break;
            load_up_to_eight(own, of_x, of_x.at(first + r, head) + k, w_width - k, is_whole);
#pragma unroll
            for (u32 i = 0; i < 8; i++) sums[r] = fmaf(rounded(own[i], w_bf16), weights[i], sums[r]);
        }
    }
#pragma unroll
    for (u32 r = 0; r < AT_ONCE; r++) {
        f32 sum = warp_sum(sums[r]);
        if (lane == 0 && first + r < rows) store_any(y, y_bf16, of_y.at(first + r, head) + column, sum);
    }
}

// y_h = x_h w_h: a lane has eight columns, and a warp every eighth of the head's `num_rows` rows of w.
KERNEL(256) heads_nn(HEADS) {
    __shared__ f32 of_warps[8][AT_ONCE][BLOCK_COLUMNS];
    OfHeads of_x = THE_X, of_y = THE_Y, of_w = {w, w_bf16, w_width, 0, 0};
    u32 warp = threadIdx.x / 32, own = threadIdx.x % 32 * 8, column = blockIdx.x * BLOCK_COLUMNS + own, head = blockIdx.y;
    u32 first = blockIdx.z * AT_ONCE;
    f32 sums[AT_ONCE][8] = {};
    if (column < w_width)
#pragma unroll 4
        for (u32 k = warp; k < num_rows; k += 8) {
            f32 weights[8];
            load_up_to_eight(weights, of_w, (u64)(w_start + head * w_step + k) * w_width + column, w_width - column, is_whole);
#pragma unroll
            for (u32 r = 0; r < AT_ONCE; r++) {
                u32 row = min(first + r, rows - 1);
                f32 factor = rounded(load_any(x, x_bf16, of_x.at(row, head) + k), w_bf16);
#pragma unroll
                for (u32 i = 0; i < 8; i++) sums[r][i] = fmaf(factor, weights[i], sums[r][i]);
            }
        }
#pragma unroll
    for (u32 r = 0; r < AT_ONCE; r++)
#pragma unroll
        for (u32 i = 0; i < 8; i++) of_warps[warp][r][own + i] = sums[r][i];
    __syncthreads();
    u32 to = blockIdx.x * BLOCK_COLUMNS + threadIdx.x;
    if (to >= w_width) return;
#pragma unroll
    for (u32 r = 0; r < AT_ONCE; r++) {
        if (first + r >= rows) break;
        f32 sum = 0.0f;
#pragma unroll
        for (u32 other = 0; other < 8; other++) sum += of_warps[other][r][threadIdx.x];
        store_any(y, y_bf16, of_y.at(first + r, head) + to, sum);
    }
}
