//! Capacity under every scheme in which tokens choose: never more than C rows, never a token twice at an expert, and
//! the order of service.

use moeworks_moe::{
    MoeConfig, MoeLayer, MoeSaved, MoeWeights, NO_EXPERT, Overflow, RouterConfig, RouterInput, RouterKind, capacity,
};
use moeworks_ops::Context;
use moeworks_ops::experts::NO_ROW;
use moeworks_tensor::{Purpose, Random};

use crate::{config, kinds, tensor};

const OVERFLOWS: [Overflow; 3] = [Overflow::Drop, Overflow::Priority, Overflow::Reroute];
const E: usize = 6;

struct Case {
    config: MoeConfig,
    num_tokens: usize,
    saved: MoeSaved,
    /// Runs the pass without a capacity.
    unlimited: MoeSaved,
}

fn run(config: MoeConfig, num_tokens: usize, seed: u64) -> Case {
    let ctx = Context::cpu(2);
    let mut weights = MoeWeights::random(&ctx, &config, seed, 1.0);
    // The first expert gets a higher score from all tokens.
    weights.router.f32s_mut().iter_mut().take(config.width).for_each(|w| *w += 1.0);
    let random = Random::new(seed, Purpose::Test, 7);
    let x: Vec<f64> = (0..(num_tokens * config.width) as u64).map(|i| f64::from(random.normal(i)) + 0.3).collect();
    let x = tensor(&ctx, &[num_tokens, config.width], &x);
    let ids: Vec<u32> = (0..num_tokens as u64).map(|t| random.below(1000 + t, 5) as u32).collect();
    let noise = Random::new(seed, Purpose::Router, 0);
    let input = RouterInput { token_ids: &ids, ..RouterInput::with_noise(noise) };
    let forward = |config: &MoeConfig| MoeLayer::new(config.clone()).unwrap().forward(&ctx, &weights, &x, &input).1;
    let unlimited = forward(&MoeConfig { capacity_factor: 0.0, ..config.clone() });
    Case { saved: forward(&config), unlimited, config, num_tokens }
}

/// Checks every scheme in which tokens choose with every overflow rule, several capacities and group sizes.
fn each(mut check: impl FnMut(&str, &Case)) {
    let is_joint = |kind| matches!(kind, RouterKind::ExpertChoice | RouterKind::Base | RouterKind::Sinkhorn);
    for (seed, (kind, top_k)) in (0..).zip(kinds().filter(|(kind, _)| !is_joint(*kind))) {
        for overflow in OVERFLOWS.into_iter().filter(|o| *o != Overflow::Reroute || kind != RouterKind::Relu) {
            for (factor, group) in [(1.0, 0), (0.5, 7), (1.25, 0), (0.25, 16), (4.0, 5)] {
                let mut config = config(5, 3, E, top_k);
                config.capacity_factor = factor;
                config.router = RouterConfig { kind, overflow, local_group: group, ..RouterConfig::default() };
                config.router.schemes.hierarchical.tree = "2".to_owned();
                config.router.schemes.cosine.dim = 4;
                let case = run(config, 40, seed);
                check(&format!("{kind:?}, {overflow:?}, factor {factor}, groups of {group}"), &case);
            }
        }
    }
}

impl Case {
    fn group_size(&self) -> usize {
        match self.config.router.local_group {
            0 => self.num_tokens,
            size => size,
        }
    }

    fn capacity(&self) -> usize {
        let size = self.group_size().min(self.num_tokens);
        capacity(self.config.capacity_factor, size, self.config.top_k, E).unwrap()
    }

    /// Returns the choices of `saved` as (token, rank, expert, whether it has a row).
    fn choices(saved: &MoeSaved) -> Vec<(usize, usize, u32, bool)> {
        let k = saved.routing().top_k();
        let rows = saved.dispatch().token_rows();
        let choices = saved.routing().expert_ids().iter().zip(rows).enumerate();
        choices
            .filter(|(_, (id, _))| **id != NO_EXPERT)
            .map(|(i, (&id, &row))| (i / k, i % k, id, row != NO_ROW))
            .collect()
    }
}

