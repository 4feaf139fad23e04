//! The memory of a rank that does not depend on the time, and what it updates: by the rules of
//! [`rank_memory`](crate::rank_memory), for the stages that it holds.

use super::StepCosts;
use crate::Schedule;

/// Bytes of a gradient.
pub(super) const GRADIENT: f64 = 4.0;
/// Bytes of the two moments of AdamW.
const MOMENTS: f64 = 8.0;
/// Bytes that the update of a weight reads and writes.
const UPDATE: f64 = 28.0;

/// The number of parameters of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RankParams {
    pub(super) cut: f64,
    pub(super) whole: f64,
    pub(super) experts: f64,
    num_layers: f64,
}

impl RankParams {
    fn all(&self) -> f64 {
        self.cut + self.whole + self.experts
    }
}

impl StepCosts<'_> {
    /// Returns the parameters of the stages that a rank holds, in all copies.
    pub(super) fn params(&self, schedule: &Schedule, rank: usize) -> RankParams {
        let request = self.request;
        let experts = request.model.shape(request.precision).num_experts;
        let held = match request.placement {
            Some(placement) => placement.max_experts(),
            None => experts.div_ceil(request.layout.num_expert_ranks()),
        };
        let mut params = RankParams::default();
        for (_, stage) in schedule.stages_of(rank) {
            let of = &self.stages[stage as usize];
            params.cut += of.cut_params / request.layout.tp as f64;
            params.whole += of.whole_params;
            params.experts += of.expert_params * held as f64;
            params.num_layers += of.num_layers as f64;
        }
        params
    }

    /// Returns the number of parameters in the ZeRO slices of a rank.
    fn slices(&self, params: RankParams) -> f64 {
        let layout = self.request.layout;
        (params.cut + params.whole) / (layout.dp * layout.ep) as f64 + params.experts / layout.dp as f64
    }

    /// Returns the bytes of weights, gradients and optimizer state of a rank.
    pub(super) fn state_bytes(&self, schedule: &Schedule, rank: usize) -> f64 {
        let (zero, precision) = (self.request.zero, self.request.precision);
        let params = self.params(schedule, rank);
        let slices = self.slices(params);
        // Two layers are whole at a time.
        let gathered = params.all() * (2.0 / params.num_layers.max(1.0)).min(1.0);
        let kept = precision.weight_bytes() as f64;
        let weights = if zero >= 3 { slices * kept + gathered * precision.bytes() as f64 } else { params.all() * kept };
        let gradients = GRADIENT * if zero >= 2 { slices + gathered } else { params.all() };
        weights + gradients + MOMENTS * self.updated(params)
    }

    fn updated(&self, params: RankParams) -> f64 {
        if self.request.zero >= 1 { self.slices(params) } else { params.all() }
    }

    /// Returns the seconds of the update of a rank's weights.
    pub(super) fn update_s(&self, schedule: &Schedule, rank: usize) -> f64 {
        UPDATE * self.updated(self.params(schedule, rank)) / self.request.cluster.device.memory_rate()
    }
}
