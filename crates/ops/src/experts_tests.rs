#[path = "experts_tests/exact_activations.rs"]
mod exact_activations;

use proptest::prelude::*;

use self::exact_activations::{ACTIVATIONS, exact_activation};
use super::*;
use crate::elementwise::cast;
use crate::test_data::{contexts, gpus, is_close, kind, numbers, rounded, tensor};

/// A layer's shape, who goes where, and how. A choice is an expert, or `None` for a dropped one.
#[derive(Clone, Debug)]
struct Case {
    t: usize,
    d: usize,
    f: usize,
    e: usize,
    choices: Vec<Vec<Option<usize>>>,
    activation: Activation,
}

/// The row map that belongs to a case's choices.
struct Routing {
    offsets: Vec<u32>,
    tokens: Vec<u32>,
    weights: Vec<f32>,
    token_rows: Vec<u32>,
    /// The expert of each row.
    experts: Vec<usize>,
}

impl Case {
    fn num_choices(&self) -> usize {
        self.choices.first().map_or(1, Vec::len)
    }

    fn routing(&self) -> Routing {
        let mut routing = Routing {
            offsets: vec![0],
            tokens: Vec::new(),
            weights: Vec::new(),
            token_rows: vec![NO_ROW; self.t * self.num_choices()],
            experts: Vec::new(),
        };
        for e in 0..self.e {
            for (t, choices) in self.choices.iter().enumerate() {
                for (k, _) in choices.iter().enumerate().filter(|(_, choice)| **choice == Some(e)) {
                    routing.token_rows[t * self.num_choices() + k] = routing.tokens.len() as u32;
                    routing.tokens.push(t as u32);
                    routing.experts.push(e);
                }
            }
            routing.offsets.push(routing.tokens.len() as u32);
        }
        routing.weights = numbers(routing.tokens.len(), 9);
        routing
    }
}

/// A sum with the sum of its terms' magnitudes, and by how much it may differ because rows were rounded to bf16
/// before they were added up.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    size: f64,
    rounding: f64,
}

impl Sum {
    fn add(&mut self, x: f64) {
        self.value += x;
        self.size += x.abs();
    }

    fn of(terms: impl Iterator<Item = f64>) -> Self {
        let mut sum = Self::default();
        terms.for_each(|x| sum.add(x));
        sum
    }
}

fn assert_close(what: &str, y: &Tensor, exact: &[Sum], depth: usize) {
    assert_eq!(y.len(), exact.len(), "{what}");
    for (index, (&y_value, exact)) in y.to_f32_vec().iter().zip(exact).enumerate() {
        let Sum { value, size, rounding } = *exact;
        let off = (f64::from(y_value) - value).clamp(-rounding, rounding);
        let is_close = is_close(y_value, value + off, size + value.abs() + 1e-6, depth, y.dtype());
        assert!(is_close, "{what}: element {index} of {:?} is {y_value}, exactly {}", y.shape(), exact.value);
    }
}