impl Case {
    /// Returns all choices as (token, rank, expert). GShard's unused second choices are included, because its
    /// counters count them.
    fn named(&self) -> Vec<(usize, usize, u32)> {
        if self.config.router.kind != RouterKind::Gshard {
            return Self::choices(&self.saved)
                .into_iter()
                .map(|(token, rank, expert, _)| (token, rank, expert))
                .collect();
        }
        let of_token = |(token, probs): (usize, &[f32])| {
            let mut order: Vec<usize> = (0..E).collect();
            order.sort_by(|&a, &b| probs[b].total_cmp(&probs[a]));
            [(token, 0, order[0] as u32), (token, 1, order[1] as u32)]
        };
        self.saved.probs().chunks(E).enumerate().flat_map(of_token).collect()
    }
}

#[test]
fn no_expert_takes_more_than_its_capacity_and_no_token_is_twice_at_one() {
    each(|name, case| {
        let mut taken = vec![[0; E]; case.num_tokens.div_ceil(case.group_size())];
        let mut seen = vec![[false; E]; case.num_tokens];
        for (token, _, expert, is_kept) in Case::choices(&case.saved) {
            assert!(!seen[token][expert as usize], "{name}: token {token} is twice at expert {expert}");
            seen[token][expert as usize] = true;
            taken[token / case.group_size()][expert as usize] += usize::from(is_kept);
        }
        assert!(taken.iter().flatten().all(|&n| n <= case.capacity()), "{name}: {taken:?} of {}", case.capacity());
    });
}

/// A dropped choice comes after as many others as the capacity, by rank and then by the order of tokens or of their
/// best score.
#[test]
fn the_order_of_service_is_kept() {
    each(|name, case| {
        if case.config.router.overflow == Overflow::Reroute {
            return;
        }
        let (saved, group) = (&case.saved, case.group_size());
        assert_eq!(saved.routing(), case.unlimited.routing(), "{name}: capacity changes no choice");
        let k = saved.routing().top_k();
        // ReLU's gates are its weights; in other schemes the first choice has the highest probability.
        let score = |token: usize| match case.config.router.kind {
            RouterKind::Relu => saved.routing().expert_weights()[token * k],
            _ => saved.probs()[token * E + saved.routing().expert_ids()[token * k] as usize],
        };
        let (choices, named) = (Case::choices(saved), case.named());
        for &(token, rank, expert, is_kept) in &choices {
            let is_before = |&&(other, other_rank, other_expert): &&(usize, usize, u32)| {
                let by_score = score(other).total_cmp(&score(token)).reverse();
                let by_token = other.cmp(&token);
                let order = match case.config.router.overflow {
                    Overflow::Priority => by_score.then(by_token),
                    _ => by_token,
                };
                other_expert == expert && other / group == token / group && other_rank.cmp(&rank).then(order).is_lt()
            };
            let before = named.iter().filter(is_before).count();
            assert_eq!(is_kept, before < case.capacity(), "{name}: token {token}, rank {rank}, {before} before it");
        }
    });
}

/// A choice is dropped only if every other expert that the token may take is full as well.
#[test]
fn a_rerouted_token_is_not_dropped_while_there_is_room() {
    let (mut num_rerouted, mut num_dropped) = (0, 0);
    each(|name, case| {
        // A token of a tree can use only some experts, and GShard may leave second experts unused after they were
        // served.
        let is_other = matches!(case.config.router.kind, RouterKind::Hierarchical | RouterKind::Gshard);
        if case.config.router.overflow != Overflow::Reroute || is_other {
            return;
        }
        num_rerouted += case.saved.stats().num_rerouted;
        let choices = Case::choices(&case.saved);
        let is_full = |expert: u32, group: usize| {
            let here = choices.iter().filter(|c| c.3 && c.2 == expert && c.0 / case.group_size() == group);
            here.count() >= case.capacity()
        };
        for &(token, _, expert, _) in choices.iter().filter(|choice| !choice.3) {
            num_dropped += 1;
            let own: Vec<u32> = choices.iter().filter(|choice| choice.0 == token).map(|choice| choice.2).collect();
            for other in (0..E as u32).filter(|other| *other == expert || !own.contains(other)) {
                assert!(is_full(other, token / case.group_size()), "{name}: token {token}, expert {other} has room");
            }
        }
    });
    assert!(num_rerouted > 100 && num_dropped > 100, "{num_rerouted} moved, {num_dropped} dropped");
}
