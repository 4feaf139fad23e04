// Products of up to 64 rows on tensor cores, as in decoding several texts: tiles of 128 rows would keep a few multiprocessors busy. A block
// has 32 columns, whose rows of B its eight warps read once, each its part of the depth, straight into the fragments of instructions, and
// adds up what they have. Which elements of the depth an instruction takes for which of its own does not matter as long as both operands
// have the same: a lane takes eight neighbours.

const u32 SOME = 64, SOME_COLUMNS = 32, SOME_STRIDE = SOME + 8;

// Rows of B that are bf16 already.
struct Bf16Rows {
    const Operand& b;
    DEVICE_MEMBER void pairs(u32 (&x)[4], u32 row, u32 k) const {
        uint4 words = *(const uint4*)((const bf16*)b.data + b.row(row) + k);
        x[0] = words.x;
        x[1] = words.y;
        x[2] = words.z;
        x[3] = words.w;
    }
};

DEVICE void pack_pairs(u32 (&x)[4], const f32 (&values)[8]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
}

// Eight elements of a row of A from `k` on, or zeros.
DEVICE void pairs_of(u32 (&x)[4], const Operand& a, u32 row, u32 k, bool is_there) {
    x[0] = x[1] = x[2] = x[3] = 0;
    if (!is_there) return;
    if (a.is_bf16) return Bf16Rows{a}.pairs(x, row, k);
    f32 values[8];
    load_vector(values, a.data, 0, a.row(row) + k);
    pack_pairs(x, values);
}

// The warp's part of the depth, of up to 8 GROUPS rows. A single group leaves registers for what several steps read.
template <u32 GROUPS, typename Matrix>
DEVICE void add_some_rows(f32 (&sums)[2][GROUPS][4], const Problem& p, const Matrix& matrix) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, column = p.column + line;
    // Every lane takes part in instructions as long as one has something.
    u32 steps = p.depth > warp * 32 ? (p.depth - warp * 32 + 255) / 256 : 0;
#pragma unroll (GROUPS == 1 ? 4 : 1)
    for (u32 step = 0; step < steps; step++) {
        u32 k = warp * 32 + step * 256 + lane % 4 * 8;
        bool is_inside = k < p.depth;
        u32 w[2][2][4] = {}, x[GROUPS][4];
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (is_inside && column + 8 * i < p.columns) matrix.pairs(w[i / 2][i % 2], column + 8 * i, k);
#pragma unroll
        for (u32 n = 0; n < GROUPS; n++)
            if (8 * n < p.rows) pairs_of(x[n], p.a, 8 * n + line, k, is_inside && 8 * n + line < p.rows);
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 s = 0; s < 4; s += 2) {
                u32 fragment[4] = {w[m][0][s], w[m][1][s], w[m][0][s + 1], w[m][1][s + 1]};
#pragma unroll
                for (u32 n = 0; n < GROUPS; n++)
                    if (8 * n < p.rows) mma_bf16(sums[m][n], fragment, x[n][s], x[n][s + 1]);
            }
    }
}

template <u32 GROUPS, typename Matrix>
DEVICE void some_rows_of(const Problem& p, const Matrix& matrix, const Store& store, f32 (&of_warps)[8][16 * SOME_STRIDE]) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4;
    f32 sums[2][GROUPS][4] = {};
    add_some_rows<GROUPS>(sums, p, matrix);
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
#pragma unroll
        for (u32 n = 0; n < GROUPS; n++) {
            if (8 * n >= p.rows) continue;
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                *(float2*)(of_warps[warp] + (line + 8 * half) * SOME_STRIDE + 8 * n + lane % 4 * 2) =
                    make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < 16 * p.rows; i += 256) {
            u32 of_tile = i % 16, row = i / 16, to = p.column + 16 * m + of_tile;
            f32 sum = 0.0f;
#pragma unroll
            for (u32 other = 0; other < 8; other++) sum += of_warps[other][of_tile * SOME_STRIDE + row];
            if (to < p.columns) store.take(0, p.row + row, to, sum, 0.0f);
        }
        __syncthreads();
    }
}

template <typename Matrix> DEVICE void some_rows(const Problem& p, const Matrix& matrix, const Store& store) {
    __shared__ __align__(16) f32 of_warps[8][16 * SOME_STRIDE];
    if (p.rows <= 8) some_rows_of<1>(p, matrix, store, of_warps);
    else some_rows_of<SOME / 8>(p, matrix, store, of_warps);
}