/// The inputs of a case, as values of their types.
struct Inputs {
    x: Vec<f32>,
    dy: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

/// One run of all phases on one context.
struct Run {
    y: Tensor,
    saved: ExpertsSaved,
    backward: ExpertsBackward,
    replaced: [Tensor; 2],
    added: [Tensor; 2],
    /// True if rows are rounded to bf16 before they are added up, and weighed activations in place of gradients: so
    /// on a GPU.
    rounds_rows: bool,
}

fn run(ctx: &Context, case: &Case, inputs: &Inputs, x_type: DType, w_type: DType) -> Run {
    let routing = case.routing();
    let af = case.f * case.activation.num_inputs();
    let x = tensor(ctx, &[case.t, case.d], &inputs.x, x_type);
    let dy = tensor(ctx, &[case.t, case.d], &inputs.dy, x_type);
    let gate_up = tensor(ctx, &[case.e, af, case.d], &inputs.gate_up, w_type);
    let down = tensor(ctx, &[case.e, case.d, case.f], &inputs.down, w_type);
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation: case.activation };
    let rows =
        ExpertRows::new(&routing.offsets, &routing.tokens, &routing.weights, &routing.token_rows, case.num_choices());
    let (y, saved) = experts_forward(ctx, &x, weights, rows);
    // Without what is saved it is the same.
    let (alone, nothing) = experts_forward_with(
        ctx,
        &x,
        weights,
        rows,
        ForwardOptions { is_forward_only: true, ..ForwardOptions::default() },
    );
    assert!(nothing.is_none() && alone.bytes() == y.bytes(), "{case:?}, {w_type:?}");
    let backward = experts_backward(ctx, &dy, weights, rows, &saved);
    let grads = |start: f32, write: Write, dtype: DType| {
        let fill = |shape: &[usize]| tensor(ctx, shape, &vec![start; shape.iter().product()], dtype);
        let (mut gate_up, mut down) = (fill(gate_up.shape()), fill(down.shape()));
        let grads = ExpertGrads { gate_up: &mut gate_up, down: &mut down };
        let grad_inputs =
            WeightGradInputs { x: &x, dy: &dy, saved: &saved, dh: &backward.dh, weighed: backward.weighed.as_ref() };
        experts_weight_grad(ctx, grad_inputs, case.activation, rows, write, grads);
        [gate_up, down]
    };
    let [replaced, added] = [(f32::NAN, Write::Replace), (0.5, Write::Add)].map(|(start, write)| {
        let grads_of = |dtype| grads(start, write, dtype);
        let exact = grads_of(DType::F32);
        // Those in bf16 are the same, rounded.
        for (exact, rounded) in exact.iter().zip(&grads_of(DType::BF16)) {
            assert!(cast(ctx, exact, DType::BF16).bytes() == rounded.bytes(), "{case:?}, {w_type:?}, {write:?}");
        }
        exact
    });
    // With the gradients of weights beside it, backward finds the same.
    let mut beside = [&gate_up, &down].map(|w| tensor(ctx, w.shape(), &vec![0.5; w.len()], DType::F32));
    let [gate_up_grad, down_grad] = &mut beside;
    let grads = ExpertGrads { gate_up: gate_up_grad, down: down_grad };
    let target = WeightGradTarget { write: Write::Add, of_used: false, grads };
    let both = experts_backward_with_weight_grad(ctx, &x, &dy, weights, rows, &saved, target);
    for (together, apart) in [&both.dx, &both.dh, &both.d_row_weights, &beside[0], &beside[1]].into_iter().zip([
        &backward.dx,
        &backward.dh,
        &backward.d_row_weights,
        &added[0],
        &added[1],
    ]) {
        assert!(together.bytes() == apart.bytes(), "{case:?}, {w_type:?}");
    }
    let rounds_rows = w_type == DType::BF16;
    Run { y, saved, backward, replaced, added, rounds_rows }
}

