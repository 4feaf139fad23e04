// Products of groups of rows with matrices of their own (experts), and plain products as one group.
//
// Three forms, named as on the CPU: nt is A [rows, depth] B [columns, depth]^T, nn is A [rows, depth] B [depth,
// columns], tn is A [depth, rows]^T B [depth, columns]. Rows of A (nt, nn) or of either operand along the depth (tn)
// may be gathered.
//
// Each form has a kernel for tensor cores (bf16, sizes in whole vectors of 8) and a plain one (any type and size); nt
// also one for few rows. What becomes of a sum is an epilogue, the same for all.

// ---- tensor cores: tiles of 128 x 128, steps of 32 in depth, 8 warps of 64 x 32, four stages of asynchronous copies
// ----

const u32 TILE = 128, DEPTH = 32, STAGES = 4, OPERAND_BYTES = TILE * DEPTH * 2;

// Where 8 elements lie in a tile of 128 rows of 32 elements along the depth (is_major) or of 32 rows of 128: so that
// the addresses of one matrix load fall into different banks.
DEVICE u32 place(bool is_major, u32 row, u32 chunk) {
    return is_major ? (row * 4 + (chunk ^ (row >> 1 & 3))) * 16 : (row * 16 + (chunk ^ (row & 7))) * 16;
}

// What a thread copies of an operand's tiles, of which `edge` rows (IS_MAJOR) or columns are there from `first` on:
// two times 8 elements of each. Where rows run along the depth, they are the same two rows for all stages, which are
// looked up once.
template <bool IS_MAJOR, bool IS_PAIRED> struct Copies {
    const Operand& o;
    u32 first, edge;
    u64 rows[2];
    bool are_there[2];

    DEVICE_MEMBER Copies(const Operand& operand, u32 first_row, u32 num, u64 pair) : o(operand), first(first_row), edge(num) {
#pragma unroll
        for (u32 i = 0; IS_MAJOR && i < 2; i++) {
            u32 row = threadIdx.x / 4 + 64 * i;
            // A pair's two columns lie 8 apart in the tile, so that one thread has both sums.
            u32 column = IS_PAIRED ? row / 16 * 8 + row % 8 : row;
            are_there[i] = column < edge;
            rows[i] = are_there[i] ? o.row(first + column) + (IS_PAIRED && (row / 8 & 1) ? pair * o.stride : 0) : 0;
        }
    }

    // Starts copying a stage, from `k` on in the depth.
    DEVICE_MEMBER void start(unsigned char* to, u32 k, u32 depth) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 row = threadIdx.x / (IS_MAJOR ? 4 : 16) + (IS_MAJOR ? 64 : 16) * i, chunk = threadIdx.x % (IS_MAJOR ? 4 : 16);
            bool is_there = IS_MAJOR ? are_there[i] && k + chunk * 8 < depth : k + row < depth && chunk * 8 < edge;
            u64 at = !is_there ? 0 : IS_MAJOR ? rows[i] + k + chunk * 8 : o.row(k + row) + first + chunk * 8;
            copy_async(to + place(IS_MAJOR, row, chunk), (const bf16*)o.data + at, is_there);
        }
    }
};

// The fragments of a warp's 16 rows of A from `row`, 16 deep from `k`.
template <bool IS_MAJOR> DEVICE void load_a(u32 (&r)[4], const unsigned char* tile, u32 row, u32 k) {
    u32 lane = threadIdx.x % 32;
    if (IS_MAJOR) load_matrices(r, tile + place(true, row + lane % 16, k / 8 + lane / 16));
    else load_matrices_transposed(r, tile + place(false, k + lane % 8 + lane / 16 * 8, row / 8 + (lane / 8 & 1)));
}

