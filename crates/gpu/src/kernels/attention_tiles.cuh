// What the kernels of attention on tensor cores share: tiles in shared memory, and parts of the keys.

const f32 LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// ---- tiles in shared memory: rows of DIM elements, in vectors of 8 whose order differs by row, so that those of 8
// rows that a matrix load reads lie in different banks ----

template <u32 DIM> DEVICE u32 spot(u32 row, u32 chunk) { return row * DIM * 2 + (chunk ^ (row & 7)) * 16; }

// From where a lane's row and vector lie, the first or second of a row, so many rows (a multiple of 8) and elements
// (of 16) further: the order of vectors is that of the lane's row, and what differs between loads is known when this
// is compiled.
template <u32 DIM> DEVICE u32 further(u32 spot, u32 rows, u32 elements) {
    u32 chunk = elements / 8;
    return (spot ^ (chunk & 7) * 16) + (chunk & ~7u) * 16 + rows * DIM * 2;
}

// The left operand: 16 rows of a tile from `row`, a multiple of 8, and 16 elements from `k`.
template <u32 DIM> DEVICE void load_left(u32 (&r)[4], const unsigned char* tile, u32 row, u32 k) {
    u32 lane = threadIdx.x % 32;
    load_matrices(r, tile + further<DIM>(spot<DIM>(lane % 16, lane / 16), row, k));
}
// The right one of A B^T: 16 rows of B from `row`, which become columns, 16 elements from `k`. Two pairs of
// registers.
template <u32 DIM> DEVICE void load_right(u32 (&r)[4], const unsigned char* tile, u32 row, u32 k) {
    u32 lane = threadIdx.x % 32;
    load_matrices(r, tile + further<DIM>(spot<DIM>(lane % 8 + lane / 16 * 8, lane / 8 & 1), row, k));
}
// The right one of A B: 16 rows of B from `row`, along the sum, 16 columns from `column`.
template <u32 DIM> DEVICE void load_right_down(u32 (&r)[4], const unsigned char* tile, u32 row, u32 column) {
    u32 lane = threadIdx.x % 32;
    load_matrices_transposed(r, tile + further<DIM>(spot<DIM>(lane % 16, lane / 16), row, column));
}

// The rows' block, with `each` blocks of the grid: the last ones, which see most keys, come first.
DEVICE u32 block_from_last(u32 each) { return (gridDim.x - 1 - blockIdx.x) / each; }

// ---- parts of the keys ----

// Adds a sink to a row's largest score and sum of exponentials; what sums shrink by.
DEVICE f32 add_sink(f32 sink, f32& top, f32& total) {
    sink *= LOG2_E;
    f32 new_top = sink > top ? sink : top, factor = power_of_two(top - new_top);
    total = total * factor + power_of_two(sink - new_top);
    top = new_top;
    return factor;
}

// What a block has of its rows: their place among all rows, and of which keys these are the sums. With several parts
// a row's are joined by another kernel: each [value_dim] sums, the largest score and the sum of exponentials.
struct Parts {
    f32* data;
    u32 count, keys;
    DEVICE_MEMBER f32* of(const Sizes& s, u32 r, u32 part) const {
        u64 row = ((u64)blockIdx.z * s.kv_heads + blockIdx.y) * s.rows() + r;
        return data + (row * count + part) * (s.value_dim + 2);
    }
};

// Joins the parts of row blockIdx.x of a key head, in an order that is always the same; a block of one warp a row. A
// lane has every 32nd part's largest score and sum, and every 32nd column of the sums, of which there are 32
// MOST_COLUMNS at most.
template <u32 MOST_COLUMNS> DEVICE void join_parts(f32* data, u32 count, const f32* sinks, bf16* o, f32* lse, const Sizes& s) {
    Parts parts = {data, count, 0};
    u32 r = blockIdx.x, g = blockIdx.y, lane = threadIdx.x, dim = s.value_dim;
    f32 top = bits_float(0xff800000u), total = 0.0f;
    for (u32 i = lane; i < count; i += 32) top = larger(top, parts.of(s, r, i)[dim]);
    top = warp_max(top);
    f32 joined = top, sums[MOST_COLUMNS] = {};
    for (u32 i = 0; i < count; i += 32) {
        f32 weight = 0.0f;
        if (i + lane < count) {
            const f32* part = parts.of(s, r, i + lane);
            weight = power_of_two(part[dim] - joined);
            total += weight * part[dim + 1];
        }
        for (u32 from = 0; from < min(count - i, 32u); from++) {
            const f32* part = parts.of(s, r, i + from);
            f32 of_part = from_lane(weight, (int)from);
#pragma unroll
            for (u32 c = 0; c < MOST_COLUMNS; c++)
                if (lane + 32 * c < dim) sums[c] = fmaf(of_part, part[lane + 32 * c], sums[c]);
        }
    }
    total = warp_sum(total);
    f32 factor = sinks ? add_sink(sinks[g * s.group() + s.head(r)], top, total) : 1.0f;
    factor /= total;
    u64 to = s.place(blockIdx.z, g, r) * dim;
#pragma unroll
    for (u32 c = 0; c < MOST_COLUMNS; c++)
        if (lane + 32 * c < dim) store(o[to + lane + 32 * c], sums[c] * factor);
    if (lane == 0) lse[s.lse_place(blockIdx.z, g, r)] = top * LN_2 + logf(total);
}

