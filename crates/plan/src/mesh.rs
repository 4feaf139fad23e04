//! The layout of a training run in all its dimensions, attention and experts laid out apart (parallel folding,
//! 2504.14960).
//!
//! The ranks of a pipeline stage are cut twice. For attention and everything outside the experts they are
//! `tp x cp x dp`, tensor-parallel neighbours first. For the experts they are `etp x ep x edp`:
//! expert-tensor-parallel groups hold slices of an expert, expert-parallel groups hold all experts between them, and
//! there are `edp` copies. Folded, the experts' groups are neighbours whatever the attention's are. Unfolded,
//! experts are cut as attention is (`etp = tp`) and an expert-parallel group is one of data-parallel ranks.

use std::fmt;

use crate::{Layout, ScheduleKind};

/// The activations that are computed again in the backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// None.
    #[default]
    None,
    /// Outputs of norms and of activation functions, and whatever else memory gives faster than products.
    Selective,
    /// All of a layer but its input: a second forward.
    Full,
}

impl Recompute {
    /// Returns the name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        }
    }
}

/// The layout of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Tensor parallelism outside the experts.
    pub tp: usize,
    /// Context parallelism: the ranks that share a sequence.
    pub cp: usize,
    /// Data parallelism outside the experts: the ranks with sequences of their own.
    pub dp: usize,
    /// The number of pipeline ranks.
    pub pp: usize,
    /// Expert parallelism: the groups that hold the experts between them.
    pub ep: usize,
    /// Expert-tensor parallelism: the ranks that hold slices of an expert.
    pub etp: usize,
    /// True if experts are laid out apart from attention.
    pub is_folded: bool,
    /// The order of a pipeline's microbatches; 1F1B without a pipeline.
    pub schedule: ScheduleKind,
    /// The number of stages of a rank.
    pub virtual_stages: usize,
    /// Sequences of a microbatch of a data-parallel rank.
    pub microbatch: usize,
    /// The stage of ZeRO, 0 to 3.
    pub zero: u8,
    /// The activations that are computed again.
    pub recompute: Recompute,
}

impl Mesh {
    /// Makes a layout without pipeline, context parallelism or expert-tensor parallelism.
    #[must_use]
    pub fn new(tp: usize, dp: usize, ep: usize) -> Self {
        Self {
            tp,
            cp: 1,
            dp,
            pp: 1,
            ep,
            etp: 1,
            is_folded: true,
            schedule: ScheduleKind::OneFOneB,
            virtual_stages: 1,
            microbatch: 1,
            zero: 1,
            recompute: Recompute::None,
        }
    }

    /// Returns the number of ranks of a pipeline stage.
    #[must_use]
    pub fn stage_group_size(&self) -> usize {
        self.tp * self.cp * self.dp
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.stage_group_size() * self.pp
    }

    /// Returns the number of copies of an expert.
    #[must_use]
    pub fn edp(&self) -> usize {
        self.stage_group_size() / (self.ep * self.etp).max(1)
    }

    /// Returns whether the sizes are at least 1 and the experts' divide those of a stage.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let sizes = [self.tp, self.cp, self.dp, self.pp, self.ep, self.etp, self.virtual_stages, self.microbatch];
        let is_cut = if self.is_folded {
            self.stage_group_size().is_multiple_of(self.ep * self.etp)
        } else {
            self.etp == self.tp && self.dp.is_multiple_of(self.ep)
        };
        sizes.iter().all(|&size| size >= 1) && is_cut
    }

    /// Returns the layout that `moeworks train` carries out, with dp, ep and tp in its sense: expert-parallel groups
    /// of whole tensor-parallel groups. None if the trainer has no such layout: with context or expert-tensor
    /// parallelism, selective recomputation, or experts over fewer ranks than a matrix.
    #[must_use]
    pub fn trainable(&self, num_experts: usize) -> Option<Layout> {
        let ep = if num_experts == 0 { self.tp } else { self.ep };
        let is_planned_only = self.cp > 1 || self.etp > 1 || self.recompute == Recompute::Selective;
        let has_groups = ep.is_multiple_of(self.tp) && self.dp.is_multiple_of(ep / self.tp);
        let is_apart = !self.is_folded && self.tp > 1 && ep > 1;
        let has_zero = self.zero <= 1 || self.pp == 1;
        (!is_planned_only && has_groups && !is_apart && has_zero).then(|| {
            let groups = ep / self.tp;
            Layout::new(self.dp / groups, groups, self.tp).with_pipeline(self.pp)
        })
    }

    /// Returns the names of what the trainer does not have, of what this layout uses.
    #[must_use]
    pub fn planned_only(&self, num_experts: usize) -> Vec<&'static str> {
        if self.trainable(num_experts).is_some() {
            return Vec::new();
        }
        let used = [
            (self.cp > 1, "context parallelism"),
            (self.etp > 1, "expert-tensor parallelism"),
            (self.recompute == Recompute::Selective, "selective recomputation"),
        ];
        let names: Vec<&str> = used.into_iter().filter(|(is_used, _)| *is_used).map(|(_, name)| name).collect();
        if names.is_empty() { vec!["experts laid out over part of a tensor-parallel group"] } else { names }
    }

    /// Returns the options of `moeworks train` for this layout of a model with `num_layers` layers and `microbatches`
    /// microbatches a step, if the trainer has it.
    #[must_use]
    pub fn options(&self, num_experts: usize, num_layers: usize, microbatches: usize) -> Option<String> {
        let Layout { dp, ep, tp, pp, .. } = self.trainable(num_experts)?;
        let mut text = format!("--dp {dp} --ep {ep} --tp {tp}");
        if pp > 1 {
            text += &format!(" --pp {pp}");
        }
        let mut set = |setting: String| text += &format!(" --set {setting}");
        if pp > 1 {
            set(format!("parallel.schedule={}", self.schedule));
        }
        if self.virtual_stages > 2 {
            let stages = pp * self.virtual_stages;
            let layers = |stage: usize| num_layers * (stage + 1) / stages - num_layers * stage / stages;
            let counts: Vec<String> = (0..stages).map(|stage| layers(stage).to_string()).collect();
            set(format!("parallel.stages={}", counts.join(",")));
        }
        if self.zero > 0 {
            set(format!("parallel.zero={}", self.zero));
        }
        if self.recompute == Recompute::Full {
            set("train.checkpoint_layers=true".to_owned());
        }
        set(format!("train.batch_size={}", self.microbatch * self.dp));
        set(format!("train.grad_accumulation={microbatches}"));
        Some(text)
    }
}

impl fmt::Display for Mesh {
    /// Writes the sizes above 1.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp {} cp {} dp {} pp {}", self.tp, self.cp, self.dp, self.pp)?;
        write!(f, " ep {} etp {}", self.ep, self.etp)?;
        if self.pp > 1 {
            write!(f, " {}", self.schedule)?;
        }
        if self.virtual_stages > 1 {
            write!(f, " x{}", self.virtual_stages)?;
        }
        write!(f, " mb {} zero {}", self.microbatch, self.zero)?;
        match self.recompute {
            Recompute::None => Ok(()),
            other => write!(f, " recompute {}", other.name()),
        }
    }
}
