// Products of few rows: a warp has a column (or a pair), whose row of B it reads once from end to end.

const u32 FEW = 8, FEW_COLUMNS = 8;

// Rows of B that are floats.
template <bool IS_BF16> struct Floats {
    const Operand& b;
    DEVICE_MEMBER void load(f32 (&w)[8], u32 row, u32 k) const { load_vector(w, b.data, IS_BF16, b.row(row) + k); }
};

// The products of up to COUNT rows of A from `first_row` on, bf16 or f32, with a warp's column. Rows that are not
// there are the first once more, without branches, so that what several steps read is asked for before any of it is
// needed.
template <bool IS_PAIRED, bool IS_BF16, u32 COUNT, typename Matrix, typename Epilogue>
DEVICE void column_of_rows(const Problem& p, u32 first_row, u32 column, const Matrix& matrix, const Epilogue& epilogue, u32 is_rounded) {
    u32 lane = threadIdx.x % 32, there = min(p.rows - first_row, COUNT);
    f32 sums[COUNT] = {}, seconds[COUNT] = {};
    u64 rows[COUNT];
#pragma unroll
    for (u32 r = 0; r < COUNT; r++) rows[r] = p.a.row(first_row + (r < there ? r : 0));
    auto load_row = [&](f32 (&a)[8], u32 r, u32 k) {
        load_vector(a, p.a.data, IS_BF16, rows[r] + k);
#pragma unroll
        for (u32 i = 0; i < 8; i++) a[i] = IS_BF16 ? a[i] : rounded(a[i], is_rounded);
    };
    auto add_eight = [&](u32 k) {
        f32 w[8], v[8], a[8];
        matrix.load(w, column, k);
        if (IS_PAIRED) matrix.load(v, column + (u32)p.pair, k);
#pragma unroll
        for (u32 r = 0; r < COUNT; r++) {
            load_row(a, r, k);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                sums[r] = fmaf(a[i], w[i], sums[r]);
                if (IS_PAIRED) seconds[r] = fmaf(a[i], v[i], seconds[r]);
            }
        }
    };
    const u32 STEP = 32 * 8;
    u32 whole = p.depth / STEP, rest = whole * STEP + lane * 8;
#pragma unroll (COUNT == 1 ? 4 : 2)
    for (u32 step = 0; step < whole; step++) add_eight(step * STEP + lane * 8);
    if (rest < p.depth) add_eight(rest);
    // Lane r has row r.
    f32 own = 0.0f, own_second = 0.0f;
#pragma unroll
    for (u32 r = 0; r < COUNT; r++) {
        f32 sum = warp_sum(sums[r]), second = IS_PAIRED ? warp_sum(seconds[r]) : 0.0f;
        if (lane == r) {
            own = sum;
            own_second = second;
        }
    }
    if (lane < there) epilogue.take(p.group, p.row + first_row + lane, column, own, own_second);
}

// Rows that a warp has at a time if there are several.
const u32 FEW_AT_ONCE = 4;

// `matrix` gives 8 elements of a row of B, of which there are whole multiples of that. Neighbouring lanes have
// neighbouring ones. A block has COLUMNS columns; where these are fewer than warps, several warps share a column's
// rows.
template <bool IS_PAIRED, u32 COLUMNS, typename Matrix, typename Epilogue>
DEVICE void by_columns(const Problem& p, const Matrix& matrix, const Epilogue& epilogue, u32 is_rounded) {
    u32 warp = threadIdx.x / 32, column = p.column + warp % COLUMNS, own = warp / COLUMNS * FEW_AT_ONCE;
    if (column >= p.columns || own >= p.rows) return;
    if (p.rows == 1) {
        if (p.a.is_bf16) return column_of_rows<IS_PAIRED, true, 1>(p, 0, column, matrix, epilogue, is_rounded);
        return column_of_rows<IS_PAIRED, false, 1>(p, 0, column, matrix, epilogue, is_rounded);
    }
#pragma unroll 1
    for (u32 first = own; first < p.rows; first += 8 / COLUMNS * FEW_AT_ONCE)
        if (p.a.is_bf16) column_of_rows<IS_PAIRED, true, FEW_AT_ONCE>(p, first, column, matrix, epilogue, is_rounded);
        else column_of_rows<IS_PAIRED, false, FEW_AT_ONCE>(p, first, column, matrix, epilogue, is_rounded);
}

