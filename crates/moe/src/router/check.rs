//! What settings a router may have, each with the one line that says what would be right.

use super::config::{RouterConfig, RouterKind, ScoreFunction, num_modalities};
use super::tree::Tree;
use crate::config::ConfigError;
use crate::overflow::Overflow;

type Check = Result<(), ConfigError>;

fn wrong(setting: &'static str, value: &dyn ToString, expected: impl Into<String>) -> Check {
    Err(ConfigError::new(setting, value.to_string(), expected))
}

fn within(setting: &'static str, value: f64, (low, high): (f64, f64)) -> Check {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    wrong(setting, &value, format!("must be a number from {low} to {high}"))
}

fn positive(setting: &'static str, value: f64) -> Check {
    if value > 0.0 && value.is_finite() { Ok(()) } else { wrong(setting, &value, "must be a number above 0") }
}

impl RouterConfig {
    /// Checks every setting, for `num_experts` computing experts of which a token takes `top_k`.
    pub(crate) fn validate(&self, num_experts: usize, top_k: usize) -> Check {
        self.check_kind(top_k)?;
        self.check_tree(num_experts, top_k)?;
        self.check_groups(num_experts, top_k)?;
        self.check_modalities(num_experts, top_k)?;
        positive("router.routed_scale", f64::from(self.routed_scale))?;
        positive("router.cosine_temperature", f64::from(self.cosine_temperature))?;
        positive("router.l1_start", f64::from(self.l1_start))?;
        positive("router.free_ratio", f64::from(self.free_ratio))?;
        positive("router.temperature", self.temperature.range().0)?;
        for (setting, value) in
            [("router.bias_update_rate", self.bias_update_rate), ("router.noise_std", self.noise_std)]
        {
            if value.range().0 < 0.0 {
                return wrong(setting, &value, "must be a number of at least 0");
            }
        }
        if !(self.sparsemixer_jitter >= 0.0 && self.sparsemixer_jitter.is_finite()) {
            let expected = "must be a number of at least 0";
            return wrong("router.sparsemixer_jitter", &self.sparsemixer_jitter, expected);
        }
        if self.sparsemixer_jitter > 0.0 && (top_k != 2 || self.kind != RouterKind::TopK) {
            let expected = "must be 0 unless a token goes to two experts and kind is top_k";
            return wrong("router.sparsemixer_jitter", &self.sparsemixer_jitter, expected);
        }
        if self.input_dropout.range().0 < 0.0 || self.input_dropout.range().1 >= 1.0 {
            return wrong("router.input_dropout", &self.input_dropout, "must be at least 0 and below 1");
        }
        if !(self.l1_rate >= 1.0 && self.l1_rate.is_finite()) {
            return wrong("router.l1_rate", &self.l1_rate, "must be a number of at least 1");
        }
        within("router.random_share", self.random_share, (0.0, 1.0))?;
        within("router.random_fade", self.random_fade, (0.0, 1.0))?;
        for (setting, value) in [("router.top_p", self.top_p), ("router.second_threshold", self.second_threshold)] {
            if !(value > 0.0 && value <= 1.0) {
                return wrong(setting, &value, "must be above 0 and at most 1");
            }
        }
        let limits =
            [("router.cosine_dim", self.cosine_dim, 1 << 16), ("router.zero_experts", self.num_free(), 1 << 16)];
        for (setting, value, limit) in limits {
            if value > limit {
                return wrong(setting, &value, format!("must be at most {limit}"));
            }
        }
        Ok(())
    }

