use super::*;
use crate::Isa;
use crate::test_data::numbers;

fn spread(seed: u64, len: usize) -> Vec<f32> {
    numbers(len, seed).iter().map(|x| 3.0 * x).collect()
}

fn close(value: f32, expected: f64, tolerance: f64) -> bool {
    (f64::from(value) - expected).abs() <= tolerance
}

#[test]
fn a_softmax_is_its_formula_at_any_width() {
    for isa in Isa::available() {
        for width in [1, 3, 16, 17, 64, 100] {
            let mut logits = spread(width as u64, 5 * width);
            if width > 1 {
                logits[1] = f32::NEG_INFINITY;
            }
            let (mut probs, mut sums) = (vec![0.0; logits.len()], [RowSums::default(); 5]);
            softmax_rows(isa, &logits, &mut probs, &mut sums);
            for ((logits, probs), sums) in logits.chunks(width).zip(probs.chunks(width)).zip(sums) {
                let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                let expected: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp() / total).collect();
                let entropy: f64 = expected.iter().map(|&p| if p > 0.0 { -p * p.ln() } else { 0.0 }).sum();
                assert!(probs.iter().zip(&expected).all(|(&p, &e)| close(p, e, 1e-6)), "{isa:?} {width}");
                assert!(close(sums.lse, total.ln(), 1e-5) && close(sums.entropy, entropy, 1e-5), "{isa:?} {width}");
            }
        }
        let (mut probs, mut sums) = ([0.0; 3], [RowSums::default()]);
        softmax_rows(isa, &[0.0, f32::NAN, 1.0], &mut probs, &mut sums);
        assert!(probs.iter().all(|p| p.is_nan()) && sums[0].lse.is_nan());
    }
}

#[test]
fn deviations_and_normal_tails_are_their_formulas() {
    for isa in Isa::available() {
        let raw: Vec<f32> = (-400..400).map(|i| i as f32 * 0.25).collect();
        let mut deviations = vec![0.0; raw.len()];
        softplus(isa, &raw, &mut deviations);
        for (&x, &value) in raw.iter().zip(&deviations) {
            let expected = f64::from(x).exp().ln_1p();
            assert!(close(value, expected, 4e-7 * expected + 1e-37), "{isa:?}: softplus({x}) = {value}, {expected}");
        }
        let mut above = [0.0; 4];
        normal_above(isa, &[0.0, 1.0, -4.0, 90.0], &[1.0, 1.0, 2.0, 1.0], &[0.0, 0.0, 0.0, 0.0], &mut above);
        for (value, expected) in above.into_iter().zip([0.5, 0.841_344_746, 0.022_750_132, 1.0]) {
            assert!(close(value, expected, 3e-7), "{isa:?}: {value}, {expected}");
        }
    }
}

#[test]
fn offers_are_those_of_a_search_the_lowest_index_at_a_tie() {
    for isa in Isa::available() {
        for width in [1, 2, 7, 16, 33, 64] {
            // Whole numbers: many ties.
            let scores: Vec<f32> = spread(width as u64, 50 * width).iter().map(|x| x.round()).collect();
            let prices: Vec<f32> = spread(99, width).iter().map(|x| x.round()).collect();
            let tokens: Vec<u32> = (0..50).rev().collect();
            let mut offers = vec![Offer::default(); 50];
            best_offers(isa, &scores, &prices, &tokens, &mut offers);
            for (token, offer) in tokens.into_iter().zip(offers) {
                let row = &scores[token as usize * width..][..width];
                let mut order: Vec<usize> = (0..width).collect();
                order.sort_by(|&a, &b| (row[b] - prices[b]).total_cmp(&(row[a] - prices[a])));
                let value = |at: usize| order.get(at).map_or(f32::NEG_INFINITY, |&e| row[e] - prices[e]);
                let expected = Offer { expert: order[0] as u32, lead: value(0) - value(1) };
                assert_eq!(offer, expected, "{isa:?}, {width} experts, token {token}");
            }
        }
    }
}
