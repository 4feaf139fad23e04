use super::*;
use crate::test_data::{contexts, is_close, kind, numbers, rounded, tensor};

/// Returns `sum over k of a(k) b(k)`, and the sum of the terms' magnitudes.
fn dot(a: impl Iterator<Item = f64>, b: impl Iterator<Item = f64>) -> (f64, f64) {
    a.zip(b).map(|(a, b)| a * b).fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()))
}

fn assert_close(what: &str, y: &Tensor, exact: impl Iterator<Item = (f64, f64)>, depth: usize) {
    for (index, (&y, (exact, size))) in y.f32s().iter().zip(exact).enumerate() {
        assert!(is_close(y, exact, size, depth, DType::F32), "{what}: element {index} is {y}, exactly {exact}");
    }
}

/// Checks all three products against f64, as close as f32 products are, with bits that do not depend on threads.
fn check(t: usize, e: usize, d: usize, of: DType) {
    let (x, w, dl) = (numbers(t * d, 1), numbers(e * d, 2), numbers(t * e, 3));
    let x_at = |t: usize, i: usize| rounded(x[t * d + i], of);
    let (w_at, dl_at) = (|e: usize, i: usize| f64::from(w[e * d + i]), |t: usize, o: usize| f64::from(dl[t * e + o]));
    let mut bits: Option<Vec<f32>> = None;
    let mut last_kind = None;
    for ctx in contexts() {
        let name = |what: &str| format!("{what}, (T, E, D) {:?}, x {of:?}, {:?}", (t, e, d), kind(&ctx));
        let of_f32 = |shape: &[usize], values: &[f32]| tensor(&ctx, shape, values, DType::F32);
        let (xs, ws, dls) = (tensor(&ctx, &[t, d], &x, of), of_f32(&[e, d], &w), of_f32(&[t, e], &dl));
        let y = logits(&ctx, &xs, &ws);
        let pairs = (0..t).flat_map(|t| (0..e).map(move |o| (t, o)));
        let exact = pairs.map(|(t, o)| dot((0..d).map(|i| x_at(t, i)), (0..d).map(|i| w_at(o, i))));
        assert_close(&name("logits"), &y, exact, d);
        let dx = logits_backward_input(&ctx, &dls, &ws, of);
        let pairs = (0..t).flat_map(|t| (0..d).map(move |i| (t, i)));
        let exact = pairs.map(|(t, i)| dot((0..e).map(|o| dl_at(t, o)), (0..e).map(|o| w_at(o, i))));
        assert_close(&name("dx"), &dx, exact, e);
        let mut onto = dx.copied(ctx.pool());
        logits_backward_input_add(&ctx, &dls, &ws, of, &mut onto);
        assert!(
            onto.f32s().iter().zip(dx.f32s()).all(|(onto, dx)| (onto - 2.0 * dx).abs() <= 1e-5),
            "{}",
            name("onto")
        );
        let mut dw = of_f32(&[e, d], &vec![f32::NAN; e * d]);
        let pairs = || (0..e).flat_map(|o| (0..d).map(move |i| (o, i)));
        let exact: Vec<_> =
            pairs().map(|(o, i)| dot((0..t).map(|t| dl_at(t, o)), (0..t).map(|t| x_at(t, i)))).collect();
        logits_backward_weight(&ctx, &dls, &xs, Write::Replace, &mut dw);
        assert_close(&name("dw"), &dw, exact.iter().copied(), t);
        logits_backward_weight(&ctx, &dls, &xs, Write::Add, &mut dw);
        let twice = exact.iter().map(|&(sum, size)| (2.0 * sum, 2.0 * size));
        assert_close(&name("dw, added"), &dw, twice, t);
        let all = [y.f32s(), dx.f32s(), dw.f32s()].concat();
        if last_kind.replace(kind(&ctx)) != Some(kind(&ctx)) {
            bits = None;
        }
        assert_eq!(&all, bits.get_or_insert_with(|| all.clone()), "{}", name("bits"));
    }
}

#[test]
fn logits_and_their_gradients_are_as_close_to_f64_as_products_of_f32() {
    // Few tokens, sizes that are no whole vectors, and sizes for tensor cores, where the weight gradient is summed in
    // parts.
    for (t, e, d) in [(0, 8, 16), (1, 8, 16), (70, 5, 33), (300, 12, 24), (2_100, 8, 24)] {
        check(t, e, d, DType::BF16);
    }
    check(600, 8, 16, DType::F32);
}

#[test]
fn a_logit_that_is_not_finite_is_its_tokens_alone() {
    let (t, e, d) = (2_100, 8, 16);
    let (mut x, w) = (numbers(t * d, 1), numbers(e * d, 2));
    (x[17 * d + 3], x[40 * d], x[2_099 * d + 15]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    for ctx in contexts() {
        let y = logits(&ctx, &tensor(&ctx, &[t, d], &x, DType::BF16), &tensor(&ctx, &[e, d], &w, DType::F32));
        for (token, row) in y.f32s().chunks(e).enumerate() {
            let is_finite = row.iter().all(|logit| logit.is_finite());
            assert_eq!(is_finite, ![17, 40, 2_099].contains(&token), "token {token} on {}", ctx.describe());
        }
    }
}
