//! The kernel of each product of a table, for each instruction set.

use std::fmt::Write;

use moeworks_ops::Isa;
use moeworks_ops::gemm_plan::{GemmKernel, GemmPlan, GemmProblem, RowLayout};
use moeworks_tensor::DType;

/// Sizes on both sides of the bounds between kernels, weights in caches and in memory, all forms and types.
fn problems() -> Vec<(String, GemmProblem)> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::Q8] {
        for columns in [256, 4096] {
            for rows in [1, 5, 9, 13, 17, 100, 200, 300] {
                let sizes = [rows, columns, 1024];
                all.push((format!("x w^T {rows} x {columns} x 1024 {dtype:?}"), GemmProblem::linear(sizes, dtype)));
            }
        }
    }
    for dtype in [DType::F32, DType::BF16] {
        for rows in [1, 16, 17, 50, 300] {
            let sizes = [rows, 2048, 1024];
            let problem = GemmProblem::linear_backward_input(sizes, dtype);
            all.push((format!("dy w {rows} x 2048 x 1024 {dtype:?}"), problem));
        }
        for tokens in [1, 17, 97, 257] {
            let problem = GemmProblem::linear_backward_weight([1024, 2048, tokens], dtype);
            all.push((format!("dy^T x 1024 x 2048 x {tokens} {dtype:?}"), problem));
        }
    }
    let experts = GemmProblem { is_paired: true, num_groups: 64, ..GemmProblem::linear([4, 512, 2048], DType::BF16) };
    all.push(("64 experts 4 x 512 x 2048 BF16".into(), experts));
    let odd = GemmProblem::linear([64, 512, 1025], DType::BF16);
    all.push(("odd depth 64 x 512 x 1025 BF16".into(), odd));
    let gathered = RowLayout { is_gathered: true, ..RowLayout::whole(DType::BF16, 1024) };
    let gathered = GemmProblem { b: gathered, ..GemmProblem::linear([64, 4096, 1024], DType::BF16) };
    all.push(("gathered weights 64 x 4096 x 1024 BF16".into(), gathered));
    all
}

fn table() -> String {
    let isas = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx, Isa::AmxF32];
    let mut text = String::new();
    for isa in isas {
        for is_batch_invariant in [false, true] {
            writeln!(text, "{isa:?}{}", if is_batch_invariant { ", batch-invariant" } else { "" }).unwrap();
            for (name, problem) in problems() {
                writeln!(text, "  {name:42} {}", GemmPlan::choose(&problem, isa, is_batch_invariant)).unwrap();
            }
        }
    }
    text
}

/// A plan that changes on purpose is written down again with `MOEWORKS_WRITE_GOLDEN=1`.
#[test]
fn each_product_has_the_kernel_that_is_written_down() {
    let (found, path) = (table(), concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/gemm_plans.txt"));
    if std::env::var_os("MOEWORKS_WRITE_GOLDEN").is_some() {
        std::fs::write(path, &found).expect("the table can be written");
    }
    let expected = std::fs::read_to_string(path).expect("the table is there");
    for (found, expected) in found.lines().zip(expected.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(found.len(), expected.len(), "lines of {path}");
}

#[test]
fn pieces_of_rows_meet_the_kernel_of_few_rows() {
    let [whole, piece] = [100, 16].map(|rows| GemmProblem::linear([rows, 256, 64], DType::F32));
    let [whole, piece] = [whole, piece].map(|problem| GemmPlan::choose(&problem, Isa::Avx2, true));
    assert_eq!([whole.kernel, piece.kernel], [GemmKernel::Skinny; 2]);
    assert_eq!([whole.row_pieces, piece.row_pieces], [Some(16), None]);
}
