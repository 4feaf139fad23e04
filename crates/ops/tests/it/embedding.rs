//! Embedding: rows copied exactly, gradients added in the order of the tokens.

use moeworks_ops::Context;
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::common::{assert_close, below, contexts, doubles, normal_tensor, normals, thread_counts};

fn check(name: &str, ctx: &Context, num_ids: usize, vocabulary: usize, cols: usize, dtype: DType) {
    let ids = below(1, num_ids, vocabulary as u32);
    let table = normal_tensor(ctx, 2, &[vocabulary, cols], dtype);
    let values = table.to_f32_vec();
    let rows: Vec<f32> = ids.iter().flat_map(|&id| values[id as usize * cols..][..cols].to_vec()).collect();
    let what = format!("{name}: {num_ids} of {vocabulary}, {cols} columns, {dtype:?}");
    let y = embedding(ctx, &ids, &table, DType::F32);
    assert_eq!((y.shape(), y.f32s()), (&[num_ids, cols][..], &rows[..]), "{what}");
    let y = embedding(ctx, &ids, &table, DType::BF16);
    let expected =
        moeworks_ops::elementwise::cast(ctx, &Tensor::from_slice(ctx.pool(), &[rows.len()], &rows), DType::BF16);
    assert_eq!(y.bf16s(), expected.bf16s(), "{what}");

    let dy = normal_tensor(ctx, 3, &[num_ids, cols], dtype);
    let start = normals(4, vocabulary * cols);
    let mut dtable = Tensor::from_slice(ctx.pool(), &[vocabulary, cols], &start);
    embedding_backward(ctx, &ids, &dy, &mut dtable);
    let mut expected: Vec<f64> = start.into_iter().map(f64::from).collect();
    for (dy, &id) in doubles(&dy).chunks_exact(cols).zip(&ids) {
        expected[id as usize * cols..][..cols].iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
    }
    assert_close(&what, &doubles(&dtable), &expected, 1e-5);
}

#[test]
fn copies_and_adds_rows_on_every_instruction_set() {
    for (name, ctx) in contexts() {
        for dtype in [DType::F32, DType::BF16] {
            check(&name, &ctx, 0, 5, 8, dtype);
            check(&name, &ctx, 1, 1, 1, dtype);
            check(&name, &ctx, 500, 7, 130, dtype);
            check(&name, &ctx, 100, 1000, 33, dtype);
        }
    }
}

#[test]
fn same_bits_on_any_number_of_threads() {
    let ids = below(1, 3000, 10);
    let results = thread_counts().map(|ctx| {
        let mut dtable = ctx.zeros(&[10, 256], DType::F32);
        embedding_backward(&ctx, &ids, &normal_tensor(&ctx, 1, &[3000, 256], DType::F32), &mut dtable);
        dtable
    });
    assert!(results.iter().all(|x| x.bytes() == results[0].bytes()));
}

#[test]
#[should_panic(expected = "id 5 in a table of 5 rows")]
fn ids_beyond_the_table_are_refused() {
    let ctx = Context::cpu(1);
    _ = embedding(&ctx, &[1, 5], &ctx.zeros(&[5, 2], DType::F32), DType::F32);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn copies_and_adds_rows_of_random_shapes(ids in 0..200_usize, vocabulary in 1..50_usize, cols in 1..200_usize) {
        check("random", &Context::cpu(2), ids, vocabulary, cols, DType::F32);
    }
}

/// 32 MiB and more are written past the caches.
#[test]
fn rows_of_many_megabytes_are_those_of_the_table() {
    let (tokens, cols) = (8200, 1024);
    for isa in moeworks_ops::Isa::available() {
        let ctx = Context::cpu(2).with_isa(isa);
        let table = normal_tensor(&ctx, 1, &[7, cols], DType::F32);
        let ids: Vec<u32> = (0..tokens as u32).map(|t| t * 3 % 7).collect();
        let y = embedding(&ctx, &ids, &table, DType::F32);
        for (y, &id) in y.f32s().chunks_exact(cols).zip(&ids) {
            assert!(y == &table.f32s()[id as usize * cols..][..cols], "{isa:?}: row {id}");
        }
    }
}