/// Compares each phase with a plain computation in f64 from what the phase before it left.
fn compare(case: &Case, inputs: &Inputs, run: &Run, x_type: DType, w_type: DType) {
    let routing = case.routing();
    let (d, f, af) = (case.d, case.f, case.f * case.activation.num_inputs());
    let value = |x: f32| rounded(rounded(x, x_type) as f32, w_type);
    let (x, dy) = (|t: usize, i: usize| value(inputs.x[t * d + i]), |t: usize, i: usize| value(inputs.dy[t * d + i]));
    let w1 = |e: usize, j: usize, i: usize| rounded(inputs.gate_up[(e * af + j) * d + i], w_type);
    let w2 = |e: usize, i: usize, j: usize| rounded(inputs.down[(e * d + i) * f + j], w_type);
    let (h, dh) = (run.saved.h.to_f32_vec(), run.backward.dh.to_f32_vec());
    let mut exact_h = Vec::new();
    let mut exact_dh = Vec::new();
    let mut exact_dg = Vec::new();
    let mut y = vec![Sum::default(); case.t * d];
    let mut dx = vec![Sum::default(); case.t * d];
    let mut dw1 = vec![Sum::default(); case.e * af * d];
    let mut dw2 = vec![Sum::default(); case.e * d * f];
    for (r, (&e, &t)) in routing.experts.iter().zip(&routing.tokens).enumerate() {
        let (t, weight) = (t as usize, routing.weights[r]);
        exact_h.extend((0..af).map(|j| Sum::of((0..d).map(|i| x(t, i) * w1(e, j, i)))));
        let mut gradients = vec![Sum::default(); af];
        let mut dg = Sum::default();
        // GELU is exact to within 3e-7 of its argument, which can be large beside the value.
        let (mut values, mut a, mut a_sizes) = (Vec::new(), Vec::new(), Vec::new());
        for j in 0..f {
            let up = if af > f { f64::from(h[r * af + f + j]) } else { 0.0 };
            let (value, slope, up_slope) = exact_activation(case.activation, f64::from(h[r * af + j]), up);
            values.push(value);
            a.push(rounded(value as f32, w_type));
            let size = if case.activation == Activation::Gelu { f64::from(h[r * af + j]).abs() } else { value.abs() };
            a_sizes.push(size);
            let u = Sum::of((0..d).map(|i| dy(t, i) * w2(e, i, j)));
            dg.value += u.value * value;
            dg.size += u.size * size;
            // Near a zero of the slope its error is that of the terms that cancel.
            let terms = (1.0 + f64::from(h[r * af + j]).abs()) * (1.0 + up.abs()) * f64::from(weight).abs();
            let scaled =
                |slope: f64| Sum { value: u.value * f64::from(weight) * slope, size: u.size * terms, ..Sum::default() };
            gradients[j] = scaled(slope);
            if af > f {
                gradients[f + j] = scaled(up_slope);
            }
        }
        exact_dh.extend(gradients);
        exact_dg.push(dg);
        let rounding = |row: f64| if run.rounds_rows { row.abs() / 256.0 } else { 0.0 };
        for i in 0..d {
            let (y_row, dx_row) = (
                (0..f).map(|j| w2(e, i, j) * a[j]).sum::<f64>(),
                (0..af).map(|j| f64::from(dh[r * af + j]) * w1(e, j, i)).sum::<f64>(),
            );
            y[t * d + i].rounding += rounding(f64::from(weight) * y_row);
            dx[t * d + i].rounding += rounding(dx_row);
            for j in 0..f {
                let factor = f64::from(weight) * w2(e, i, j);
                y[t * d + i].value += factor * a[j];
                y[t * d + i].size += factor.abs() * a_sizes[j];
            }
            let weigh = |x: f64| rounded((x * f64::from(weight)) as f32, w_type);
            let own_dy = rounded(inputs.dy[t * d + i], x_type);
            for j in 0..af {
                let dh = f64::from(dh[r * af + j]);
                dx[t * d + i].add(dh * w1(e, j, i));
                dw1[(e * af + j) * d + i].add(dh * x(t, i));
            }
            for j in 0..f {
                let weighed = rounded(own_dy as f32, w_type) * weigh(values[j]);
                dw2[(e * d + i) * f + j].value += weighed;
                dw2[(e * d + i) * f + j].size += (own_dy * f64::from(weight)).abs() * a_sizes[j];
            }
        }
    }
    // The activation may round the other way where it lies between two numbers, and where it is small the error of
    // its exponential grows with the argument: what follows it is less close.
    let slack = |sums: Vec<Sum>| -> Vec<Sum> {
        let unit = if w_type == DType::BF16 { 1e3 } else { 16.0 };
        sums.into_iter().map(|sum| Sum { size: sum.size * unit, ..sum }).collect()
    };
    let shape = (case.t, case.d, case.f, case.e, case.activation);
    let name = |what: &str| format!("{what} of (T, D, F, E) {shape:?}, x {x_type:?}, w {w_type:?}");
    assert_close(&name("h"), &run.saved.h, &exact_h, d);
    assert_close(&name("y"), &run.y, &slack(y), f);
    assert_close(&name("dh"), &run.backward.dh, &slack(exact_dh), d);
    assert_close(&name("d_row_weights"), &run.backward.d_row_weights, &slack(exact_dg), d);
    assert_close(&name("dx"), &run.backward.dx, &dx, af);
    let num_rows = routing.tokens.len();
    let (dw1, dw2) = (dw1, slack(dw2));
    let added = |sums: &[Sum]| -> Vec<Sum> {
        sums.iter().map(|sum| Sum { value: sum.value + 0.5, size: sum.size + 0.5, ..*sum }).collect()
    };
    assert_close(&name("gate_up's gradient"), &run.replaced[0], &dw1, num_rows);
    assert_close(&name("down's gradient"), &run.replaced[1], &dw2, num_rows);
    assert_close(&name("added gate_up's gradient"), &run.added[0], &added(&dw1), num_rows);
    assert_close(&name("added down's gradient"), &run.added[1], &added(&dw2), num_rows);
}

