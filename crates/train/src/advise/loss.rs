//! Findings on the course of the loss.

use super::figures::{Evaluated, Point, RunFigures};
use super::finding::{Figure, Finding, Over, Remedy, Topic};
use super::settings::Remedies;

/// Steps before a step from which its loss is expected.
const HISTORY: usize = 16;
/// Steps with a record before spikes are looked for.
const LEAST_HISTORY: usize = 8;
/// A loss above this multiple of the median before it, besides the spread, is a spike.
const SPIKE: f64 = 1.3;
/// Mean absolute deviations from the median that belong to the noise.
const NOISE: f64 = 6.0;
/// A mean loss above this multiple of the best is a rise.
const RISE: f64 = 1.15;
/// A validation loss above this multiple of the best is a rise.
const VALIDATION_RISE: f64 = 1.02;

/// Finds steps whose loss or gradient was not finite.
pub(super) fn not_finite(run: &RunFigures) -> Option<Finding> {
    let skipped: Vec<&Point> = run.course.points.iter().filter(|point| point.is_skipped).collect();
    let (first, last) = (skipped.first()?, skipped.last()?);
    let (num, of) = (skipped.len(), run.course.points.len());
    let in_window = skipped.iter().filter(|point| point.step >= run.window.first_step).count();
    let at_stake = (num as f64 / of as f64).max(in_window as f64 / run.window.num_records.max(1) as f64);
    let mut figures = vec![Figure::new("train/is_skipped", num as f64, Over::RunCount)];
    figures.push(Figure::new("train/lr", last.lr, Over::Step(last.step)));
    figures.extend(most_grad_norm(run));
    Some(Finding {
        topic: Topic::NotFinite,
        summary: format!(
            "{num} of {of} updates were skipped, the first at step {} and the last at step {}: the loss or the gradient \
             was not finite",
            first.step, last.step
        ),
        at_stake,
        figures,
        remedies: steadier(run),
    })
}

/// Finds a training loss that has risen above the best of the run.
pub(super) fn diverging(run: &RunFigures) -> Option<Finding> {
    let losses: Vec<f64> = run.course.points.iter().map(|p| p.loss).filter(|loss| loss.is_finite()).collect();
    let size = run.window.num_records.clamp(1, 100);
    if losses.len() < 2 * size.max(LEAST_HISTORY) {
        return None;
    }
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let now = mean(&losses[losses.len() - size..]);
    let best = losses.windows(size).map(mean).fold(f64::INFINITY, f64::min);
    if now.partial_cmp(&(RISE * best)) != Some(std::cmp::Ordering::Greater) || best <= 0.0 {
        return None;
    }
    let mut figures = vec![Figure::mean("train/loss", now)];
    figures.push(Figure::new(format!("train/loss, best mean of {size} steps"), best, Over::RunLeast));
    figures.extend(most_grad_norm(run));
    Some(Finding {
        topic: Topic::Diverging,
        summary: format!("the training loss has risen from {best:.4} to {now:.4}"),
        at_stake: 1.0 - best / now,
        figures,
        remedies: steadier(run),
    })
}

/// Finds jumps of the training loss.
pub(super) fn spikes(run: &RunFigures) -> Option<Finding> {
    let points: Vec<&Point> = run.course.points.iter().filter(|point| point.loss.is_finite()).collect();
    let mut highest: Option<(f64, &Point, f64)> = None;
    let (mut num, mut lost, mut at) = (0_usize, 0_usize, LEAST_HISTORY);
    while at < points.len() {
        let before: Vec<f64> = points[at.saturating_sub(HISTORY)..at].iter().map(|point| point.loss).collect();
        let middle = median(before.clone());
        let spread = median(before.iter().map(|loss| (loss - middle).abs()).collect());
        if points[at].loss <= SPIKE * middle + NOISE * spread {
            at += 1;
            continue;
        }
        let ratio = points[at].loss / middle;
        if highest.is_none_or(|(most, ..)| ratio > most) {
            highest = Some((ratio, points[at], middle));
        }
        // The steps until the loss is back are lost; they count as one spike.
        let is_back = |point: &&Point| point.loss <= 1.05 * middle + spread;
        let length = points[at..].iter().position(is_back).unwrap_or(points.len() - at);
        (num, lost, at) = (num + 1, lost + length, at + length.max(1));
    }
    let (_, point, middle) = highest?;
    let figures = vec![
        Figure::new("train/loss", point.loss, Over::Step(point.step)),
        Figure::new("train/loss, median before", middle, Over::Step(point.step)),
        Figure::new("train/grad_norm", point.grad_norm, Over::Step(point.step)),
        Figure::new("train/lr", point.lr, Over::Step(point.step)),
    ];
    Some(Finding {
        topic: Topic::Spikes,
        summary: format!(
            "the training loss jumped {}, most at step {}; {lost} of {} steps went by before it was back",
            if num == 1 { "once".to_owned() } else { format!("{num} times") },
            point.step,
            points.len()
        ),
        at_stake: lost as f64 / points.len() as f64,
        figures,
        remedies: steadier(run),
    })
}

