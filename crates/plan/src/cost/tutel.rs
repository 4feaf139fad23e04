//! Adaptive parallelism of Tutel (Hwang et al., 2206.03382, sections 3.1 and 3.3): the number of parts into which
//! ranks that share an expert cut it, and the cost of choosing it by measurement.

/// Returns r*, the number of token copies that moves the fewest bytes, `C r + P/(E r)`, between 1 and W/E.
/// `capacity_bytes` is C, the bytes of a rank's tokens; `params_bytes` is P, the bytes of all experts.
#[must_use]
pub fn best_token_copies(capacity_bytes: f64, params_bytes: f64, world_size: usize, num_experts: usize) -> f64 {
    let most = (world_size as f64 / num_experts as f64).max(1.0);
    (params_bytes / (num_experts as f64 * capacity_bytes)).sqrt().clamp(1.0, most)
}

/// Returns the number of trials that fill one entry of the dictionary: a ternary search over r for each of four
/// degrees of pipelining and two algorithms.
#[must_use]
pub fn trials_per_entry(world_size: usize, num_experts: usize) -> f64 {
    let ways = world_size.div_ceil(num_experts.max(1)) as f64;
    (ways.ln() / 1.5_f64.ln() + 2.0) * 4.0 * 2.0
}