// The same for rows of B that are floats of any type.
template <bool IS_PAIRED, typename Epilogue> DEVICE void by_float_columns(const Problem& p, const Epilogue& epilogue, u32 is_rounded) {
    if (p.b.is_bf16) by_columns<IS_PAIRED, FEW_COLUMNS>(p, Floats<true>{p.b}, epilogue, is_rounded);
    else by_columns<IS_PAIRED, FEW_COLUMNS>(p, Floats<false>{p.b}, epilogue, is_rounded);
}

// Products of the same rows with up to three matrices of one type: blocks go through the columns of the first, then
// of the next.
struct Each {
    const void *a, *b0, *b1, *b2;
    void *to0, *to1, *to2;
    const f32* base;  // of the first
    u32 columns0, columns1, columns2, a_bf16, b_bf16, to_bf16, rows, depth, b_stride;
};

// What belongs to the first, the second or the third of three: an index would put them into memory.
template <typename T> DEVICE T which(u32 m, T first, T second, T third) { return m == 0 ? first : m == 1 ? second : third; }

// That of a block of so many rows (blockIdx.y) and columns, and where its sums go.
DEVICE Problem problem_of_each(const Each& e, u32 height, u32 width, Store& store) {
    u32 blocks0 = (e.columns0 + width - 1) / width, blocks1 = (e.columns1 + width - 1) / width;
    u32 m = blockIdx.x < blocks0 ? 0 : blockIdx.x < blocks0 + blocks1 ? 1 : 2;
    u32 block = blockIdx.x - which(m, 0u, blocks0, blocks0 + blocks1), columns = which(m, e.columns0, e.columns1, e.columns2);
    Problem p = {};
    p.a = Operand{e.a, nullptr, blockIdx.y * height, e.depth, e.a_bf16};
    p.b = Operand{which(m, e.b0, e.b1, e.b2), nullptr, 0, e.b_stride, e.b_bf16};
    p.rows = min(e.rows - blockIdx.y * height, height);
    p.columns = columns;
    p.depth = e.depth;
    p.column = block * width;
    p.row = blockIdx.y * height;
    store = Store{which(m, e.to0, e.to1, e.to2), m == 0 ? e.base : nullptr, e.to_bf16, columns, 0};
    return p;
}

// Asks for the rows of B of a block's columns while earlier kernels are still at work, and waits for them: eight
// warps have `each` columns from `first` on. Matrices are not written meanwhile.
DEVICE void after_earlier_with(const void* b, u32 first, u32 each, u32 columns, u32 row_bytes) {
    u32 column = first + threadIdx.x / 32 * each, count = column < columns ? min(columns - column, each) : 0;
    after_earlier_asking((const char*)b + (u64)column * row_bytes, count * row_bytes);
}

#define EACH const void *a, const void *b0, const void *b1, const void *b2, void *to0, void *to1, void *to2, const f32 *base, u32 columns0, u32 columns1, \
             u32 columns2, u32 a_bf16, u32 b_bf16, u32 to_bf16, u32 rows, u32 depth, u32 b_stride
#define THE_EACH Each{a, b0, b1, b2, to0, to1, to2, base, columns0, columns1, columns2, a_bf16, b_bf16, to_bf16, rows, depth, b_stride}

// As `after_earlier_with`, for the columns of few rows, where it is known which matrix they are of: the only one.
DEVICE void after_earlier_for_few(const Rows& r, u32 row_bytes, u32 width = FEW_COLUMNS) {
    bool is_known = r.group_rows == 0 && !r.b_listed;
    after_earlier_with(r.b, blockIdx.x * width, 1, is_known ? r.columns : 0, row_bytes);
}

// `Store` of pairs that are two columns of the output: short rows of B are read two at a time.
struct StoreBoth {
    Store store;
    u32 pair;
    DEVICE_MEMBER f32 take(u32 group, u64 row, u32 column, f32 x, f32 y) const {
        store.take(group, row, column, x, 0.0f);
        return store.take(group, row, column + pair, y, 0.0f);
    }
};
