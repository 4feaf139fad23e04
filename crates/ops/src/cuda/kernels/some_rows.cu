// Products of some rows with weights of TYPE_OF_WEIGHTS (some_rows.cuh): a module for bf16 and for each type of blocks, as few runs need more
// than two. OF_TYPE makes a kernel's name the type's.

KERNEL_OF_TWO(256) OF_TYPE(some_rows_nt)(ROWS, STORE, u32 line_tiles, COMBINE) {
    multiply_some<false, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, line_tiles * LINES), line_tiles, THE_STORE);
    combine_columns(THE_COMBINE, line_tiles * LINES, THE_STORE);
}

KERNEL_OF_TWO(256) OF_TYPE(some_each)(EACH, NORM) {
    Store store;
    Problem p = problem_of_each(THE_EACH, SOME, EACH_TILES * LINES, store);
    after_earlier_with(p.b.data, p.column, EACH_TILES * LINES / 8, p.columns, b_stride);
    if (norm_x) multiply_few<TYPE_OF_WEIGHTS>(p, EACH_TILES, THE_NORM, store);
    else multiply_some<false, TYPE_OF_WEIGHTS>(p, EACH_TILES, store);
}

KERNEL_OF_TWO(256) OF_TYPE(some_narrow)(EACH, NORM) {
    Store store;
    Problem p = problem_of_each(THE_EACH, SOME, LINES, store);
    after_earlier_with(p.b.data, p.column, LINES / 8, p.columns, b_stride);
    multiply_few<TYPE_OF_WEIGHTS>(p, 1, THE_NORM, store);
}

KERNEL_OF_TWO(256) OF_TYPE(some_up_paired)(ROWS, ACTIVATE, u32 line_tiles) {
    multiply_some<true, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, line_tiles * LINES / 2), line_tiles, THE_ACTIVATE);
}

KERNEL_OF_TWO(256) OF_TYPE(some_up_single)(ROWS, ACTIVATE, u32 line_tiles) {
    multiply_some<false, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, line_tiles * LINES), line_tiles, THE_ACTIVATE);
}

KERNEL_OF_TWO(256) OF_TYPE(some_combined)(ROWS, const f32* row_weights, u32 count, STORE) {
    combine_some<TYPE_OF_WEIGHTS>(THE_ROWS, row_weights, count, THE_STORE);
}
