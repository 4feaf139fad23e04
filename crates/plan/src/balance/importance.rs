//! Replication by frequency and importance: copies of hot experts take the places of experts that matter least.
//!
//! An expert's frequency is how often it is chosen; its importance is the sum of the weights of these choices, which
//! is what the layer's output loses without it.

use super::loads::{BalanceError, check_loads};

/// The bounds of replication.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicationLimits {
    /// Slots for experts on all ranks.
    pub num_slots: usize,
    /// Copies of an expert at most: the ranks.
    pub max_copies: usize,
    /// The share of all importance that experts without a slot may have together; 0 keeps every expert that any
    /// token weighs.
    pub max_lost: f64,
}

/// The copies of each expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Replication {
    /// `[E]`: the slots of each expert; 0 where it has none.
    pub copies: Vec<usize>,
    /// The share of all importance that the experts without a slot have.
    pub lost: f64,
}

impl Replication {
    /// Returns the experts without a slot.
    #[must_use]
    pub fn evicted(&self) -> Vec<usize> {
        (0..self.copies.len()).filter(|&expert| self.copies[expert] == 0).collect()
    }

    /// Returns the largest load of a copy.
    #[must_use]
    pub fn max_copy_load(&self, expert_loads: &[f64]) -> f64 {
        max_copy_load(expert_loads, &self.copies)
    }
}

fn max_copy_load(expert_loads: &[f64], copies: &[usize]) -> f64 {
    let load = |(load, &copies): (&f64, &usize)| if copies == 0 { 0.0 } else { load / copies as f64 };
    expert_loads.iter().zip(copies).map(load).fold(0.0, f64::max)
}

/// Divides slots among experts. Every expert has one at first, except that the least important ones lose theirs where
/// there are too few slots. Spare slots go to the expert with the largest load per copy. Then experts in the order of
/// their importance, least first, give their slot to that expert, as long as together they have at most `max_lost` of
/// all importance and the largest load of a copy falls.
///
/// # Errors
/// If there is not one load and one importance for each expert, one is negative or not finite, or there is no slot.
/// If there are too few slots for the experts that `max_lost` has to keep.
pub fn replicate_by_importance(
    expert_loads: &[f64],
    importance: &[f64],
    limits: ReplicationLimits,
) -> Result<Replication, BalanceError> {
    let num_experts = expert_loads.len();
    check_loads(expert_loads, num_experts)?;
    check_loads(importance, num_experts)?;
    let ReplicationLimits { num_slots, max_copies, max_lost } = limits;
    let wrong = |what, value, expected: String| Err(BalanceError::Size { what, value, expected });
    if max_copies == 0 {
        return wrong("copies of an expert", 0, "must be at least 1".to_owned());
    }
    let total: f64 = importance.iter().sum();
    let share = |expert: usize| if total > 0.0 { importance[expert] / total } else { 0.0 };
    let mut least_first: Vec<usize> = (0..num_experts).collect();
    least_first.sort_by(|&a, &b| importance[a].total_cmp(&importance[b]).then(b.cmp(&a)));
    // The experts that may go together.
    let mut sum = 0.0;
    let may_go = |&&expert: &&usize| {
        sum += share(expert);
        sum <= max_lost
    };
    let mut goers: std::collections::VecDeque<usize> = least_first.iter().take_while(may_go).copied().collect();
    let num_needed = num_experts.saturating_sub(goers.len()).max(usize::from(num_experts > 0));
    if num_slots < num_needed {
        return wrong("slots", num_slots, format!("must be at least {num_needed} to keep the experts that matter"));
    }
    let mut copies = vec![1; num_experts];
    for expert in goers.drain(..num_experts.saturating_sub(num_slots)) {
        copies[expert] = 0;
    }
    for _ in num_experts..num_slots {
        let Some(hottest) = hottest(expert_loads, &copies, max_copies) else { break };
        copies[hottest] += 1;
    }
    while let Some(expert) = goers.pop_front() {
        let Some(hottest) = hottest(expert_loads, &copies, max_copies) else { break };
        if hottest == expert || copies[expert] != 1 {
            break;
        }
        let mut after = copies.clone();
        (after[expert], after[hottest]) = (0, after[hottest] + 1);
        if max_copy_load(expert_loads, &after) >= max_copy_load(expert_loads, &copies) {
            break;
        }
        copies = after;
    }
    let lost = (0..num_experts).filter(|&expert| copies[expert] == 0).map(share).sum();
    Ok(Replication { copies, lost })
}

/// The expert with the largest load per copy among those that may have another; the first of equal ones.
fn hottest(expert_loads: &[f64], copies: &[usize], max_copies: usize) -> Option<usize> {
    let per_copy = |expert: usize| expert_loads[expert] / copies[expert] as f64;
    let can = (0..copies.len()).rev().filter(|&expert| (1..max_copies).contains(&copies[expert]));
    can.max_by(|&a, &b| per_copy(a).total_cmp(&per_copy(b)))
}
