// Products of some rows with weights of TYPE_OF_WEIGHTS (some_rows.cuh): a module for bf16 and for each type of blocks, as few runs need more
// than two. OF_TYPE makes a kernel's name the type's.

KERNEL_OF_TWO(256) OF_TYPE(some_rows_nt)(ROWS, STORE, COMBINE) {
    multiply_some<false, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, SOME_COLUMNS), THE_STORE);
    combine_columns(THE_COMBINE, THE_STORE);
}

KERNEL_OF_TWO(256) OF_TYPE(some_each)(EACH, NORM) {
    Store store;
    Problem p = problem_of_each(THE_EACH, SOME, SOME_COLUMNS, store);
    after_earlier_with(p.b.data, p.column, SOME_COLUMNS / 8, p.columns, b_stride);
    if (norm_x) multiply_few<TYPE_OF_WEIGHTS, LINE_TILES>(p, THE_NORM, store);
    else multiply_some<false, TYPE_OF_WEIGHTS>(p, store);
}

KERNEL_OF_TWO(256) OF_TYPE(some_narrow)(EACH, NORM) {
    Store store;
    Problem p = problem_of_each(THE_EACH, SOME, LINES, store);
    after_earlier_with(p.b.data, p.column, LINES / 8, p.columns, b_stride);
    multiply_few<TYPE_OF_WEIGHTS, 1>(p, THE_NORM, store);
}

KERNEL_OF_TWO(256) OF_TYPE(some_up_paired)(ROWS, ACTIVATE) {
    multiply_some<true, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, SOME_PAIRS), THE_ACTIVATE);
}

KERNEL_OF_TWO(256) OF_TYPE(some_up_single)(ROWS, ACTIVATE) {
    multiply_some<false, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, SOME_COLUMNS), THE_ACTIVATE);
}

KERNEL_OF_TWO(256) OF_TYPE(some_combined)(ROWS, const f32* row_weights, u32 count, STORE) {
    combine_some<TYPE_OF_WEIGHTS>(THE_ROWS, row_weights, count, THE_STORE);
}