// Those of 16 columns of B from `column`: two pairs of registers.
template <bool IS_MAJOR> DEVICE void load_b(u32 (&r)[4], const unsigned char* tile, u32 column, u32 k) {
    u32 lane = threadIdx.x % 32;
    if (IS_MAJOR) load_matrices(r, tile + place(true, column + lane % 8 + lane / 16 * 8, k / 8 + (lane / 8 & 1)));
    else load_matrices_transposed(r, tile + place(false, k + lane % 16, column / 8 + lane / 16));
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED>
DEVICE void multiply(const Problem& p, unsigned char* shared, f32 (&sums)[4][4][4]) {
    u32 warp = threadIdx.x / 32, row = warp / 4 * 64, column = warp % 4 * 32;
    u32 edge = IS_PAIRED ? min(p.columns - p.column, TILE / 2) : min(p.columns - p.column, TILE);
    u32 first_row = A_MAJOR ? 0 : (u32)p.row;
    u32 steps = (p.depth + DEPTH - 1) / DEPTH;
    Copies<A_MAJOR, false> of_a(p.a, first_row, p.rows, 0);
    Copies<B_MAJOR, IS_PAIRED> of_b(p.b, p.column, edge, p.pair);
    auto copy = [&](u32 step) {
        if (step < steps) {
            unsigned char* to = shared + step % STAGES * 2 * OPERAND_BYTES;
            of_a.start(to, step * DEPTH, p.depth);
            of_b.start(to + OPERAND_BYTES, step * DEPTH, p.depth);
        }
        copy_commit();
    };
    for (u32 step = 0; step < STAGES - 1; step++) copy(step);
    for (u32 step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        copy(step + STAGES - 1);
        const unsigned char* a_tile = shared + step % STAGES * 2 * OPERAND_BYTES;
        const unsigned char* b_tile = a_tile + OPERAND_BYTES;
#pragma unroll
        for (u32 k = 0; k < DEPTH; k += 16) {
            u32 a[4][4], b[2][4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) load_a<A_MAJOR>(a[i], a_tile, row + i * 16, k);
#pragma unroll
            for (u32 j = 0; j < 2; j++) load_b<B_MAJOR>(b[j], b_tile, column + j * 16, k);
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++) mma_bf16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    copy_wait<0>();
    __syncthreads();
}

// Hands each sum to the epilogue, 16 rows of a warp at a time; where that has parts, adds them up over the tile's
// columns in a fixed order and writes them.
template <bool IS_PAIRED, typename Epilogue>
DEVICE void finish(const Problem& p, const Epilogue& epilogue, const f32 (&sums)[4][4][4], f32* parts, u32 num_parts,
                   unsigned char* shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = warp % 4;
    f32* own = (f32*)(shared + warp * OWN_BYTES);
    f32* rows = (f32*)(shared + 8 * OWN_BYTES);  // [4 warps of columns, 128]
    // Which registers a part has must be known when this is compiled.
#pragma unroll 1
    for (u32 part = 0; part < 4; part++) {
#pragma unroll
        for (u32 chosen = 0; chosen < 4; chosen++) {
            if (chosen != part) continue;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                // First and second columns of pairs come in turns, eight at a time.
                u32 block = i / 2, half = i % 2, at = IS_PAIRED ? block % 2 * 2 + block / 2 : block;
                lay_down(own, block, half, sums[chosen][at][half * 2], sums[chosen][at][half * 2 + 1]);
            }
        }
        u32 first_row = warp / 4 * 64 + part * 16, column = p.column + columns * (IS_PAIRED ? OWN_PAIRS : OWN_COLUMNS);
        f32 row_parts[Own<IS_PAIRED>::HELD] = {};
        typename Epilogue::Ahead ahead[Own<IS_PAIRED>::HELD] = {};
        look_ahead<IS_PAIRED>(p, epilogue, first_row, column, ahead);
        hand_over<IS_PAIRED>(p, epilogue, own, first_row, column, row_parts, ahead, false);
        if constexpr (Epilogue::HAS_PARTS)
            take_row_parts<IS_PAIRED>(row_parts, first_row, [&](u32 row, f32 part) { rows[columns * TILE + row] = part; });
    }
    if (!Epilogue::HAS_PARTS) return;
    __syncthreads();
    u32 row = threadIdx.x;
    if (row < p.rows && row < TILE) {
        f32 sum = rows[row] + rows[TILE + row] + rows[2 * TILE + row] + rows[3 * TILE + row];
        parts[(p.row + row) * num_parts + p.column / TILE] = sum;
    }
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Epilogue>
DEVICE void with_tensor_cores(const Problem& p, const Epilogue& epilogue, f32* parts, u32 num_parts) {
    if (p.rows == 0) return;
    SHARED(shared);
    f32 sums[4][4][4] = {};
    ask_ahead(p, epilogue, threadIdx.x / 32 * 16, 16, TILE);
    multiply<A_MAJOR, B_MAJOR, IS_PAIRED>(p, shared, sums);
    finish<IS_PAIRED>(p, epilogue, sums, parts, num_parts, shared);
}

// ---- plain: tiles of 64 x 64, steps of 16, a thread has 4 x 4 sums (and as many second ones) ----

const u32 PLAIN = 64, PLAIN_DEPTH = 16;

template <bool IS_MAJOR>
DEVICE void fill_plain(f32* to, const Operand& o, u32 first, u32 edge, u32 k, u32 depth, u32 is_rounded, u64 pair) {
    for (u32 i = threadIdx.x; i < PLAIN * PLAIN_DEPTH; i += 256) {
        u32 outer = IS_MAJOR ? i / PLAIN_DEPTH : i % PLAIN, inner = IS_MAJOR ? i % PLAIN_DEPTH : i / PLAIN;
        f32 x = 0.0f;
        if (outer < edge && k + inner < depth) {
            u64 at = IS_MAJOR ? o.row(first + outer) + pair * o.stride + k + inner : o.row(k + inner) + first + outer;
            x = rounded(load_any(o.data, o.is_bf16, at), is_rounded);
        }
        to[inner * (PLAIN + 4) + outer] = x;
    }
}

template <bool A_MAJOR, bool B_MAJOR, bool IS_PAIRED, typename Epilogue>
DEVICE void plainly(const Problem& p, const Epilogue& epilogue, f32* parts, u32 num_parts, u32 is_rounded) {
    if (p.rows == 0) return;
    __shared__ f32 a[PLAIN_DEPTH * (PLAIN + 4)], b[(IS_PAIRED ? 2 : 1) * PLAIN_DEPTH * (PLAIN + 4)];
    __shared__ f32 row_parts[PLAIN * 16];
    const u32 SECOND = PLAIN_DEPTH * (PLAIN + 4);
    u32 y = threadIdx.x / 16 * 4, x = threadIdx.x % 16 * 4;
    u32 edge = min(p.columns - p.column, PLAIN), first_row = A_MAJOR ? 0 : (u32)p.row;
    f32 sums[4][4] = {}, seconds[4][4] = {};
    for (u32 k = 0; k < p.depth; k += PLAIN_DEPTH) {
        __syncthreads();
        fill_plain<A_MAJOR>(a, p.a, first_row, p.rows, k, p.depth, is_rounded, 0);
        fill_plain<B_MAJOR>(b, p.b, p.column, edge, k, p.depth, is_rounded, 0);
        if (IS_PAIRED) fill_plain<B_MAJOR>(b + SECOND, p.b, p.column, edge, k, p.depth, is_rounded, p.pair);
        __syncthreads();
        for (u32 d = 0; d < PLAIN_DEPTH; d++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    f32 left = a[d * (PLAIN + 4) + y + i];
                    sums[i][j] = fmaf(left, b[d * (PLAIN + 4) + x + j], sums[i][j]);
                    if (IS_PAIRED) seconds[i][j] = fmaf(left, b[SECOND + d * (PLAIN + 4) + x + j], seconds[i][j]);
                }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        f32 part = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (y + i < p.rows && x + j < edge)
                part += epilogue.take(p.group, p.row + y + i, p.column + x + j, sums[i][j], seconds[i][j]);
        if (Epilogue::HAS_PARTS) row_parts[(y + i) * 16 + threadIdx.x % 16] = part;
    }
    if (!Epilogue::HAS_PARTS) return;
    __syncthreads();
    u32 row = threadIdx.x;
    if (row < p.rows && row < PLAIN) {
        f32 sum = 0.0f;
        for (u32 i = 0; i < 16; i++) sum += row_parts[row * 16 + i];
        parts[(p.row + row) * num_parts + blockIdx.x] = sum;
    }
}

// ---- kernels ----

KERNEL(256) rows_nt(ROWS, STORE) { with_tensor_cores<true, true, false>(rows_problem_in_panels(THE_ROWS, TILE), THE_STORE, nullptr, 0); }
KERNEL(256) rows_nn(ROWS, STORE) { with_tensor_cores<true, false, false>(rows_problem_in_panels(THE_ROWS, TILE), THE_STORE, nullptr, 0); }
KERNEL(256) plain_rows_nt(ROWS, STORE, u32 is_rounded) {
    plainly<true, true, false>(rows_problem(THE_ROWS, PLAIN), THE_STORE, nullptr, 0, is_rounded);
}
KERNEL(256) plain_rows_nn(ROWS, STORE, u32 is_rounded) {
    plainly<true, false, false>(rows_problem(THE_ROWS, PLAIN), THE_STORE, nullptr, 0, is_rounded);
}

KERNEL_OF_TWO(256) vec_rows_nt(ROWS, STORE, u32 is_rounded) {
    after_earlier_for_few(THE_ROWS, b_stride * (b_bf16 ? 2 : 4));
    Problem p = rows_problem(THE_ROWS, FEW_COLUMNS);
    by_float_columns<false>(p, THE_STORE, is_rounded);
}
KERNEL_OF_TWO(256) vec_both_nt(ROWS, STORE, u32 is_rounded) {
    after_earlier_for_few(THE_ROWS, b_stride * (b_bf16 ? 2 : 4));
    Problem p = rows_problem(THE_ROWS, FEW_COLUMNS);
    by_float_columns<true>(p, StoreBoth{THE_STORE, pair}, is_rounded);
}

KERNEL_OF_TWO(256) vec_batched(EACH, u32 is_rounded) {
    Store store;
    Problem p = problem_of_each(THE_EACH, FEW, FEW_COLUMNS, store);
    after_earlier_with(p.b.data, p.column, 1, p.columns, b_stride * (b_bf16 ? 2 : 4));
    by_float_columns<false>(p, store, is_rounded);
}

KERNEL(256) up_paired(ROWS, ACTIVATE) { with_tensor_cores<true, true, true>(rows_problem_in_panels(THE_ROWS, TILE / 2), THE_ACTIVATE, nullptr, 0); }
KERNEL(256) up_single(ROWS, ACTIVATE) { with_tensor_cores<true, true, false>(rows_problem_in_panels(THE_ROWS, TILE), THE_ACTIVATE, nullptr, 0); }
KERNEL(256) plain_up_paired(ROWS, ACTIVATE, u32 is_rounded) {
    plainly<true, true, true>(rows_problem(THE_ROWS, PLAIN), THE_ACTIVATE, nullptr, 0, is_rounded);
}
KERNEL(256) plain_up_single(ROWS, ACTIVATE, u32 is_rounded) {
    plainly<true, true, false>(rows_problem(THE_ROWS, PLAIN), THE_ACTIVATE, nullptr, 0, is_rounded);
}
KERNEL_OF_TWO(256) vec_up_paired(ROWS, ACTIVATE, u32 is_rounded) {
    Problem p = rows_problem(THE_ROWS, FEW_COLUMNS);
    by_float_columns<true>(p, THE_ACTIVATE, is_rounded);
}
KERNEL_OF_TWO(256) vec_up_single(ROWS, ACTIVATE, u32 is_rounded) {
    Problem p = rows_problem(THE_ROWS, FEW_COLUMNS);
    by_float_columns<false>(p, THE_ACTIVATE, is_rounded);
}

KERNEL(256) pull_back_rows(ROWS, PULL_BACK) { with_tensor_cores<true, false, false>(rows_problem_in_panels(THE_ROWS, TILE), THE_PULL_BACK, parts, gridDim.x); }
KERNEL(256) plain_pull_back_rows(ROWS, PULL_BACK, u32 is_rounded) {
    plainly<true, false, false>(rows_problem(THE_ROWS, PLAIN), THE_PULL_BACK, parts, gridDim.x, is_rounded);
}

// blockIdx.z is the group, y and x name tiles of rows and columns.
#define DEPTHS_PROBLEM(tile)                                                                                        \
    Problem p;                                                                                                      \
    if (!depths_problem(THE_DEPTHS, blockIdx.z, blockIdx.y * tile, blockIdx.x * tile, tile, p)) return;             \
    u8* own = (u8*)to + (u64)blockIdx.z * rows * columns * (to_bf16 ? 2 : 4);                                       \
    Store store = {own, add ? own : nullptr, to_bf16, columns, to_bf16}

KERNEL(256) wgrad_tn(DEPTHS) {
    DEPTHS_PROBLEM(TILE);
    with_tensor_cores<false, false, false>(p, store, nullptr, 0);
}
KERNEL(256) plain_wgrad_tn(DEPTHS, u32 is_rounded) {
    DEPTHS_PROBLEM(PLAIN);
    plainly<false, false, false>(p, store, nullptr, 0, is_rounded);
}

// The group that has the row, of those that begin at `offsets`.
DEVICE u32 group_of(u32 row, const u32* offsets, u32 groups) {
    u32 low = 0, high = groups;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

// outputs [R, D] += the row's expert's bias [E, D].
KERNEL(256) add_row_biases(void* outputs, u32 is_bf16, const f32* bias, const u32* offsets, u32 groups, u32 width) {
    u32 row = blockIdx.x, group = group_of(row, offsets, groups);
    for (u32 i = threadIdx.x; i < width; i += 256) {
        u64 at = (u64)row * width + i;
        store_any(outputs, is_bf16, at, load_any(outputs, is_bf16, at) + bias[(u64)group * width + i]);
    }
}

// d_row_weights [R] += <the token's row of dy, its expert's bias>, a warp a row.
KERNEL(256) add_bias_dots(const void* dy, u32 is_bf16, const f32* bias, const u32* offsets, const u32* tokens, f32* d_row_weights, u32 rows,
                          u32 groups, u32 width) {
    u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const f32* own = bias + (u64)group_of(row, offsets, groups) * width;
    u64 from = (u64)tokens[row] * width;
    f32 sum = 0.0f;
#pragma unroll 4
    for (u32 i = lane; i < width; i += 32) sum = fmaf(load_any(dy, is_bf16, from + i), own[i], sum);
    sum = warp_sum(sum);
    if (lane == 0) d_row_weights[row] += sum;
}

// sums [E, W] (+)= the sums over each group's rows of x, those of their tokens times the rows' weights if there are
// tokens: 32 columns and a group a block, whose eight warps take rows in turns.
KERNEL(256) sum_group_rows(const void* x, u32 is_bf16, const u32* tokens, const f32* row_weights, const u32* offsets, f32* sums, u32 width,
                           u32 add) {
    __shared__ f32 of_warps[8][32];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane, end = offsets[blockIdx.y + 1];
    f32 sum = 0.0f;
    if (column < width) {
#pragma unroll 4
        for (u32 row = offsets[blockIdx.y] + warp; row < end; row += 8) {
            f32 value = load_any(x, is_bf16, (u64)(tokens ? tokens[row] : row) * width + column);
            sum = tokens ? fmaf(row_weights[row], value, sum) : sum + value;
        }
    }
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= width) return;
    for (u32 w = 1; w < 8; w++) sum += of_warps[w][lane];
    f32* to = sums + (u64)blockIdx.y * width + column;
    *to = add ? *to + sum : sum;
}

// Adds to the sums of eight columns from `column` on those of a token's rows, times their weights if there are any.
// Where all of them are there, which is almost always, eight are read at a time, or four.
template <bool IS_BF16>
DEVICE void add_rows(f32 (&sum)[8], const void* outputs, const u32* rows, const f32* row_weights, u32 choices, u32 width, u32 column) {
    bool are_there = true;
    for (u32 c = 0; c < choices; c++) are_there &= rows[c] != 0xffffffffu;
    u32 c = 0;
    auto add = [&](auto count) {
        const u32 COUNT = decltype(count)::VALUE;
        f32 x[COUNT][8], weights[COUNT];
#pragma unroll
        for (u32 n = 0; n < COUNT; n++) {
            load_vector(x[n], outputs, IS_BF16, (u64)rows[c + n] * width + column);
            weights[n] = row_weights ? row_weights[rows[c + n]] : 1.0f;
        }
#pragma unroll
        for (u32 n = 0; n < COUNT; n++)
#pragma unroll
            for (u32 j = 0; j < 8; j++) sum[j] = fmaf(weights[n], x[n][j], sum[j]);
        c += COUNT;
    };
    while (are_there && c + 8 <= choices) add(Kind<8>{});
    if (are_there && c + 4 <= choices) add(Kind<4>{});
    for (; c < choices; c++) {
        if (rows[c] == 0xffffffffu) continue;
        f32 x[8], weight = row_weights ? row_weights[rows[c]] : 1.0f;
        load_vector(x, outputs, IS_BF16, (u64)rows[c] * width + column);
#pragma unroll
        for (u32 j = 0; j < 8; j++) sum[j] = fmaf(weight, x[j], sum[j]);
    }
}

// Gives `take` what combine_rows has of the block's token, eight columns at a time.
template <typename Take>
DEVICE void combine_vectors(const void* outputs, u32 is_bf16, const u32* rows, const f32* row_weights, const f32* base, u32 choices, u32 width, Take take) {
    for (u32 i = (blockIdx.y * 256 + threadIdx.x) * 8; i < width; i += gridDim.y * 256 * 8) {
        f32 sum[8] = {}, before[8] = {};
        if (base) load_vector(before, base, 0, i);
        if (is_bf16) add_rows<true>(sum, outputs, rows, row_weights, choices, width, i);
        else add_rows<false>(sum, outputs, rows, row_weights, choices, width, i);
#pragma unroll
        for (u32 j = 0; j < 8; j++) sum[j] += before[j];
        take(i, sum);
    }
}

#define COMBINED const void *outputs, u32 is_bf16, const u32 *token_rows, const f32 *row_weights, const f32 *base, f32 *y, u32 choices, u32 width

// y [T, D] = the sum over a token's rows, in the order of its choices, of the row of outputs, times its weight if
// there are any, and what `base` has (if it is there). A token is blockIdx.x, and blocks go on by y.
KERNEL(256) combine_rows(COMBINED) {
    const u32* rows = token_rows + (u64)blockIdx.x * choices;
    f32* to = y + (u64)blockIdx.x * width;
    const f32* from = base ? base + (u64)blockIdx.x * width : nullptr;
    if (width % 8 == 0)
        return combine_vectors(outputs, is_bf16, rows, row_weights, from, choices, width, [&](u32 i, const f32 (&sum)[8]) { store_vector(to, 0, i, sum); });
    for (u32 i = blockIdx.y * 256 + threadIdx.x; i < width; i += gridDim.y * 256) {
        f32 sum = 0.0f;
        for (u32 c = 0; c < choices; c++)
            if (rows[c] != 0xffffffffu)
                sum = fmaf(row_weights ? row_weights[rows[c]] : 1.0f, load_any(outputs, is_bf16, (u64)rows[c] * width + i), sum);
        to[i] = from ? from[i] + sum : sum;
    }
}

// The same of whole vectors by one block a token, which norms what it has made (rms_norm.cu, whose order of sums this
// is): its row is in shared memory still.
KERNEL(256) combine_rows_normed(COMBINED, const f32* weight, f32 eps, void* normed, u32 normed_bf16, f32* inv_rms) {
    SHARED(shared);
    f32* row = (f32*)shared;
    u64 at = (u64)blockIdx.x * width;
    combine_vectors(outputs, is_bf16, token_rows + (u64)blockIdx.x * choices, row_weights, base ? base + at : nullptr, choices, width,
                    [&](u32 i, const f32 (&sum)[8]) {
                        store_vector(y, 0, at + i, sum);
                        store_vector(row, 0, i, sum);
                    });
    __syncthreads();
    f32 sum = 0.0f;
    for (u32 i = threadIdx.x * 4; i < width; i += 1024) sum = add_squares(sum, few<4>(row + i));
    f32 scale = scale_of(block_sum(sum), width, eps);
    if (threadIdx.x == 0) inv_rms[blockIdx.x] = scale;
    for (u32 i = threadIdx.x * 4; i < width; i += 1024) {
        Few<4> v = few<4>(row + i), w = few<4>(weight + i);
#pragma unroll
        for (u32 j = 0; j < 4; j++) v.x[j] = v.x[j] * scale * w.x[j];
        if (normed_bf16) put((bf16*)normed + at + i, v);
        else put((f32*)normed + at + i, v);
    }
}

// The gradient of each choice's weight, that of its row; a choice without a row has none.
KERNEL(256) grads_of_choices(const u32* token_rows, const f32* of_rows, f32* grads, u32 choices) {
    for (u64 i = blockIdx.x * 256 + threadIdx.x; i < choices; i += gridDim.x * 256)
        grads[i] = token_rows[i] == 0xffffffffu ? 0.0f : of_rows[token_rows[i]];
}

// The sum of a row's parts, in order.
KERNEL(256) add_row_parts(const f32* parts, f32* sums, u32 rows, u32 num_parts) {
    u32 row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    f32 sum = 0.0f;
    for (u32 i = 0; i < num_parts; i++) sum += parts[(u64)row * num_parts + i];
    sums[row] = sum;
}
