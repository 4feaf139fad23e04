// A router for few tokens as one kernel: logits, by as many blocks as there are columns and eights of rows for; of
// each eight the last of them to be done chooses, and the last of those sorts. Instructions are fetched once, from
// memory: what is done once has few of them rather than loops that are taken apart.

// Columns of a block: fewer are over sooner.
const u32 ROUTE_COLUMNS = 4;

// The products of vec_rows_nt (grouped.cu), of rows that are normed first if there is something to norm, and
// decide_for_few (router.cu). `arrived` counts blocks in its first number and those of each eight rows in the others.
KERNEL_OF_TWO(256) route_few(NORM, ROWS, STORE, u32 is_rounded, TOP_K, FEW_CHOICES, u32* arrived) {
    SHARED(shared);
    ask_for_weight(THE_NORM, depth);
    after_earlier_for_few(THE_ROWS, b_stride * 4, ROUTE_COLUMNS);
    Problem p = rows_problem(THE_ROWS, ROUTE_COLUMNS);
    if (norm_x) {
        HeldRow held = {};
        if (p.rows == 1) held.load(THE_NORM, depth);
        norm_rows(THE_NORM, RowsInOrder{(f32*)shared, depth}, p.rows, depth, held);
        p.a = Operand{shared, nullptr, 0, depth, 0};
    }
    // What was normed is rounded already.
    by_columns<false, ROUTE_COLUMNS>(p, Floats<false>{p.b}, THE_STORE, is_rounded && !(norm_x && norm_y_bf16));
    if (!is_last_block(arrived + 1 + blockIdx.y, gridDim.x)) return;
    u32 row = blockIdx.y * 8 + threadIdx.x / 32;
    if (row < rows) THE_TOP_K.row(row);
    if (gridDim.y == 1) __syncthreads();
    else if (!is_last_block(arrived, gridDim.y)) return;
    THE_FEW_CHOICES.sort(ids, weights);
}
