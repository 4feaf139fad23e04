use moeworks_tensor::{Purpose, Random};

use super::{Draw, Sparsemixer, THIRD};

const LOGITS: [f32; 4] = [2.0, 1.9, 1.0, -3.0];

/// Returns the experts of a token and their weights.
fn chosen(rule: Sparsemixer, t: usize, logits: &[f32]) -> ([u32; 2], [f32; 2]) {
    let (mut ids, mut weights, mut gates) = ([0; 2], [0.0; 2], vec![0.0; logits.len()]);
    rule.choose(t, logits, &mut gates, &mut ids);
    rule.weigh(t, logits, &mut gates, &ids, &mut weights);
    (ids, weights)
}

#[test]
fn a_choice_shares_its_softmax_with_the_experts_close_to_it() {
    let (ids, weights) = chosen(Sparsemixer { jitter: 0.1, random: None, first: 0 }, 0, &LOGITS);
    assert_eq!(ids, [0, 1]);
    assert!((weights[0] - 1.0 / (1.0 + (-0.1_f32).exp())).abs() < 1e-6, "{weights:?}");
    assert_eq!(weights[1], 1.0);
    // At a jitter of 0.25 the bound is 0.5: 1.0 is at 0.47 from 1.9, and at 0.5 from 2.0.
    let (_, weights) = chosen(Sparsemixer { jitter: 0.25, random: None, first: 0 }, 0, &LOGITS);
    let second = 1.0 / (1.0 + (-0.9_f32).exp());
    assert!((weights[1] - second).abs() < 1e-6, "{weights:?}");
}

/// The gradient estimate requires that a choice is drawn with its share as probability, that the highest has its full
/// weight, and that another has a third of it in 3 of 4 cases.
#[test]
fn in_training_choices_are_drawn_and_weighed_as_the_estimate_asks() {
    let rule = Sparsemixer { jitter: 0.1, random: Some(Random::new(5, Purpose::Router, 0)), first: 0 };
    let share = 1.0 / (1.0 + (-0.1_f32).exp());
    let count = 20_000;
    let (mut firsts, mut thirds) = (0, 0);
    for t in 0..count {
        let (ids, weights) = chosen(rule, t, &LOGITS);
        match ids {
            [0, 1] => assert!((weights[0] - share).abs() < 1e-6 && weights[1] == 1.0, "{weights:?}"),
            [1, 0] => {
                firsts += 1;
                assert_eq!(weights[1], 1.0);
                let is_third = (weights[0] - THIRD * (1.0 - share)).abs() < 1e-6;
                assert!(is_third || (weights[0] - (1.0 - share)).abs() < 1e-6, "{weights:?}");
                thirds += usize::from(is_third);
            }
            _ => panic!("{ids:?} are not close"),
        }
    }
    let expected = f64::from(1.0 - share) * count as f64;
    assert!((f64::from(firsts) - expected).abs() < 5.0 * expected.sqrt(), "{firsts}, expected {expected}");
    assert!((thirds as f64 - 0.75 * expected).abs() < 5.0 * expected.sqrt(), "{thirds} of {firsts}");
}

/// Without noise backward is the derivative of the weights. With noise it is that of the shares, whatever factor they
/// have.
#[test]
fn backward_is_the_derivative_of_the_shares() {
    let (ids, dweights) = ([1, 0], [0.7, -1.3]);
    let rule = Sparsemixer { jitter: 0.3, random: None, first: 0 };
    let value = |logits: &[f32]| {
        let (mut weights, mut gates) = ([0.0; 2], [0.0; 4]);
        rule.weigh(0, logits, &mut gates, &ids, &mut weights);
        weights.iter().zip(dweights).map(|(w, d)| f64::from(*w) * f64::from(d)).sum::<f64>()
    };
    let (mut found, mut gates) = ([0.0; 4], [0.0; 4]);
    rule.backward(&LOGITS, &mut gates, &ids, &dweights, &mut found);
    for expert in 0..4 {
        let moved = |by: f32| {
            let mut logits = LOGITS;
            logits[expert] += by;
            value(&logits)
        };
        let expected = (moved(1e-2) - moved(-1e-2)) / 2e-2;
        assert!((f64::from(found[expert]) - expected).abs() < 1e-4, "{expert}: {} and {expected}", found[expert]);
    }
    // Training gives the same gradient, although some weights are a third.
    let (mut training, random) = ([0.0; 4], Some(Random::new(0, Purpose::Router, 0)));
    Sparsemixer { random, ..rule }.backward(&LOGITS, &mut gates, &ids, &dweights, &mut training);
    assert_eq!(found, training);
}

#[test]
fn logits_that_are_no_numbers_show() {
    for random in [None, Some(Random::new(1, Purpose::Router, 0))] {
        let (ids, weights) = chosen(Sparsemixer { jitter: 0.1, random, first: 0 }, 0, &[f32::NAN; 3]);
        assert_eq!(ids, [0, 1]);
        assert!(weights.iter().all(|weight| weight.is_nan()), "{weights:?}");
    }
    assert_ne!(Draw::Ranking.at(0), Draw::Second.at(0));
}
