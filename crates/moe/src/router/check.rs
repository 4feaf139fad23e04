//! Checks of a router's settings against each other. The table of settings has the range of each.

use super::config::{RouterConfig, num_modalities};
use super::scheme::{Check, RouterOption, Sizes, at_most, wrong};
use super::schemes::RouterKind;
use crate::Section as _;
use crate::overflow::Overflow;

impl RouterConfig {
    /// Checks every setting for `num_experts` computing experts, of which a token takes `top_k`.
    pub(crate) fn validate(&self, num_experts: usize, top_k: usize) -> Check {
        let sizes = Sizes { num_experts, top_k };
        self.check_ranges()?;
        self.check_kind(top_k)?;
        for &kind in RouterKind::ALL {
            self.check_scheme(kind)?;
            self.schemes.get(kind).check_settings(sizes)?;
        }
        self.scheme().check(self, sizes)?;
        self.check_groups(num_experts, top_k)?;
        self.check_modalities(num_experts, top_k)?;
        self.check_sparsemixer(top_k)?;
        at_most("router.zero_experts", self.num_zero_computation(), 1 << 16)
    }

    /// Checks the settings of the scheme `kind` against their ranges.
    ///
    /// # Errors
    /// For the first setting out of its range.
    pub fn check_scheme(&self, kind: RouterKind) -> Check {
        self.schemes.get(kind).check_ranges()
    }

    fn check_sparsemixer(&self, top_k: usize) -> Check {
        let jitter = self.sparsemixer_jitter;
        if jitter > 0.0 && (top_k != 2 || !self.scheme().allows(RouterOption::Sparsemixer)) {
            let expected = "must be 0 unless a token goes to two experts and kind is top_k";
            return wrong("router.sparsemixer_jitter", &jitter, expected);
        }
        Ok(())
    }

    fn check_kind(&self, top_k: usize) -> Check {
        let scheme = self.scheme();
        if let Some(fixed) = scheme.fixed_top_k().filter(|&fixed| fixed != top_k) {
            return wrong("top_k", &top_k, format!("must be {fixed} with this router.kind"));
        }
        if self.expert_bias && !scheme.allows(RouterOption::ExpertBias) {
            return wrong("router.expert_bias", &self.expert_bias, "must be false with this router.kind");
        }
        if self.overflow == Overflow::Reroute && !scheme.allows(RouterOption::Reroute) {
            return wrong("router.overflow", &"reroute", "must be drop or priority with this router.kind");
        }
        if self.num_groups > self.top_groups && !scheme.allows(RouterOption::Groups) {
            let expected = "must be router.num_groups with this router.kind";
            return wrong("router.top_groups", &self.top_groups, expected);
        }
        if self.random_share > 0.0 && !scheme.allows(RouterOption::RandomChoices) {
            return wrong("router.random_share", &self.random_share, "must be 0 with this router.kind");
        }
        if self.gate_residual && !scheme.allows(RouterOption::GateResidual) {
            return wrong("router.gate_residual", &true, "must be false with this router.kind");
        }
        if self.num_zero_computation() > 0 && !scheme.allows(RouterOption::ZeroComputation) {
            let expected = "must be 0, as all of its kind, with this router.kind";
            return wrong("router.zero_experts", &self.num_zero_computation(), expected);
        }
        Ok(())
    }

    fn check_groups(&self, num_experts: usize, top_k: usize) -> Check {
        if !num_experts.is_multiple_of(self.num_groups) {
            let expected = format!("must divide the number of experts, {num_experts}");
            return wrong("router.num_groups", &self.num_groups, expected);
        }
        if self.top_groups > self.num_groups {
            let expected = format!("must be from 1 to router.num_groups, {}", self.num_groups);
            return wrong("router.top_groups", &self.top_groups, expected);
        }
        if self.top_groups < self.num_groups && self.num_zero_computation() > 0 {
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
        if !reserved.is_empty() && !self.scheme().allows(RouterOption::ModalityExperts) {
            return wrong("router.modality_experts", &shown, "must be empty with this router.kind");
        }
        Ok(())
    }
}
