//! Groups of some tens of rows are computed with A and B swapped, which must not change results.

use moeworks_tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::experts::{ExpertRows, ExpertWeights, NO_ROW, experts_forward};
use crate::gemm::plan::MAX_SWAPPED;
use crate::test_data::{contexts, numbers, tensor};
use crate::{Activation, Context, Isa};

/// More rows than are ever swapped.
const MANY: usize = MAX_SWAPPED + 44;

/// A network of one expert, and the type of its weights.
#[derive(Clone, Copy, Debug)]
struct Case {
    d: usize,
    f: usize,
    activation: Activation,
    x_type: DType,
    w_type: DType,
}

/// Returns the results of the first and the second product for `count` rows from `first` on.
fn forward(ctx: &Context, case: Case, x: &Tensor, first: usize, count: usize) -> [Vec<f32>; 2] {
    let af = case.f * case.activation.num_inputs();
    let weights =
        |rows: usize, columns: usize, seed| tensor(ctx, &[rows, columns], &numbers(rows * columns, seed), case.w_type);
    let (gate_up, down) = (weights(af, case.d, 2), weights(case.d, case.f, 3));
    let tokens: Vec<u32> = (first as u32..(first + count) as u32).collect();
    let mut token_rows = vec![NO_ROW; MANY];
    (first..first + count).for_each(|token| token_rows[token] = (token - first) as u32);
    let (offsets, weights_of_rows) = ([0, count as u32], vec![1.0; count]);
    let rows = ExpertRows::new(&offsets, &tokens, &weights_of_rows, &token_rows, 1);
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation: case.activation };
    let (y, saved) = experts_forward(ctx, x, weights, rows);
    [saved.h.to_f32_vec(), y.to_f32_vec()[first * case.d..(first + count) * case.d].to_vec()]
}

fn check(case: Case, first: usize, count: usize) {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    // Products of f32 in tiles differ in the last bits from those of few rows, which do not use tiles.
    for ctx in contexts().filter(|ctx| case.w_type == DType::BF16 || ctx.isa() != Isa::AmxF32) {
        let x = tensor(&ctx, &[MANY, case.d], &numbers(MANY * case.d, 1), case.x_type);
        let [all_h, all_y] = forward(&ctx, case, &x, 0, MANY);
        let [h, y] = forward(&ctx, case, &x, first, count);
        let af = h.len() / count;
        let name = format!("rows {first} to {} of {case:?} on {:?}", first + count, ctx.isa());
        assert!(bits(&h) == bits(&all_h[first * af..(first + count) * af]), "h of {name}");
        assert!(bits(&y) == bits(&all_y[first * case.d..(first + count) * case.d]), "y of {name}");
    }
}

#[test]
fn rows_give_the_same_bits_in_a_group_of_tens_and_of_hundreds() {
    let types = [DType::F32, DType::BF16];
    for (x_type, w_type) in types.into_iter().flat_map(|x| types.map(|w| (x, w))) {
        // Depths in one part and in several, panels of all widths, half a vector of rows and more than half.
        check(Case { d: 130, f: 100, activation: Activation::SwiGlu, x_type, w_type }, 3, 40);
        check(Case { d: 1_300, f: 34, activation: Activation::Gelu, x_type, w_type }, 11, 205);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_give_the_same_bits_in_random_groups(
        (d, f) in (1_usize..140, 1_usize..140),
        (first, count) in (0_usize..40, 17_usize..=MAX_SWAPPED),
        is_gated: bool,
        (is_x_f32, is_w_f32) in any::<(bool, bool)>(),
    ) {
        let dtype = |is_f32| if is_f32 { DType::F32 } else { DType::BF16 };
        let activation = if is_gated { Activation::SwiGlu } else { Activation::Gelu };
        check(Case { d, f, activation, x_type: dtype(is_x_f32), w_type: dtype(is_w_f32) }, first, count);
    }
}