    fn check_kind(&self, top_k: usize) -> Check {
        let fixed = match self.kind {
            RouterKind::Switch | RouterKind::Base => Some(1),
            RouterKind::Gshard => Some(2),
            _ => None,
        };
        if let Some(fixed) = fixed.filter(|&fixed| fixed != top_k) {
            return wrong("top_k", &top_k, format!("must be {fixed} with this router.kind"));
        }
        let is_other = self.is_joint() || matches!(self.kind, RouterKind::Hash);
        let is_own_choice = !is_other && !matches!(self.kind, RouterKind::TopP | RouterKind::Relu);
        let is_tree = self.kind == RouterKind::Hierarchical;
        if self.expert_bias && (is_tree || !is_own_choice) {
            return wrong("router.expert_bias", &self.expert_bias, "must be false with this router.kind");
        }
        // A token of ReLU routing has all experts whose weight is not 0.
        if self.overflow == Overflow::Reroute && (self.is_joint() || self.kind == RouterKind::Relu) {
            return wrong("router.overflow", &"reroute", "must be drop or priority with this router.kind");
        }
        if self.num_groups > self.top_groups && (is_tree || !is_own_choice) {
            let expected = "must be router.num_groups with this router.kind";
            return wrong("router.top_groups", &self.top_groups, expected);
        }
        // In these no token takes the highest K of a ranking.
        let has_ranking =
            !matches!(self.kind, RouterKind::ExpertChoice | RouterKind::Hash) && (is_own_choice || is_other);
        if self.random_share > 0.0 && !has_ranking {
            return wrong("router.random_share", &self.random_share, "must be 0 with this router.kind");
        }
        if self.gate_residual && (is_tree || self.kind == RouterKind::Hash) {
            return wrong("router.gate_residual", &true, "must be false with this router.kind");
        }
        if self.num_free() > 0 && (is_tree || is_other) {
            return wrong(
                "router.zero_experts",
                &self.num_free(),
                "must be 0, as all of its kind, with this router.kind",
            );
        }
        Ok(())
    }

    fn check_tree(&self, num_experts: usize, top_k: usize) -> Check {
        self.tree_arities(num_experts)?;
        if self.kind != RouterKind::Hierarchical {
            return Ok(());
        }
        if self.scores != ScoreFunction::Softmax {
            return wrong("router.scores", &"sigmoid", "must be softmax with this router.kind");
        }
        if self.noise_std.range().1 > 0.0 {
            return wrong("router.noise_std", &self.noise_std, "must be 0 with this router.kind");
        }
        if self.sparsemixer_jitter > 0.0 {
            return wrong("router.sparsemixer_jitter", &self.sparsemixer_jitter, "must be 0 with this router.kind");
        }
        let reach = Tree::new(self, num_experts, top_k).reach();
        if reach < top_k {
            let expected = format!("must leave a token at least top_k = {top_k} experts, but leaves {reach}");
            return wrong("router.tree_beam", &self.tree_beam, expected);
        }
        Ok(())
    }

    fn check_groups(&self, num_experts: usize, top_k: usize) -> Check {
        if self.num_groups == 0 || !num_experts.is_multiple_of(self.num_groups) {
            let expected = format!("must divide the number of experts, {num_experts}");
            return wrong("router.num_groups", &self.num_groups, expected);
        }
        if self.top_groups == 0 || self.top_groups > self.num_groups {
            let expected = format!("must be from 1 to router.num_groups, {}", self.num_groups);
            return wrong("router.top_groups", &self.top_groups, expected);
        }
        if self.top_groups < self.num_groups && self.num_free() > 0 {
            return wrong(
                "router.top_groups",
                &self.top_groups,
                "must be router.num_groups with experts without computation",
            );
        }
        let reachable = num_experts / self.num_groups * self.top_groups;
        if self.top_groups < self.num_groups && top_k > reachable {
            let expected = format!("must leave a token at least top_k = {top_k} experts, but leaves {reachable}");
            return wrong("router.top_groups", &self.top_groups, expected);
        }
        Ok(())
    }

    fn check_modalities(&self, num_experts: usize, top_k: usize) -> Check {
        let (boundaries, reserved) = self.modalities()?;
        let shown = format!("{:?}", self.modality_experts);
        let num_modalities = num_modalities(&boundaries, &reserved);
        if reserved.len() > num_modalities {
            let expected = format!("must be a number for each of the {num_modalities} modalities");
            return wrong("router.modality_experts", &shown, expected);
        }
        let total = reserved.iter().fold(0_usize, |sum, &n| sum.saturating_add(n));
        if total > num_experts {
            return wrong("router.modality_experts", &shown, format!("must add up to at most {num_experts} experts"));
        }
        let least = (0..num_modalities).map(|m| num_experts - total + reserved.get(m).copied().unwrap_or(0)).min();
        if !reserved.is_empty() && least.is_some_and(|least| least < top_k) {
            let expected = format!("must leave every modality at least top_k = {top_k} experts");
            return wrong("router.modality_experts", &shown, expected);
        }
        let is_masked = !reserved.is_empty();
        if is_masked && (self.is_joint() || matches!(self.kind, RouterKind::Hash | RouterKind::Hierarchical)) {
            return wrong("router.modality_experts", &shown, "must be empty with this router.kind");
        }
        Ok(())
    }
}
