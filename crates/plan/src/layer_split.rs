//! Layers shared out over the stages of a pipeline by their costs.

/// The cost of the costliest stage, and for ties the sum of the squares of all.
type Cost = (f64, f64);

/// Cuts that are compared at most. Where there would be more, stages get the same number of layers.
const MAX_WORK: usize = 1 << 28;

/// Returns the number of layers of each of `num_stages` stages, at least one each, by which the costliest stage of
/// layers that cost `costs` costs least. There must be as many layers as stages.
///
/// ```
/// assert_eq!(moeworks_plan::split_layers(&[1.0, 1.0, 1.0, 1.0, 1.0, 3.0], 2), [4, 2]);
/// ```
#[must_use]
pub fn split_layers(costs: &[f64], num_stages: usize) -> Vec<usize> {
    let num_layers = costs.len();
    let work = num_layers.saturating_mul(num_layers).saturating_mul(num_stages);
    if num_stages > num_layers || work > MAX_WORK {
        let each = |stage| num_layers / num_stages + usize::from(stage < num_layers % num_stages);
        return (0..num_stages).map(each).collect();
    }
    let mut sums = vec![0.0; num_layers + 1];
    for (layer, cost) in costs.iter().enumerate() {
        sums[layer + 1] = sums[layer] + cost;
    }
    // Of the first layers over so many stages: the least cost, and the first layer of the last stage.
    let mut best: Vec<Option<Cost>> = vec![None; num_layers + 1];
    best[0] = Some((0.0, 0.0));
    let mut starts = Vec::with_capacity(num_stages);
    for stage in 1..=num_stages {
        let (next, from) = with_another_stage(&best, &sums, stage);
        best = next;
        starts.push(from);
    }
    let mut counts = vec![0; num_stages];
    let mut end = num_layers;
    for (count, from) in counts.iter_mut().zip(starts).rev() {
        let start = from[end];
        (*count, end) = (end - start, start);
    }
    counts
}

/// Returns the least cost of the first layers over `stage` stages, and the first layer of the last of them.
fn with_another_stage(best: &[Option<Cost>], sums: &[f64], stage: usize) -> (Vec<Option<Cost>>, Vec<usize>) {
    let num_layers = sums.len() - 1;
    let mut next = vec![None; num_layers + 1];
    let mut from = vec![0; num_layers + 1];
    for end in stage..=num_layers {
        for start in stage - 1..end {
            let Some((most, squares)) = best[start] else { continue };
            let own: f64 = sums[end] - sums[start];
            let cost = (most.max(own), squares + own * own);
            if next[end].is_none_or(|least| cost < least) {
                (next[end], from[end]) = (Some(cost), start);
            }
        }
    }
    (next, from)
}