/// Finds a validation loss that rises while the training loss falls.
pub(super) fn validation_rises(run: &RunFigures) -> Option<Finding> {
    let evaluations = &run.course.evaluations;
    let best = evaluations.iter().copied().min_by(|a, b| a.loss.total_cmp(&b.loss))?;
    let [.., before, last] = evaluations.as_slice() else { return None };
    if before.step <= best.step || before.loss <= best.loss || last.loss <= VALIDATION_RISE * best.loss {
        return None;
    }
    if run.window.loss.partial_cmp(&last.loss) != Some(std::cmp::Ordering::Less) {
        return None;
    }
    let figures = vec![
        Figure::new("val/loss", last.loss, Over::Step(last.step)),
        Figure::new("val/loss", best.loss, Over::RunLeast),
        Figure::mean("train/loss", run.window.loss),
    ];
    Some(Finding {
        topic: Topic::ValidationRises,
        summary: format!(
            "the validation loss was lowest at step {} ({:.4}) and is {:.4} at step {}: the model learns its data by heart",
            best.step, best.loss, last.loss, last.step
        ),
        at_stake: 1.0 - best.loss / last.loss,
        figures,
        remedies: less_by_heart(run, best),
    })
}

fn less_by_heart(run: &RunFigures, best: Evaluated) -> Vec<Remedy> {
    let (make, train) = (Remedies::new(&run.settings), &run.settings.train);
    let stop = Remedy {
        reach: super::Reach::NewRun,
        ..match make.set(
            "train.steps",
            best.step,
            format!(
                "a validation loss of about {:.4} in {} steps; more text in data.paths lowers it further",
                best.loss, best.step
            ),
        ) {
            Some(remedy) => remedy,
            None => return Vec::new(),
        }
    };
    let decay = if train.weight_decay > 0.0 { 2.0 * train.weight_decay } else { 0.1 };
    let decayed = make.set("train.weight_decay", decay, "smaller weights, which fit less noise");
    [Some(stop), decayed].into_iter().flatten().collect()
}

/// Returns remedies for a loss that is not steady.
fn steadier(run: &RunFigures) -> Vec<Remedy> {
    let (make, train) = (Remedies::new(&run.settings), &run.settings.train);
    let warmup = (2 * train.warmup_steps).max(train.steps / 20).max(1);
    let is_early =
        run.course.points.iter().any(|point| point.is_skipped && point.step <= 3 * train.warmup_steps.max(1));
    let has_experts = !run.window.layers.is_empty();
    let unclipped = train.clip_norm == 0.0;
    let remedies = [
        unclipped
            .then(|| make.set("train.clip_norm", "1.0", "no update larger than a gradient of norm 1 makes"))
            .flatten(),
        make.set("train.lr", train.lr / 2.0, "half the step of each update"),
        (is_early || train.warmup_steps == 0)
            .then(|| {
                make.set("train.warmup_steps", warmup, "smaller updates while the optimizer's moments are not settled")
            })
            .flatten(),
        (has_experts && train.z_coef.range().1 == 0.0)
            .then(|| make.set("train.z_coef", "0.001", "router logits that stay small"))
            .flatten(),
        (train.precision == crate::config::Precision::Fp8)
            .then(|| make.set("train.precision", "bf16", "products without the range of FP8"))
            .flatten(),
    ];
    remedies.into_iter().flatten().collect()
}

fn most_grad_norm(run: &RunFigures) -> Option<Figure> {
    let norms = run.course.points.iter().map(|point| point.grad_norm).filter(|norm| norm.is_finite());
    norms.reduce(f64::max).map(|most| Figure::new("train/grad_norm", most, Over::RunMost))
}

/// Returns the median, the greater of the middle two if their number is even; 0 without values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
