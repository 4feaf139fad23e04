//! The choice of a training layout among all that a number of ranks allows: each is costed, the best come first.
//!
//! For each way to cut the ranks (tp, cp, dp, pp, ep, etp) the best schedule, number of stages, microbatch, stage of
//! ZeRO and recomputation is kept. What does not fit even in its leanest form is costed once.

use std::collections::HashMap;

use crate::cost::fabric::Fabric;
use crate::cost::training::{MeshCost, TrainingJob, mesh_cost_with};
use crate::skew::HotRank;
use crate::{Mesh, Recompute, ScheduleKind};

/// Sizes that are given, so that only the others are searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// Tensor parallelism.
    pub tp: Option<usize>,
    /// Context parallelism.
    pub cp: Option<usize>,
    /// Pipeline ranks.
    pub pp: Option<usize>,
    /// Expert parallelism.
    pub ep: Option<usize>,
    /// Expert-tensor parallelism.
    pub etp: Option<usize>,
    /// Sequences of a microbatch of a data-parallel rank.
    pub microbatch: Option<usize>,
    /// The stage of ZeRO.
    pub zero: Option<u8>,
    /// The schedule of a pipeline.
    pub schedule: Option<ScheduleKind>,
    /// The recomputation.
    pub recompute: Option<Recompute>,
    /// True if only layouts that `moeworks train` carries out are wanted.
    pub only_trainable: bool,
}

/// The layouts found.
#[derive(Clone, Debug, PartialEq)]
pub struct Search {
    /// The best layout of each way to cut the ranks, those that fit first, then the fastest first.
    pub found: Vec<MeshCost>,
    /// The number of layouts that were costed.
    pub num_costed: usize,
    /// True if there were ways to cut the ranks, but each with more data-parallel ranks than sequences in a step.
    pub lacks_sequences: bool,
}

/// The fewest tokens of a sequence that a context-parallel rank has.
const LEAST_CONTEXT: usize = 2048;
/// The most stages of a pipeline rank that are tried.
const MAX_VIRTUAL: usize = 8;
/// The schedules that are tried.
const TRIED: [ScheduleKind; 8] = [
    ScheduleKind::OneFOneB,
    ScheduleKind::Interleaved,
    ScheduleKind::ZbH1,
    ScheduleKind::ZbH2,
    ScheduleKind::OneFOneBOverlap,
    ScheduleKind::InterleavedOverlap,
    ScheduleKind::DualPipe,
    ScheduleKind::DualPipeV,
];
/// The sizes of microbatches that are tried.
const MICROBATCHES: [usize; 4] = [1, 2, 4, 8];

impl Pins {
    /// Returns whether the bubble of a schedule has a closed form for any times, so that it can be planned.
    #[must_use]
    pub fn can_plan(schedule: ScheduleKind) -> bool {
        TRIED.contains(&schedule) || schedule == ScheduleKind::Gpipe
    }
}

/// Returns the divisors of `n`, ascending.
fn divisors(n: usize) -> Vec<usize> {
    let mut low: Vec<usize> = (1..).take_while(|d| d * d <= n).filter(|&divisor| n.is_multiple_of(divisor)).collect();
    let high: Vec<usize> = low.iter().rev().map(|divisor| n / divisor).filter(|high| !low.contains(high)).collect();
    low.extend(high);
    low
}

fn pinned(pin: Option<usize>, sizes: Vec<usize>) -> impl Iterator<Item = usize> {
    sizes.into_iter().filter(move |&size| pin.is_none_or(|pin| pin == size))
}

/// Costs all layouts of the ranks of `fabric` for `job`.
#[must_use]
pub fn search(job: &TrainingJob, fabric: &Fabric, pins: &Pins) -> Search {
    let mut space = Space { job, fabric, pins, hot: HashMap::new(), num_costed: 0, lacks_sequences: false };
    let mut found = Vec::new();
    for cut in space.cuts() {
        found.extend(space.best_of(cut));
    }
    let key = |cost: &MeshCost| (!cost.fits, if cost.fits { cost.time.total() } else { cost.memory.total() });
    found.sort_by(|a, b| {
        let (a_key, b_key) = (key(a), key(b));
        a_key.0.cmp(&b_key.0).then(a_key.1.total_cmp(&b_key.1)).then(complexity(&a.mesh).cmp(&complexity(&b.mesh)))
    });
    let lacks_sequences = found.is_empty() && space.lacks_sequences;
    Search { found, num_costed: space.num_costed, lacks_sequences }
}

/// Returns the number of dimensions that a layout uses.
fn complexity(mesh: &Mesh) -> usize {
    [mesh.tp, mesh.cp, mesh.pp, mesh.ep, mesh.etp].iter().filter(|&&size| size > 1).count()
}

struct Space<'a> {
    job: &'a TrainingJob,
    fabric: &'a Fabric,
    pins: &'a Pins,
    /// The hottest rank by number of expert-parallel groups.
    hot: HashMap<usize, HotRank>,
    num_costed: usize,
    lacks_sequences: bool,
}