/// Checks every mixture of types on every device, instruction set and number of threads.
fn check(case: &Case) {
    check_on(case, &contexts().collect::<Vec<_>>());
}

fn check_on(case: &Case, contexts: &[Context]) {
    let af = case.f * case.activation.num_inputs();
    let inputs = Inputs {
        x: numbers(case.t * case.d, 1),
        dy: numbers(case.t * case.d, 2),
        gate_up: numbers(case.e * af * case.d, 3),
        down: numbers(case.e * case.d * case.f, 4),
    };
    for (x_type, w_type) in [DType::F32, DType::BF16].into_iter().flat_map(|x| [(x, DType::F32), (x, DType::BF16)]) {
        let mut first: Option<(_, Vec<f32>)> = None;
        for ctx in contexts {
            let run = run(ctx, case, &inputs, x_type, w_type);
            let all = [&run.y, &run.backward.dx, &run.backward.d_row_weights, &run.replaced[0], &run.replaced[1]];
            let bits: Vec<f32> = all.iter().flat_map(|tensor| tensor.to_f32_vec()).collect();
            match &first {
                Some((same, first)) if *same == kind(ctx) => {
                    let is_same = first.iter().zip(&bits).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(is_same, "bits of {case:?} depend on the number of threads");
                }
                _ => {
                    compare(case, &inputs, &run, x_type, w_type);
                    first = Some((kind(ctx), bits));
                }
            }
        }
    }
}

fn round_robin(t: usize, e: usize, k: usize) -> Vec<Vec<Option<usize>>> {
    (0..t).map(|t| (0..k).map(|k| Some((t * 7 + k * 3) % e)).collect()).collect()
}

#[test]
fn every_phase_matches_f64_for_every_activation() {
    for activation in ACTIVATIONS {
        check(&Case { t: 37, d: 24, f: 20, e: 5, choices: round_robin(37, 5, 2), activation });
    }
}

#[test]
fn sizes_beyond_a_tile_match_f64() {
    let choices = round_robin(61, 3, 2);
    check(&Case { t: 61, d: 67, f: 113, e: 3, choices, activation: Activation::SwiGlu });
}

/// Boxes of several blocks of columns, in tiles after the first and of matrices after the first, are there on GPUs
/// that copy tensors.
#[test]
fn several_tiles_of_whole_blocks_match_f64_on_every_gpu() {
    let (t, d, f, e) = (70, 320, 320, 2);
    let case = Case { t, d, f, e, choices: round_robin(t, e, 2), activation: Activation::SwiGlu };
    let [x, dy] = [1, 2].map(|seed| numbers(t * d, seed));
    let inputs = Inputs { x, dy, gate_up: numbers(e * 2 * f * d, 3), down: numbers(e * d * f, 4) };
    for ctx in gpus() {
        let run = run(&ctx, &case, &inputs, DType::BF16, DType::BF16);
        compare(&case, &inputs, &run, DType::BF16, DType::BF16);
    }
}

/// Products more than one epoch deep, with tiles of the list that no group has: Hopper's blocks count how far each
/// is.
#[test]
fn blocks_that_keep_together_leave_their_counters_as_they_were() {
    let (t, d, f, e) = (90, 1032, 16, 5);
    let case = Case { t, d, f, e, choices: round_robin(t, 2, 1), activation: Activation::SwiGlu };
    let [x, dy] = [1, 2].map(|seed| numbers(t * d, seed));
    let inputs = Inputs { x, dy, gate_up: numbers(e * 2 * f * d, 3), down: numbers(e * d * f, 4) };
    for ctx in gpus() {
        let run = run(&ctx, &case, &inputs, DType::BF16, DType::BF16);
        compare(&case, &inputs, &run, DType::BF16, DType::BF16);
        let counters = ctx.gpu().expect("a GPU").counters(ctx.pool());
        assert!(counters.u32s().iter().all(|&count| count == 0), "counters of {ctx:?}", ctx = ctx.device());
    }
}

