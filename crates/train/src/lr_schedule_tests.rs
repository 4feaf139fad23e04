use super::*;

fn schedule(decay: Decay) -> LrSchedule {
    LrSchedule { peak: 1.0, min_ratio: 0.1, warmup_steps: 10, total_steps: 111, decay }
}

#[test]
fn warm_up_is_linear_and_reaches_the_peak() {
    for decay in [Decay::Cosine, Decay::Constant, Decay::Wsd { decay_steps: 20 }] {
        let s = schedule(decay);
        assert!((s.at(0) - 0.1).abs() < 1e-12);
        assert!((s.at(9) - 1.0).abs() < 1e-12);
        assert!((s.at(10) - 1.0).abs() < 1e-12);
    }
}

#[test]
fn cosine_passes_its_middle_and_ends_at_the_minimum() {
    let s = schedule(Decay::Cosine);
    assert!((s.at(60) - 0.55).abs() < 1e-12);
    assert!((s.at(110) - 0.1).abs() < 1e-12);
    assert!((s.at(500) - 0.1).abs() < 1e-12);
}

#[test]
fn wsd_is_flat_then_linear() {
    let s = schedule(Decay::Wsd { decay_steps: 21 });
    assert!((s.at(90) - 1.0).abs() < 1e-12);
    assert!((s.at(100) - 0.55).abs() < 1e-12);
    assert!((s.at(110) - 0.1).abs() < 1e-12);
}

#[test]
fn every_rate_is_between_the_minimum_and_the_peak_whatever_the_lengths() {
    for total_steps in [1, 2, 3, 10, 50] {
        for warmup_steps in [0, 1, 2, 10, 100] {
            for decay in [Decay::Cosine, Decay::Constant, Decay::Wsd { decay_steps: 7 }] {
                let s = LrSchedule { peak: 2.0, min_ratio: 0.0, warmup_steps, total_steps, decay };
                for step in 0..total_steps {
                    let rate = s.at(step);
                    assert!((0.0..=2.0).contains(&rate), "{s:?} at {step}: {rate}");
                }
            }
        }
    }
}
