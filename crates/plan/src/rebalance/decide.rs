//! The decision whether a layer gets another placement: what it would save against what the move would cost.

use super::transition::{expert_transfers, most_copies};
use crate::balance::{BalanceError, EplbSizes, RankLoads, eplb, improve};
use crate::{Nodes, Placement};

/// A way to find a layer's next placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RebalancePolicy {
    /// Leaves the placement.
    Keep,
    /// Improves it by few moves and swaps ([`improve`]).
    Moves,
    /// Makes it anew: with copies of hot experts in spare slots ([`eplb`](fn@eplb)), or else packed by descending
    /// load.
    Anew,
}

impl RebalancePolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Moves, Self::Anew, Self::Keep];

    /// Returns the name in settings and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Moves => "moves",
            Self::Anew => "anew",
        }
    }
}

/// The way in which ranks share the tokens of an expert that several of them hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicaSharing {
    /// Each rank serves the tokens of some ranks ([`Placement::serving_rank`]), as in training.
    #[default]
    BySource,
    /// In equal parts, on average over passes.
    Even,
}

/// The limits of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RebalanceRules {
    /// The most experts on a rank.
    pub slots_per_rank: usize,
    /// The most moves of [`RebalancePolicy::Moves`] in a layer.
    pub max_moves: usize,
    /// True if an expert may be on several ranks.
    pub may_replicate: bool,
    /// The steps for which the placement is expected to serve.
    pub num_steps: u64,
    /// The seconds that a change must save over these steps for each second that it takes.
    pub min_gain: f64,
    /// The way in which ranks share the tokens of replicas.
    pub sharing: ReplicaSharing,
}

/// Measured rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RebalanceRates {
    /// Seconds of a rank for one token of one expert in a training step.
    pub row_s: f64,
    /// Bytes a second at which a rank sends or receives experts.
    pub bytes_per_s: f64,
    /// Bytes a second of gradients that ranks sum of experts that several of them hold.
    pub sum_bytes_per_s: f64,
}

/// A layer as a decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct LayerLoads<'a> {
    /// The placement in force.
    pub placement: &'a Placement,
    /// `[E]`: tokens of each expert in a step, as the mean of the last steps.
    pub loads: &'a [f64],
    /// `[steps][E]`: tokens of each expert in single steps. A step takes as long as its own fullest rank, which may
    /// be another one than by the mean. Empty where only the mean is known.
    pub steps: &'a [Vec<f64>],
    /// Bytes of an expert that travel with it.
    pub expert_bytes: f64,
    /// Bytes of an expert's gradients, which are summed in each step where several ranks hold it.
    pub gradient_bytes: f64,
}

impl LayerLoads<'_> {
    /// Computes the load of ranks by a placement.
    fn of_ranks(
        placement: &Placement,
        loads: &[f64],
        sharing: ReplicaSharing,
        nodes: &Nodes,
    ) -> Result<RankLoads, BalanceError> {
        match sharing {
            ReplicaSharing::BySource => RankLoads::by_source(placement, loads, nodes),
            ReplicaSharing::Even => RankLoads::new(placement, loads),
        }
    }

    /// Computes the outcome of a placement.
    fn outcome(
        &self,
        placement: &Placement,
        rules: &RebalanceRules,
        rates: &RebalanceRates,
        nodes: &Nodes,
    ) -> Result<Outcome, BalanceError> {
        let of_ranks = |loads: &[f64]| Self::of_ranks(placement, loads, rules.sharing, nodes);
        let mean = of_ranks(self.loads)?;
        let maxima = self.steps.iter().map(|loads| Ok(of_ranks(loads)?.max())).collect::<Result<Vec<_>, _>>()?;
        let fullest = if maxima.is_empty() { mean.max() } else { maxima.iter().sum::<f64>() / maxima.len() as f64 };
        let is_replicated = |expert: &usize| placement.ranks_of(*expert).len() > 1;
        let num_replicated = (0..placement.num_experts()).filter(is_replicated).count();
        let sums_s = num_replicated as f64 * self.gradient_bytes / rates.sum_bytes_per_s;
        Ok(Outcome { imbalance: mean.imbalance(), fullest, seconds: fullest * rates.row_s + sums_s })
    }
}

/// The outcome of a placement in a step.
struct Outcome {
    /// The imbalance of the mean load.
    imbalance: f64,
    /// The tokens of the fullest rank, as the mean over steps.
    fullest: f64,
    /// The seconds of a step that depend on the placement.
    seconds: f64,
}

/// A change of a layer's placement, with what it promises.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerChange {
    /// The new placement.
    pub placement: Placement,
    /// The imbalance of the load by the old placement, and by the new one.
    pub imbalance: [f64; 2],
    /// Copies that travel.
    pub num_copies: usize,
    /// Seconds that a step is expected to save.
    pub saved_s: f64,
    /// Seconds that the move is expected to take.
    pub cost_s: f64,
}