#[test]
fn all_tokens_at_one_expert_match_f64() {
    let choices = vec![vec![Some(2)]; 50];
    check(&Case { t: 50, d: 17, f: 33, e: 4, choices, activation: Activation::SwiGlu });
}

#[test]
fn a_token_without_rows_gets_exact_zeros() {
    let mut choices = round_robin(9, 3, 2);
    choices[4] = vec![None, None];
    choices[5][0] = None;
    let case = Case { t: 9, d: 8, f: 6, e: 3, choices, activation: Activation::Gelu };
    check(&case);
    let ctx = Context::cpu(1);
    let ones = vec![1.0; 3 * 8 * 8];
    let inputs =
        Inputs { x: numbers(72, 1), dy: numbers(72, 2), gate_up: ones[..144].to_vec(), down: ones[..144].to_vec() };
    let run = run(&ctx, &case, &inputs, DType::F32, DType::F32);
    assert!(run.y.f32s()[4 * 8..5 * 8].iter().all(|y| y.to_bits() == 0));
    assert!(run.backward.dx.f32s()[4 * 8..5 * 8].iter().all(|dx| dx.to_bits() == 0));
}

#[test]
fn gradients_of_used_experts_alone_leave_the_others_as_they_are() {
    let ctx = Context::cpu(2);
    let (t, d, f, e) = (5, 40, 24, 4);
    let case = Case {
        t,
        d,
        f,
        e,
        choices: vec![vec![Some(1)], vec![Some(3)], vec![Some(1)], vec![None], vec![Some(3)]],
        activation: Activation::SwiGlu,
    };
    let routing = case.routing();
    let rows = ExpertRows::new(&routing.offsets, &routing.tokens, &routing.weights, &routing.token_rows, 1);
    let of = |shape: &[usize], seed| tensor(&ctx, shape, &numbers(shape.iter().product(), seed), DType::F32);
    let (x, dy, gate_up, down) = (of(&[t, d], 1), of(&[t, d], 2), of(&[e, 2 * f, d], 3), of(&[e, d, f], 4));
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation: case.activation };
    let (_, saved) = experts_forward(&ctx, &x, weights, rows);
    let backward = experts_backward(&ctx, &dy, weights, rows, &saved);
    let inputs =
        WeightGradInputs { x: &x, dy: &dy, saved: &saved, dh: &backward.dh, weighed: backward.weighed.as_ref() };
    let [all, used] = [true, false].map(|is_all| {
        let mut grads = [&gate_up, &down].map(|w| tensor(&ctx, w.shape(), &vec![7.0; w.len()], DType::F32));
        let [gate_up, down] = &mut grads;
        let into = ExpertGrads { gate_up, down };
        if is_all {
            experts_weight_grad(&ctx, inputs, case.activation, rows, Write::Replace, into);
        } else {
            experts_weight_grad_of_used(&ctx, inputs, case.activation, rows, into);
        }
        grads
    });
    for (all, used) in all.iter().zip(&used) {
        let len = all.len() / e;
        for (expert, (all, used)) in all.f32s().chunks(len).zip(used.f32s().chunks(len)).enumerate() {
            if expert % 2 == 1 {
                assert_eq!(all, used, "expert {expert}");
            } else {
                assert!(all.iter().all(|&x| x == 0.0) && used.iter().all(|&x| x == 7.0), "expert {expert}");
            }
        }
    }
}

