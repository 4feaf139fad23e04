// Products of some rows with matrices of bf16 (some_rows.cuh); blocks.cu has those with blocks.

KERNEL_OF_TWO(256) some_each(EACH) {
    Store store;
    Problem p = problem_of_each(THE_EACH, SOME, SOME_COLUMNS, store);
    after_earlier_with(p.b.data, p.column, SOME_COLUMNS / 8, p.columns, b_stride * 2);
    some_rows(p, Bf16Rows{p.b}, store);
}
