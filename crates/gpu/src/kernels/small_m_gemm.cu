// Products of some rows with weights of TYPE_OF_WEIGHTS (small_m_gemm.cuh): a module for bf16 and for each type of
// blocks, as few runs need more than two. OF_TYPE makes a kernel's name the type's.

KERNEL_OF_TWO(256) OF_TYPE(small_m_rows_nt)(ROWS, STORE, u32 line_tiles, u32 stages, COMBINE) {
    multiply_some<false, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, line_tiles * LINES), line_tiles, stages, THE_STORE);
    combine_columns(THE_COMBINE, line_tiles * LINES, THE_STORE);
}

KERNEL_OF_TWO(256) OF_TYPE(small_m_batched)(EACH, u32 line_tiles, u32 stages, NORM) {
    Store store;
    Problem p = problem_of_each(THE_EACH, SOME, line_tiles * LINES, store);
    ask_for_weight(THE_NORM, depth);
    after_earlier_with(p.b.data, p.column, line_tiles * LINES / 8, p.columns, b_stride);
    if (norm_x) multiply_normed<TYPE_OF_WEIGHTS>(p, line_tiles, stages, THE_NORM, store);
    else multiply_some<false, TYPE_OF_WEIGHTS>(p, line_tiles, stages, store);
}

KERNEL_OF_TWO(256) OF_TYPE(small_m_up_paired)(ROWS, ACTIVATE, u32 line_tiles, u32 stages) {
    multiply_some<true, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, line_tiles * LINES / 2), line_tiles, stages, THE_ACTIVATE);
}

KERNEL_OF_TWO(256) OF_TYPE(small_m_up_single)(ROWS, ACTIVATE, u32 line_tiles, u32 stages) {
    multiply_some<false, TYPE_OF_WEIGHTS>(rows_problem(THE_ROWS, line_tiles * LINES), line_tiles, stages, THE_ACTIVATE);
}

KERNEL_OF_TWO(256) OF_TYPE(small_m_combined)(ROWS, const f32* row_weights, u32 count, u32 stages, STORE) {
    combine_some<TYPE_OF_WEIGHTS>(THE_ROWS, row_weights, count, THE_STORE, stages);
}