/// Gradients of megabytes, which are written where products of few rows read the matrices: one row, three, none and
/// more than are few; rows of whole lines, and for matrices down also one row more than tiles have.
#[test]
fn gradients_written_where_products_read_matrices_are_those_of_a_pass_of_their_own() {
    let choices: Vec<_> = [0, 1, 1, 1].into_iter().chain([3; 17]).map(|e| vec![Some(e)]).collect();
    let on_host = || contexts().filter(|ctx| ctx.gpu().is_none());
    for ((d, f), activation) in [((560, 1072), Activation::Gelu), ((1003, 544), Activation::SwiGlu)] {
        let (t, e) = (choices.len(), 4);
        let case = Case { t, d, f, e, choices: choices.clone(), activation };
        let routing = case.routing();
        let rows = ExpertRows::new(&routing.offsets, &routing.tokens, &routing.weights, &routing.token_rows, 1);
        let af = f * activation.num_inputs();
        let [x, dy] = [1, 2].map(|seed| numbers(t * d, seed));
        let [gate_up, down] = [(af, 3), (f, 4)].map(|(len, seed)| numbers(e * len * d, seed));
        for (ctx, dtype) in on_host().flat_map(|ctx| [DType::F32, DType::BF16].map(|dtype| (ctx.clone(), dtype))) {
            let [x, dy] = [&x, &dy].map(|x| tensor(&ctx, &[t, d], x, DType::F32));
            let gate_up = tensor(&ctx, &[e, af, d], &gate_up, dtype);
            let down = tensor(&ctx, &[e, d, f], &down, dtype);
            let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
            let (_, saved) = experts_forward(&ctx, &x, weights, rows);
            let apart = experts_backward(&ctx, &dy, weights, rows, &saved);
            let inputs = WeightGradInputs { x: &x, dy: &dy, saved: &saved, dh: &apart.dh, weighed: None };
            for (grads_type, of_used) in [(DType::F32, false), (dtype, true)] {
                let sevens = || [&gate_up, &down].map(|w| tensor(&ctx, w.shape(), &vec![7.0; w.len()], grads_type));
                let (mut own, mut beside) = (sevens(), sevens());
                let into = |[gate_up, down]: &mut [Tensor; 2], run: &mut dyn FnMut(ExpertGrads<'_>)| {
                    run(ExpertGrads { gate_up, down });
                };
                into(&mut own, &mut |grads| match of_used {
                    true => experts_weight_grad_of_used(&ctx, inputs, activation, rows, grads),
                    false => experts_weight_grad(&ctx, inputs, activation, rows, Write::Replace, grads),
                });
                let mut back = None;
                into(&mut beside, &mut |grads| {
                    let target = WeightGradTarget { write: Write::Replace, of_used, grads };
                    back = Some(experts_backward_with_weight_grad(&ctx, &x, &dy, weights, rows, &saved, target));
                });
                let back = back.expect("the pass has run");
                let found = [&back.dx, &back.dh, &back.d_row_weights, &beside[0], &beside[1]];
                let expected = [&apart.dx, &apart.dh, &apart.d_row_weights, &own[0], &own[1]];
                for (index, (found, expected)) in found.into_iter().zip(expected).enumerate() {
                    assert!(found.bytes() == expected.bytes(), "{d} x {f}, {dtype:?}, {:?}: {index}", ctx.isa());
                }
            }
        }
    }
}

#[test]
fn no_tokens_or_no_rows_give_empty_results_and_zero_gradients() {
    check(&Case { t: 0, d: 8, f: 6, e: 3, choices: Vec::new(), activation: Activation::SwiGlu });
    check(&Case { t: 3, d: 8, f: 6, e: 3, choices: vec![vec![None]; 3], activation: Activation::SwiGlu });
}

#[test]
fn one_token_matches_f64_whatever_its_experts() {
    let choices = [vec![Some(2), Some(6), None, Some(0), Some(3)], vec![Some(4)], vec![None, None]];
    // Sizes that are whole vectors and no whole chunks of what a GPU copies at a time, or several of them.
    let several = choices[0].clone();
    for (d, f, choices) in choices.map(|choices| (40, 96, choices)).into_iter().chain([(64, 1184, several)]) {
        check(&Case { t: 1, d, f, e: 7, choices: vec![choices], activation: Activation::SwiGlu });
    }
    // As many blocks as an emulated GPU has multiprocessors, each of which has much under way.
    let case = Case { t: 1, d: 672, f: 192, e: 2, choices: vec![vec![Some(1)]], activation: Activation::SwiGlu };
    check_on(&case, &gpus().collect::<Vec<_>>());
}

