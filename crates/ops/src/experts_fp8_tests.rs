use super::*;
use crate::e4m3::BLOCK;
use crate::e4m3::tests::exact_matrices;
use crate::test_data::{is_close, kinds, numbers, rounded, tensor};
use moeworks_gpu::Gpu;

/// A layer whose tokens have one or two experts, most of them the first.
struct Case {
    t: usize,
    d: usize,
    f: usize,
    e: usize,
    activation: Activation,
}

/// Its inputs as values of their types, and who goes where.
struct Inputs {
    x: Vec<f32>,
    dy: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    offsets: Vec<u32>,
    tokens: Vec<u32>,
    token_rows: Vec<u32>,
    weights: Vec<f32>,
    experts: Vec<usize>,
}

impl Case {
    fn af(&self) -> usize {
        self.f * self.activation.num_inputs()
    }

    fn inputs(&self) -> Inputs {
        let Self { t, d, f, e, .. } = *self;
        // Columns and rows differ in size, so that each block needs a scale of its own.
        let sized = |len: usize, columns: usize, seed| -> Vec<f32> {
            let size = |i: usize| ((i % columns / 50 + i / columns % 7 + i / columns / 64 % 5) as f32).exp2();
            numbers(len, seed)
                .iter()
                .enumerate()
                .map(|(i, x)| rounded(x * size(i) / 64.0, DType::BF16) as f32)
                .collect()
        };
        let (mut offsets, mut tokens, mut experts) = (vec![0], Vec::new(), Vec::new());
        let mut token_rows = vec![NO_ROW; t * 2];
        for expert in 0..e {
            for token in 0..t {
                let second = (token % 5 < e).then_some(token % 5).filter(|&second| second > 0);
                if let Some(choice) = [Some(0), second].iter().position(|&choice| choice == Some(expert)) {
                    token_rows[token * 2 + choice] = tokens.len() as u32;
                    tokens.push(token as u32);
                    experts.push(expert);
                }
            }
            offsets.push(tokens.len() as u32);
        }
        Inputs {
            x: sized(t * d, d, 1),
            dy: sized(t * d, d, 2),
            gate_up: sized(e * self.af() * d, d, 3),
            down: sized(e * d * f, f, 4),
            weights: numbers(tokens.len(), 5),
            offsets,
            tokens,
            token_rows,
            experts,
        }
    }
}

fn as_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// The product of a row with a row of a matrix, and the sum of its terms' sizes.
fn dot(a: &[f64], b: impl Iterator<Item = f64>) -> (f64, f64) {
    a.iter().zip(b).fold((0.0, 0.0), |(sum, size), (a, b)| (sum + a * b, size + (a * b).abs()))
}

/// The relative error that a sum may have besides the rounding of f32: Hopper adds up products of eight-bit floats in
/// about 14 bits (DeepSeek-V3's report, section 3.3.2), and those of 128 at a time in f32.
fn sum_error(ctx: &Context) -> f64 {
    let is_emulated = |gpu: &Gpu| gpu.memory_bytes().is_none();
    if ctx.gpu().is_none_or(is_emulated) { 0.0 } else { 1.0 / 2048.0 }
}

fn assert_close(what: &str, y: &Tensor, exact: &[(f64, f64)], depth: usize, sum_error: f64) {
    let more = 1.0 + sum_error / f64::from(f32::EPSILON) / (depth as f64).sqrt();
    for (index, (&y_value, &(value, size))) in y.to_f32_vec().iter().zip(exact).enumerate() {
        let is_close = is_close(y_value, value, size * more + 1e-6, depth, y.dtype());
        assert!(is_close, "{what}: element {index} of {:?} is {y_value}, exactly {value}", y.shape());
    }
}