impl Space<'_> {
    /// Lists the ways to cut the ranks.
    fn cuts(&mut self) -> Vec<Mesh> {
        let (parts, pins, n) = (&self.job.parts, self.pins, self.fabric.num_ranks);
        let node = self.fabric.node_size();
        let most_cp = (self.job.seq_len / LEAST_CONTEXT).max(1);
        let mut cuts = Vec::new();
        for pp in pinned(pins.pp, divisors(n)).filter(|&pp| pp <= parts.num_layers.max(1)) {
            let can_cut = |tp: &usize| *tp <= node && parts.max_tp.max(1).is_multiple_of(*tp);
            for tp in pinned(pins.tp, divisors(n / pp)).filter(can_cut) {
                let contexts = divisors(n / pp / tp);
                for cp in pinned(pins.cp, contexts).filter(|&cp| cp <= most_cp || pins.cp == Some(cp)) {
                    let dp = n / pp / tp / cp;
                    if dp > self.job.global_batch {
                        self.lacks_sequences = true;
                        continue;
                    }
                    let base = Mesh { cp, pp, ..Mesh::new(tp, dp, 1) };
                    cuts.extend(self.expert_cuts(base));
                }
            }
        }
        cuts
    }

    /// Lists the ways to cut the experts of a layout.
    fn expert_cuts(&self, base: Mesh) -> Vec<Mesh> {
        let (parts, pins, stage_group) = (&self.job.parts, self.pins, base.stage_group_size());
        if parts.num_moe_layers == 0 {
            return vec![base];
        }
        let slices = pinned(pins.etp, divisors(base.tp));
        let cuts = slices.flat_map(|etp| {
            let groups = pinned(pins.ep, divisors(stage_group / etp)).filter(|&ep| ep <= parts.num_experts);
            groups.map(move |ep| Mesh { ep, etp, ..base }).collect::<Vec<_>>()
        });
        let is_wanted = |mesh: &Mesh| !pins.only_trainable || mesh.trainable(parts.num_experts).is_some();
        cuts.filter(is_wanted).collect()
    }

    fn cost(&mut self, mesh: &Mesh) -> MeshCost {
        let (job, experts) = (self.job, self.job.parts.num_experts);
        let hot = *self.hot.entry(mesh.ep).or_insert_with(|| job.skew.hot_rank(experts, mesh.ep));
        self.num_costed += 1;
        mesh_cost_with(job, self.fabric, mesh, hot)
    }

    /// Returns the best form of a cut: the fastest that fits, or else the leanest.
    fn best_of(&mut self, cut: Mesh) -> Option<MeshCost> {
        let forms = self.forms(cut);
        if forms.is_empty() {
            return None;
        }
        let lean = self.leanest(cut);
        let lean = self.cost(&lean);
        if !lean.fits {
            return Some(lean);
        }
        let mut best: Option<MeshCost> = None;
        for mesh in forms {
            let cost = self.cost(&mesh);
            if cost.fits && best.is_none_or(|best| cost.time.total() < best.time.total()) {
                best = Some(cost);
            }
        }
        best.or(Some(lean))
    }

    fn leanest(&self, cut: Mesh) -> Mesh {
        let pins = self.pins;
        let zero = pins.zero.unwrap_or(if cut.pp == 1 { 3 } else { 1 });
        let recompute = pins.recompute.unwrap_or(Recompute::Full);
        let schedule = pins.schedule.filter(|_| cut.pp > 1).unwrap_or(ScheduleKind::OneFOneB);
        let virtual_stages = schedule.virtual_stages(None).unwrap_or(1);
        Mesh { zero, recompute, schedule, virtual_stages, microbatch: pins.microbatch.unwrap_or(1), ..cut }
    }

    /// Lists the forms of a cut, the plainest first.
    fn forms(&self, cut: Mesh) -> Vec<Mesh> {
        let pins = self.pins;
        let highest = if cut.pp == 1 { 3 } else { 1 };
        let zeros = (0..=highest).filter(|zero| pins.zero.is_none_or(|pin| pin == *zero));
        let all = [Recompute::None, Recompute::Selective, Recompute::Full];
        let recomputes: Vec<Recompute> = all
            .into_iter()
            .filter(|form| {
                pins.recompute.map_or(!pins.only_trainable || *form != Recompute::Selective, |pin| pin == *form)
            })
            .collect();
        let most = self.job.global_batch / cut.dp;
        let sizes = pins.microbatch.map_or(MICROBATCHES.to_vec(), |size| vec![size]);
        let sizes: Vec<usize> = sizes.into_iter().filter(|&size| size <= most).collect();
        let mut forms = Vec::new();
        for zero in zeros {
            for &recompute in &recomputes {
                for &microbatch in &sizes {
                    let form = Mesh { zero, recompute, microbatch, ..cut };
                    forms.extend(self.schedules(form));
                }
            }
        }
        forms
    }

    /// Lists the schedules that the sizes of a form allow.
    fn schedules(&self, form: Mesh) -> Vec<Mesh> {
        use ScheduleKind::{
            DualPipe, DualPipeV, Gpipe, Interleaved, InterleavedOverlap, OneFOneB, OneFOneBOverlap, ZbH1, ZbH2,
        };
        if form.pp == 1 {
            return vec![form];
        }
        let m = self.job.global_batch.div_ceil(form.dp * form.microbatch);
        let p = form.pp;
        let layers = self.job.parts.num_layers / p;
        let kinds = self.pins.schedule.map_or(TRIED.to_vec(), |kind| vec![kind]);
        let mut forms = Vec::new();
        for schedule in kinds {
            let stages: Vec<usize> = match schedule {
                Interleaved | InterleavedOverlap if m.is_multiple_of(p) => {
                    (1..).map(|power| 1 << power).take_while(|&v: &usize| v <= MAX_VIRTUAL && v <= layers).collect()
                }
                DualPipe if p.is_multiple_of(2) && m.is_multiple_of(2) && m >= 2 * p => vec![1],
                DualPipeV if m >= 2 * p && layers >= 2 => vec![2],
                ZbH2 if m >= 2 * p - 1 => vec![1],
                Gpipe | OneFOneB | OneFOneBOverlap | ZbH1 => vec![1],
                _ => Vec::new(),
            };
            forms.extend(stages.into_iter().map(|virtual_stages| Mesh { schedule, virtual_stages, ..form }));
        }
        forms
    }
}
