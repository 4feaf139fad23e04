//! The layers of each pipeline rank, and the share of the model's time that the slowest one takes.

use super::Step;
use crate::ScheduleKind;

impl Step<'_> {
    /// Returns the most layers of a pipeline rank, and how many of them have experts.
    pub(super) fn layers_of_rank(&self) -> (f64, f64) {
        let (parts, mesh) = (&self.job.parts, self.mesh);
        let even = parts.num_layers.div_ceil(mesh.pp * mesh.virtual_stages) * mesh.virtual_stages;
        let most = |ranks: Vec<f64>| ranks.into_iter().fold(0.0, f64::max).ceil() as usize;
        let layers = self.given_layers().map_or(even, most).min(parts.num_layers);
        let moe = (parts.num_moe_layers * layers).div_ceil(parts.num_layers.max(1)).min(parts.num_moe_layers);
        (layers as f64, moe as f64)
    }

    /// Returns the layers of each pipeline rank, if those of its stages are given. DualPipe puts two copies of the
    /// model through the pipeline, one each way: a rank computes half of the microbatches in either stage.
    fn given_layers(&self) -> Option<Vec<f64>> {
        let pp = self.mesh.pp;
        let stages = self.job.stage_layers.as_ref().filter(|stages| !stages.is_empty())?;
        let mut ranks = vec![0.0; pp];
        for (stage, &layers) in stages.iter().enumerate() {
            let (forth, layers) = (stage % pp, layers as f64);
            match self.mesh.schedule {
                ScheduleKind::DualPipe => {
                    ranks[forth] += 0.5 * layers;
                    ranks[pp - 1 - forth] += 0.5 * layers;
                }
                ScheduleKind::ZbV | ScheduleKind::DualPipeV if stage >= pp => ranks[pp - 1 - forth] += layers,
                _ => ranks[forth] += layers,
            }
        }
        Some(ranks)
    }

    /// Returns the share of the model's time that the slowest pipeline rank takes. Unless layers of stages are given,
    /// the last stage has as many fewer as the output projection takes.
    pub(super) fn share(&self, layers_s: f64, head_s: f64) -> f64 {
        let (parts, pp) = (&self.job.parts, self.mesh.pp);
        if pp == 1 {
            return 1.0;
        }
        let whole = (layers_s + head_s).max(f64::MIN_POSITIVE);
        if let Some(mut ranks) = self.given_layers() {
            let layer = layers_s / (parts.num_layers + parts.num_mtp_layers) as f64;
            ranks.iter_mut().for_each(|layers| *layers *= layer);
            let further = parts.num_mtp_layers as f64 * layer + head_s;
            let last =
                if matches!(self.mesh.schedule, ScheduleKind::ZbV | ScheduleKind::DualPipeV) { 0 } else { pp - 1 };
            ranks[last] += further;
            return ranks.into_iter().fold(0.0, f64::max) / whole;
        }
        let (layers, _) = self.layers_of_rank();
        (1.0 / pp as f64).max(layers / parts.num_layers as f64 * layers_s / whole)
    }
}