/// Every phase against products in f64 of what is rounded in f64, from what the phase before it left; the activation
/// is ReLU, which rounds nothing, or only its input and the way back are compared.
fn check(case: &Case, ctx: &Context) {
    let Case { d, f, e, activation, .. } = *case;
    let (inputs, af) = (case.inputs(), case.af());
    let of = |shape: &[usize], values: &[f32]| tensor(ctx, shape, values, DType::BF16);
    let (x, dy) = (of(&[case.t, d], &inputs.x), of(&[case.t, d], &inputs.dy));
    let (gate_up, down) = (of(&[e, af, d], &inputs.gate_up), of(&[e, d, f], &inputs.down));
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
    let rows = ExpertRows::new(&inputs.offsets, &inputs.tokens, &inputs.weights, &inputs.token_rows, 2);
    let (y, saved) = experts_forward(ctx, &x, weights, rows);
    let back = experts_backward(ctx, &dy, weights, rows, &saved);

    let of_rows = |x: &[f64], columns: usize| exact_matrices(x, x.len() / columns, columns, 1, BLOCK);
    let (x, dy) = (of_rows(&as_f64(&inputs.x), d), of_rows(&as_f64(&inputs.dy), d));
    let w1 = exact_matrices(&as_f64(&inputs.gate_up), f, d, BLOCK, BLOCK);
    let w2 = exact_matrices(&as_f64(&inputs.down), d, f, BLOCK, BLOCK);
    let (h, dh) = (as_f64(&saved.h.to_f32_vec()), as_f64(&back.dh.to_f32_vec()));
    let a = of_rows(&h.iter().map(|h| h.max(0.0)).collect::<Vec<_>>(), f);
    let rounded_dh = of_rows(&dh, af);
    let (mut exact_h, mut exact_dh) = (Vec::new(), Vec::new());
    let (mut exact_y, mut exact_dx) = (vec![(0.0, 0.0); y.len()], vec![(0.0, 0.0); y.len()]);
    // Rows are rounded to bf16 before they are added up.
    let rounding = 1.0 / 256.0 / f64::from(f32::EPSILON);
    for (r, (&t, &e)) in inputs.tokens.iter().zip(&inputs.experts).enumerate() {
        let (t, weight) = (t as usize, f64::from(inputs.weights[r]));
        exact_h.extend((0..af).map(|j| dot(&x[t * d..][..d], w1[(e * af + j) * d..][..d].iter().copied())));
        let u = |j: usize| dot(&dy[t * d..][..d], (0..d).map(|i| w2[(e * d + i) * f + j]));
        exact_dh.extend((0..f).map(|j| {
            let ((value, size), is_on) = (u(j), f64::from(u8::from(h[r * af + j] > 0.0)));
            (weight * value * is_on, weight.abs() * size)
        }));
        for i in 0..d {
            let (value, size) = dot(&a[r * f..][..f.min(a.len())], w2[(e * d + i) * f..][..f].iter().copied());
            exact_y[t * d + i].0 += weight * value;
            exact_y[t * d + i].1 += weight.abs() * (size + value.abs() * rounding / (f as f64).sqrt());
            let (value, size) = dot(&rounded_dh[r * af..][..af], (0..af).map(|j| w1[(e * af + j) * d + i]));
            exact_dx[t * d + i].0 += value;
            exact_dx[t * d + i].1 += size + value.abs() * rounding / (af as f64).sqrt();
        }
    }
    let name = |what| format!("{what} of (T, D, F) {:?}, {activation:?} on {}", (case.t, d, f), ctx.describe());
    let error = sum_error(ctx);
    assert_close(&name("h"), &saved.h, &exact_h, d, error);
    assert_close(&name("dx"), &back.dx, &exact_dx, af, error);
    if activation == Activation::Relu {
        assert_close(&name("y"), &y, &exact_y, f, error);
        assert_close(&name("dh"), &back.dh, &exact_dh, d, error);
    }
}

fn fp8_kinds() -> impl Iterator<Item = Context> {
    kinds().map(|ctx| ctx.with_fp8_experts(true))
}

#[test]
fn products_are_those_of_rounded_operands_on_every_device() {
    for ctx in fp8_kinds() {
        // More than a tile's rows, columns in two, a depth that is no whole block; then sizes without kernels of
        // their own.
        check(&Case { t: 140, d: 144, f: 128, e: 3, activation: Activation::Relu }, &ctx);
        check(&Case { t: 20, d: 33, f: 70, e: 2, activation: Activation::Relu }, &ctx);
        check(&Case { t: 3, d: 144, f: 128, e: 2, activation: Activation::Relu }, &ctx);
    }
}

#[test]
fn gate_and_up_are_rounded_in_blocks_of_their_own() {
    for ctx in fp8_kinds() {
        check(&Case { t: 30, d: 48, f: 128, e: 2, activation: Activation::SwiGlu }, &ctx);
        check(&Case { t: 12, d: 20, f: 130, e: 2, activation: Activation::SwiGlu }, &ctx);
        check(&Case { t: 10, d: 160, f: 256, e: 1, activation: Activation::SwiGlu }, &ctx);
    }
}

#[test]
fn experts_in_f32_are_not_rounded() {
    let ctx = Context::cpu(1);
    let (x, gate_up, down) = (numbers(64, 1), numbers(256, 2), numbers(256, 3));
    let of = |shape: &[usize], values: &[f32]| tensor(&ctx, shape, values, DType::F32);
    let (x, gate_up, down) = (of(&[4, 16], &x), of(&[1, 16, 16], &gate_up), of(&[1, 16, 16], &down));
    let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation: Activation::Relu };
    let (offsets, order, ones) = ([0, 4], [0, 1, 2, 3], [1.0; 4]);
    let rows = ExpertRows::new(&offsets[..], &order[..], &ones[..], &order[..], 1);
    let [plain, in_fp8] =
        [false, true].map(|has| experts_forward(&ctx.clone().with_fp8_experts(has), &x, weights, rows).0);
    assert_eq!(plain.f32s(), in_fp8.f32s());
}