/// Decides by `policy` whether a layer gets another placement. None if it would not lower the largest load of a rank,
/// or would save less than the rules ask for. A step is expected to take the time of the rows of its fullest rank,
/// and that of the sums of gradients of replicas.
///
/// # Errors
/// If there is not one load for each expert, one is negative or not finite, or the slots do not hold the experts.
pub fn rebalance_layer(
    layer: LayerLoads<'_>,
    policy: RebalancePolicy,
    rules: &RebalanceRules,
    rates: &RebalanceRates,
    nodes: &Nodes,
) -> Result<Option<LayerChange>, BalanceError> {
    let LayerLoads { placement, loads, expert_bytes, .. } = layer;
    let before = layer.outcome(placement, rules, rates, nodes)?;
    let found = match policy {
        RebalancePolicy::Keep => return Ok(None),
        RebalancePolicy::Moves => improve(placement, loads, rules.slots_per_rank, rules.max_moves)?.0,
        RebalancePolicy::Anew => anew(placement, loads, rules)?,
    };
    let after = layer.outcome(&found, rules, rates, nodes)?;
    let transfers = expert_transfers(placement, &found, nodes);
    let saved_s = before.seconds - after.seconds;
    let cost_s = most_copies(&transfers, placement.num_ranks()) as f64 * expert_bytes / rates.bytes_per_s;
    let is_better = after.fullest < before.fullest * (1.0 - 1e-9);
    let is_worth_it = saved_s * rules.num_steps as f64 >= rules.min_gain * cost_s;
    let change = LayerChange {
        imbalance: [before.imbalance, after.imbalance],
        num_copies: transfers.len(),
        placement: found,
        saved_s,
        cost_s,
    };
    Ok((is_better && is_worth_it).then_some(change))
}

/// Makes a placement anew, with its ranks numbered so that many copies stay where they are.
fn anew(placement: &Placement, loads: &[f64], rules: &RebalanceRules) -> Result<Placement, BalanceError> {
    let (num_experts, num_ranks) = (placement.num_experts(), placement.num_ranks());
    let num_slots = rules.slots_per_rank.min(num_experts) * num_ranks;
    let found = if rules.may_replicate {
        eplb(loads, EplbSizes { num_slots, num_groups: 1, num_nodes: 1, num_ranks })?
    } else {
        packed(loads, num_ranks, rules.slots_per_rank)?
    };
    Ok(with_most_kept(placement, &found))
}

/// Packs each expert on one rank by descending load: on that with the least load, or the fewest experts, that has
/// fewer than `slots_per_rank`.
fn packed(loads: &[f64], num_ranks: usize, slots_per_rank: usize) -> Result<Placement, BalanceError> {
    if slots_per_rank * num_ranks < loads.len() {
        let expected = format!("must have room for {} experts on {num_ranks} ranks", loads.len());
        return Err(BalanceError::Size { what: "slots of a rank", value: slots_per_rank, expected });
    }
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by(|&a, &b| loads[b].total_cmp(&loads[a]));
    let (mut sums, mut counts) = (vec![0.0_f64; num_ranks], vec![0; num_ranks]);
    let mut ranks = vec![Vec::new(); loads.len()];
    for expert in order {
        let with_room = (0..num_ranks).filter(|&rank| counts[rank] < slots_per_rank);
        let by_load = |&a: &usize, &b: &usize| sums[a].total_cmp(&sums[b]).then(counts[a].cmp(&counts[b]));
        let rank = with_room.min_by(by_load).expect("room for all experts");
        sums[rank] += loads[expert];
        counts[rank] += 1;
        ranks[expert] = vec![rank];
    }
    Ok(Placement::from_ranks(num_ranks, ranks))
}

/// Numbers the ranks of `found` anew, greedily so that most of its copies are on ranks that hold them by `old`.
fn with_most_kept(old: &Placement, found: &Placement) -> Placement {
    let num_ranks = old.num_ranks();
    let num_kept = |rank: usize, number: usize| {
        (0..old.num_experts()).filter(|&expert| found.holds(rank, expert) && old.holds(number, expert)).count()
    };
    let mut pairs: Vec<(usize, usize, usize)> = (0..num_ranks)
        .flat_map(|rank| (0..num_ranks).map(move |number| (rank, number)))
        .map(|(rank, number)| (num_kept(rank, number), rank, number))
        .collect();
    // Stable: among equals the lowest numbers come first.
    pairs.sort_by_key(|(kept, ..)| std::cmp::Reverse(*kept));
    let (mut numbers, mut is_taken) = (vec![None; num_ranks], vec![false; num_ranks]);
    for (_, rank, number) in pairs {
        if numbers[rank].is_none() && !is_taken[number] {
            (numbers[rank], is_taken[number]) = (Some(number), true);
        }
    }
    let renumbered = |expert: usize| {
        let mut ranks: Vec<usize> = found.ranks_of(expert).iter().filter_map(|&rank| numbers[rank]).collect();
        ranks.sort_unstable();
        ranks
    };
    Placement::from_ranks(num_ranks, (0..old.num_experts()).map(renumbered).collect())
}
