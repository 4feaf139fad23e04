use moeworks_tensor::{DType, Tensor};

use super::*;
use crate::embedding::{embedding, embedding_of_drawn};
use crate::quantized::quantize;
use crate::test_data::{gpus, numbers};

#[test]
fn weights_are_those_of_f64_in_every_instruction_set() {
    let logits: Vec<f32> = (0..1003).map(|i| (i * 7919 % 1003) as f32 * 0.11 - 60.0).collect();
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for isa in Isa::available() {
        for temperature in [0.3_f32, 1.0, 2.5] {
            let weights = relative_weights(isa, &logits, temperature);
            for (&logit, weight) in logits.iter().zip(weights) {
                let exact = ((f64::from(logit) - f64::from(max)) / f64::from(temperature)).exp();
                assert!((f64::from(weight) - exact).abs() <= 3e-5 * exact + 1e-37, "{isa:?}: {logit} at {temperature}");
            }
        }
    }
}

#[test]
fn what_is_no_number_has_no_weight_and_the_infinite_all() {
    for isa in Isa::available() {
        let bad = [f32::NAN, 0.0, f32::NEG_INFINITY, 0.0, f32::NAN];
        assert_eq!(relative_weights(isa, &bad, 1.0), [0.0, 1.0, 0.0, 1.0, 0.0]);
        assert_eq!(relative_weights(isa, &[3.0, f32::INFINITY, f32::NAN], 1.0), [0.0, 1.0, 0.0]);
        assert_eq!(relative_weights(isa, &[f32::NAN; 20], 1.0), [0.0; 20]);
        assert_eq!(relative_weights(isa, &[3.0, 2.0], 1e-40), [1.0, 0.0]);
        assert!(relative_weights(isa, &[], 1.0).is_empty());
    }
}

const ALL: Filters = Filters { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

/// Every filter alone and together, also at temperature 0.
const FILTERS: [Filters; 10] = [
    ALL,
    Filters { temperature: 0.0, ..ALL },
    Filters { temperature: 0.7, top_k: 1, ..ALL },
    Filters { top_k: 20, ..ALL },
    Filters { top_k: 100_000, ..ALL },
    Filters { temperature: 1.3, top_p: 0.9, ..ALL },
    Filters { top_p: 1e-6, ..ALL },
    Filters { min_p: 0.1, ..ALL },
    Filters { min_p: 1.0, ..ALL },
    Filters { temperature: 2.0, top_k: 50, top_p: 0.8, min_p: 0.05 },
];

/// Returns the tokens drawn on a context for numbers from 0 to 1.
fn drawn(ctx: &Context, logits: &[f32], filters: &Filters) -> Vec<Drawn> {
    let logits = Tensor::from_slice(ctx.pool(), &[logits.len()], logits);
    let draws: Vec<f32> = (0..23).map(|i| i as f32 / 23.0).collect();
    let one_by_one: Vec<Drawn> = draws.iter().map(|&drawn| draw(ctx, &logits, filters, drawn)).collect();
    let rows = Tensor::from_slice(ctx.pool(), &[23, logits.len()], &logits.f32s().repeat(23));
    assert_eq!(draw_each(ctx, &rows, filters, &draws).wait(), one_by_one, "{filters:?} of rows on {}", ctx.describe());
    one_by_one
}

#[test]
fn a_gpu_draws_what_the_processor_draws() {
    let host = Context::cpu(1);
    for ctx in gpus() {
        for len in [1, 5, 511, 3000] {
            // A third of them alike, so that cuts are among equals.
            let of = |(i, x): (usize, &f32)| if i % 3 == 0 { 2.5 } else { 6.0 * x };
            let logits: Vec<f32> = numbers(len, 1).iter().enumerate().map(of).collect();
            for filters in &FILTERS {
                let (found, expected) = (drawn(&ctx, &logits, filters), drawn(&host, &logits, filters));
                assert_eq!(found, expected, "{filters:?} of {len} on {}", ctx.describe());
            }
        }
    }
}

#[test]
fn a_device_has_the_ids_that_the_host_gets_and_looks_up_their_rows() {
    for ctx in gpus().chain([Context::cpu(1)]) {
        let logits = Tensor::from_slice(ctx.pool(), &[5, 37], &numbers(5 * 37, 1));
        let tokens = draw_each(&ctx, &logits, &ALL, &[0.0, 0.3, 0.5, 0.7, 0.9]);
        let ids: Vec<u32> = tokens.wait().iter().map(|drawn| drawn.id).collect();
        assert_eq!((tokens.ids().u32s(), tokens.vocabulary()), (&ids[..], 37), "{}", ctx.describe());
        let floats = Tensor::from_slice(ctx.pool(), &[40, 32], &numbers(40 * 32, 2));
        for table in [quantize(&ctx, &floats, DType::Q8), floats] {
            let rows = embedding_of_drawn(&ctx, &tokens, &table, DType::F32);
            let what = format!("{:?} on {}", table.dtype(), ctx.describe());
            assert_eq!(rows.f32s(), embedding(&ctx, &ids, &table, DType::F32).f32s(), "{what}");
        }
    }
}

#[test]
fn what_is_not_possible_is_not_drawn_on_any_device_and_nan_is_said() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for ctx in gpus().chain([Context::cpu(1)]) {
        for filters in &FILTERS {
            let ids = |logits: &[f32]| drawn(&ctx, logits, filters);
            let name = format!("{filters:?} on {}", ctx.describe());
            assert!(ids(&[nan, 0.0, -inf, 0.0, nan]).iter().all(|d| (d.id == 1 || d.id == 3) && d.has_nan), "{name}");
            assert!(ids(&[3.0, inf, -inf]).iter().all(|&d| d == Drawn { id: 1, has_nan: false }), "{name}");
            assert!(ids(&[nan; 20]).iter().all(|&d| d == Drawn { id: 0, has_nan: true }), "{name}");
            assert!(ids(&[-inf; 2]).iter().all(|&d| d == Drawn { id: 0, has_nan: false }), "{name}");
            assert!(ids(&[-1e30, -3e38]).iter().all(|&d| d == Drawn { id: 0, has_nan: false }), "{name}");
        }
        let greedy = Filters { temperature: 0.0, ..ALL };
        assert!(drawn(&ctx, &[-1.0, -0.0, 0.0], &greedy).iter().all(|d| d.id == 1), "{}", ctx.describe());
        let tiny = Filters { temperature: 1e-40, ..ALL };
        assert!(drawn(&ctx, &[3.0, 2.0], &tiny).iter().all(|d| d.id == 0));
    }
}