#[test]
fn a_base_is_added_to_what_one_token_and_several_get() {
    for (ctx, t) in contexts().flat_map(|ctx| [(ctx.clone(), 1), (ctx, 3)]) {
        let (d, f, e) = (64, 96, 5);
        let case = Case { t, d, f, e, choices: vec![vec![Some(3), Some(1)]; t], activation: Activation::SwiGlu };
        let routing = case.routing();
        let of = |shape: &[usize], seed, dtype| tensor(&ctx, shape, &numbers(shape.iter().product(), seed), dtype);
        let (gate_up, down) = (of(&[e, 2 * f, d], 3, DType::BF16), of(&[e, d, f], 4, DType::BF16));
        let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation: case.activation };
        let rows = ExpertRows::new(&routing.offsets, &routing.tokens, &routing.weights, &routing.token_rows, 2);
        let (x, base) = (of(&[t, d], 1, DType::BF16), of(&[t, d], 2, DType::F32));
        let options = ForwardOptions { is_forward_only: true, ..ForwardOptions::default() };
        let y = experts_forward_with(&ctx, &x, weights, rows, options).0;
        let options = ForwardOptions { base: Some(&base), ..options };
        let onto = experts_forward_with(&ctx, &x, weights, rows, options).0;
        for ((y, base), onto) in y.f32s().iter().zip(base.f32s()).zip(onto.f32s()) {
            assert!((y + base - onto).abs() <= 1e-5 * (y.abs() + base.abs()), "{t} tokens: {y} + {base}, {onto}");
        }
    }
}

#[test]
fn nan_stays_with_its_token() {
    let ctx = Context::cpu(2);
    for (w_type, activation) in
        [DType::F32, DType::BF16].into_iter().flat_map(|dtype| ACTIVATIONS.map(|act| (dtype, act)))
    {
        let case = Case { t: 30, d: 19, f: 35, e: 2, choices: round_robin(30, 2, 1), activation };
        let af = case.f * activation.num_inputs();
        let mut inputs = Inputs {
            x: numbers(30 * 19, 1),
            dy: numbers(30 * 19, 2),
            gate_up: numbers(2 * af * 19, 3),
            down: numbers(2 * 19 * 35, 4),
        };
        inputs.x[11 * 19 + 18] = f32::NAN;
        inputs.dy[12 * 19 + 18] = f32::NAN;
        let run = run(&ctx, &case, &inputs, DType::F32, w_type);
        for (t, (y, dx)) in run.y.f32s().chunks(19).zip(run.backward.dx.f32s().chunks(19)).enumerate() {
            assert_eq!(y.iter().all(|y| y.is_nan()), t == 11, "y of token {t}, {activation:?}");
            assert_eq!(y.iter().any(|y| y.is_nan()), t == 11, "y of token {t}, {activation:?}");
            let has_nan = dx.iter().any(|dx| dx.is_nan());
            assert!(has_nan == (t == 12) || t == 11, "dx of token {t}, {activation:?}");
        }
    }
}

#[test]
fn weights_too_large_for_one_part_of_the_depth_match_f64() {
    let choices = vec![vec![Some(1)], vec![Some(0)], vec![Some(1)]];
    // Only products on the host are cut so.
    let hosts: Vec<_> = contexts().filter(|ctx| ctx.gpu().is_none()).collect();
    check_on(&Case { t: 3, d: 1_101, f: 260, e: 2, choices, activation: Activation::SwiGlu }, &hosts);
}

#[test]
fn experts_without_rows_between_others_get_zero_gradients() {
    // Many experts, so that tasks of empty ones follow those of others.
    let choices = (0..20).map(|t| vec![Some(3 * (t % 9))]).collect();
    check(&Case { t: 20, d: 50, f: 40, e: 29, choices, activation: Activation::SwiGlu });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_shapes_and_loads_match_f64(
        (t, d, f, e) in (1_usize..40, 1_usize..40, 1_usize..60, 1_usize..6),
        k in 1_usize..4,
        seed in 0_u64..1000,
        activation in prop::sample::select(ACTIVATIONS.to_vec()),
    ) {
        let draws = numbers(t * k, seed);
        // Squared, so that loads are skewed; some choices are dropped.
        let choice = |x: f32| (x > -0.8).then(|| ((x * x * e as f32) as usize).min(e - 1));
        let choices = draws.chunks(k).map(|draws| draws.iter().map(|&x| choice(x)).collect()).collect();
        check(&Case { t, d, f, e, choices, activation });
    }
}
