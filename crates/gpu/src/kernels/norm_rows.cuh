// The norm of few rows as the beginning of a kernel that multiplies with them: a launch of its own takes longer than
// all blocks doing it.

// As in rms_norm.cu. With no `x` there is nothing to norm.
struct Norm {
    const void* x;
    const f32* weight;
    f32 eps;
    void* y;
    f32* inv_rms;
    u32 x_bf16, y_bf16;
};

#define NORM const void *norm_x, const f32 *norm_weight, f32 norm_eps, void *norm_y, f32 *norm_inv_rms, u32 norm_x_bf16, u32 norm_y_bf16
#define THE_NORM Norm{norm_x, norm_weight, norm_eps, norm_y, norm_inv_rms, norm_x_bf16, norm_y_bf16}

DEVICE void put_four(void* to, u32 is_bf16, u64 at, const Few<4>& four) {
    if (is_bf16) put((bf16*)to + at, four);
    else put((f32*)to + at, four);
}

// Normed rows in shared memory as they lie elsewhere, in f32. Whoever takes them has `put_at`, for four neighbours of
// a row.
struct RowsInOrder {
    f32* to;
    u32 width;
    DEVICE_MEMBER void put_at(u32 row, u32 i, const Few<4>& four) const { put(to + row * width + i, four); }
};

// The normed rows: the block's own go to y, too.
template <typename To> struct NormedRows {
    const Norm& norm;
    const To& to;
    u32 width;
    DEVICE_MEMBER bool is_own(u32 row) const { return blockIdx.y == 0 && row % gridDim.x == blockIdx.x; }
    DEVICE_MEMBER void put_normed(u32 row, u32 i, Few<4> v, const Few<4>& w, f32 scale) const {
#pragma unroll
        for (u32 j = 0; j < 4; j++) v.x[j] = rounded(v.x[j] * scale * w.x[j], norm.y_bf16);
        if (is_own(row)) put_four(norm.y, norm.y_bf16, (u64)row * width + i, v);
        to.put_at(row, i, v);
    }
};

// Asks for the weight before earlier kernels are done, which do not write it.
DEVICE void ask_for_weight(const Norm& norm, u32 width) {
    if (norm.x && blockIdx.x == 0 && threadIdx.x * 32 < width) ask_for(norm.weight + threadIdx.x * 32);
}

// A row of up to 4,096 elements, and what it is multiplied with, in the registers of a block: asked for before they
// are needed.
struct HeldRow {
    static const u32 FOURS = 4;
    Few<4> x[FOURS], weights[FOURS];
    static DEVICE_MEMBER bool holds(u32 width) { return width <= FOURS * 1024; }
    static DEVICE_MEMBER u32 place(u32 p) { return p * 1024 + threadIdx.x * 4; }
    DEVICE_MEMBER void load(const Norm& norm, u32 width) {
        if (!holds(width)) return;
#pragma unroll
        for (u32 p = 0; p < FOURS; p++) {
            x[p] = weights[p] = {};
            if (place(p) >= width) continue;
            x[p] = norm.x_bf16 ? few<4>((const bf16*)norm.x + place(p)) : few<4>((const f32*)norm.x + place(p));
            weights[p] = few<4>(norm.weight + place(p));
        }
    }
};

// One row, by all warps.
template <typename To, typename T> DEVICE void norm_one(const NormedRows<To>& n, const T* x, const HeldRow& held) {
    __shared__ f32 of_warps[8];
    bool is_held = HeldRow::holds(n.width);
    f32 sum = 0.0f;
    if (is_held) {
#pragma unroll
        for (u32 p = 0; p < HeldRow::FOURS; p++) sum = add_squares(sum, held.x[p]);
    } else {
        for (u32 i = threadIdx.x * 4; i < n.width; i += 1024) sum = add_squares(sum, few<4>(x + i));
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (u32 w = 0; w < 8; w++) sum += of_warps[w];
    f32 scale = scale_of(sum, n.width, n.norm.eps);
    if (n.is_own(0) && threadIdx.x == 0) n.norm.inv_rms[0] = scale;
    if (is_held) {
#pragma unroll
        for (u32 p = 0; p < HeldRow::FOURS; p++)
            if (HeldRow::place(p) < n.width) n.put_normed(0, HeldRow::place(p), held.x[p], held.weights[p], scale);
        return;
    }
    for (u32 i = threadIdx.x * 4; i < n.width; i += 1024) n.put_normed(0, i, few<4>(x + i), few<4>(n.norm.weight + i), scale);
}

// Up to eight rows, one a warp: what the eight warps of one row have there, its lanes have one after the other. All
// of 1,024 elements are on their way before the first is needed.
template <typename To, typename T> DEVICE void norm_by_warps(const NormedRows<To>& n, const T* x, u32 rows) {
    u32 row = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += (u64)row * n.width;
    f32 of_warps[8] = {}, sum = 0.0f;
    for (u32 start = lane * 4; start < n.width; start += 1024) {
        Few<4> v[8];
#pragma unroll
        for (u32 w = 0; w < 8; w++) v[w] = few<4>(x + (start + w * 128 < n.width ? start + w * 128 : 0));
#pragma unroll
        for (u32 w = 0; w < 8; w++)
            if (start + w * 128 < n.width) of_warps[w] = add_squares(of_warps[w], v[w]);
    }
#pragma unroll
    for (u32 w = 0; w < 8; w++) sum += warp_sum(of_warps[w]);
    f32 scale = scale_of(sum, n.width, n.norm.eps);
    if (n.is_own(row) && lane == 0) n.norm.inv_rms[row] = scale;
#pragma unroll 4
    for (u32 i = lane * 4; i < n.width; i += 128) n.put_normed(row, i, few<4>(x + i), few<4>(n.norm.weight + i), scale);
}

template <typename To, typename T> DEVICE void norm_as(const NormedRows<To>& n, const T* x, u32 rows, const HeldRow& held) {
    if (rows == 1) norm_one(n, x, held);
    else norm_by_warps(n, x, rows);
}

// Hands the `rows` normed rows of whole fours to `to`, and those that are this block's to y: the numbers are those of
// y, and sums are taken in the order of rms_norm.cu. A whole block of 256 threads, which then all see them. One row
// was loaded before.
template <typename To> DEVICE void norm_rows(const Norm& n, const To& to, u32 rows, u32 width, const HeldRow& held) {
    NormedRows<To> normed = {n, to, width};
    if (n.x_bf16) norm_as(normed, (const bf16*)n.x, rows, held);
    else norm_as(normed, (const f32*)n.x, rows, held);
    __syncthreads();
}
