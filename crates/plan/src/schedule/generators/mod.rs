//! Generators of schedules: pure functions of the number of ranks and microbatches, and for some of times and memory.

mod automatic;
mod dualpipe;
mod interleaved;
mod one_f_one_b;
mod zero_bubble;

use std::fmt;
use std::str::FromStr;

use super::action::{Action, Entry, Kind};
use super::times::Times;
use super::{Schedule, WeightCopy};

/// A kind of schedule that can be generated. Each has the paper that it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScheduleKind {
    /// `gpipe`: all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, figure 2c).
    Gpipe,
    /// `1f1b`: forwards and backwards in turn once a backward can start (Narayanan et al., PipeDream, SOSP 2019;
    /// Megatron-LM, SC 2021, section 2.2.1).
    OneFOneB,
    /// `interleaved`: 1F1B with several stages a rank (Megatron-LM, SC 2021, section 2.2.2).
    Interleaved,
    /// `zb_h1`: 1F1B with W delayed, in the memory of 1F1B (Qi et al., Zero Bubble, ICLR 2024, section 2.2 and figure
    /// 2).
    ZbH1,
    /// `zb_h2`: more forwards before the first backward, which fill the warm-up, in twice the memory (the same,
    /// section 2.3 and figure 3).
    ZbH2,
    /// `zb_v`: two stages a rank in the form of a V; no bubble where F, B and W take equally long (the same authors,
    /// section 6 of the paper's full version; Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section
    /// 4).
    ZbV,
    /// `zb_1p`: the automatic scheduler with the memory of 1F1B, or a given limit (Zero Bubble, section 3.1).
    Zb1p,
    /// `zb_2p`: the same with twice that memory.
    Zb2p,
    /// `dualpipe`: microbatches from both ends over two copies of the weights, forwards overlapped with backwards
    /// (DeepSeek-V3, 2024, section 3.2.1; the repository DualPipe).
    DualPipe,
    /// `dualpipe_v`: a DualPipe cut in half, with one copy of the weights and two stages a rank (the repository
    /// DualPipe).
    DualPipeV,
    /// `1f1b_overlap`: 1F1B with pairs of a forward and a backward, for which the warm-up has about twice the
    /// forwards, and W apart as filler.
    OneFOneBOverlap,
    /// `interleaved_overlap`: interleaved 1F1B with such pairs, for which the first steady forward moves into the
    /// warm-up (Megatron-Core, `overlap_moe_expert_parallel_comm` with `delay_wgrad_compute`).
    InterleavedOverlap,
}

/// A name that is no kind of schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown schedule {name:?}: expected one of {}", ScheduleKind::ALL.map(ScheduleKind::name).join(", "))]
pub struct UnknownSchedule {
    /// The name.
    pub name: String,
}

/// The size of a schedule, and the times and memory that the automatic kinds follow.
#[derive(Clone, Copy, Debug)]
pub struct ScheduleRequest<'a> {
    /// p: the number of ranks.
    pub num_ranks: usize,
    /// m: the number of microbatches.
    pub num_microbatches: usize,
    /// v: the stages of a rank; none leaves it to the kind: 2 where a rank has several, 1 elsewhere.
    pub virtual_stages: Option<usize>,
    /// Times and sizes of the stages. The automatic schedules (`zb_1p`, `zb_2p`) go by them; the others do not look
    /// at them.
    pub times: &'a Times,
    /// The most memory of a rank, in the unit of the activations in `times`, for `zb_1p` and `zb_2p` in the place of
    /// their own.
    pub memory_limit: Option<f64>,
}

impl<'a> ScheduleRequest<'a> {
    /// Makes a request that leaves the stages of a rank and the memory to the kind of schedule.
    #[must_use]
    pub fn new(num_ranks: usize, num_microbatches: usize, times: &'a Times) -> Self {
        Self { num_ranks, num_microbatches, virtual_stages: None, times, memory_limit: None }
    }
}

/// A size that a kind of schedule does not take.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// A number of ranks, microbatches or stages that the schedule does not take.
    #[error("schedule {schedule} with {what} = {given}: {right}")]
    Size {
        /// The name of the schedule.
        schedule: &'static str,
        /// The number: `ranks`, `microbatches` or `virtual stages`.
        what: &'static str,
        /// The number that was asked for.
        given: usize,
        /// The numbers that would be right.
        right: String,
    },
    /// A limit on memory that leaves no room for one microbatch.
    #[error(
        "schedule {schedule} with memory limit {limit}: rank {rank} needs {least} for the activations of one microbatch"
    )]
    Memory {
        /// The name of the schedule.
        schedule: &'static str,
        /// The limit.
        limit: f64,
        /// The rank.
        rank: usize,
        /// The least limit.
        least: f64,
    },
    /// A limit on memory for a schedule whose memory is fixed.
    #[error(
        "schedule {schedule} does not take a memory limit: its memory follows from its sizes; zb_1p and zb_2p take one"
    )]
    FixedMemory {
        /// The name of the schedule.
        schedule: &'static str,
    },
    /// Times that do not fit the stages.
    #[error(transparent)]
    Times(#[from] super::TimesError),
}

/// Actions that a generated schedule may have at most.
const MAX_ACTIONS: usize = 1 << 28;

impl ScheduleKind {
    /// All kinds.
    pub const ALL: [Self; 12] = [
        Self::Gpipe,
        Self::OneFOneB,
        Self::Interleaved,
        Self::ZbH1,
        Self::ZbH2,
        Self::ZbV,
        Self::Zb1p,
        Self::Zb2p,
        Self::DualPipe,
        Self::DualPipeV,
        Self::OneFOneBOverlap,
        Self::InterleavedOverlap,
    ];

    /// Returns the name, as `parallel.schedule` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZbH1 => "zb_h1",
            Self::ZbH2 => "zb_h2",
            Self::ZbV => "zb_v",
            Self::Zb1p => "zb_1p",
            Self::Zb2p => "zb_2p",
            Self::DualPipe => "dualpipe",
            Self::DualPipeV => "dualpipe_v",
            Self::OneFOneBOverlap => "1f1b_overlap",
            Self::InterleavedOverlap => "interleaved_overlap",
        }
    }

    /// Returns the stages that a rank holds, of each copy of the weights, for a wish.
    pub fn virtual_stages(self, wish: Option<usize>) -> Result<usize, GenerateError> {
        let (range, right) = match self {
            Self::Interleaved | Self::InterleavedOverlap => (2..=usize::MAX, "a rank must have at least 2"),
            Self::ZbV | Self::DualPipeV => (2..=2, "a rank has 2"),
            Self::DualPipe => (1..=1, "a rank has 1 of each of the two copies"),
            _ => (1..=1, "a rank has 1"),
        };
        let given = wish.unwrap_or(*range.start());
        if range.contains(&given) { Ok(given) } else { Err(self.size_error("virtual stages", given, right)) }
    }

    /// Generates the schedule.
    pub fn generate(self, request: &ScheduleRequest<'_>) -> Result<Schedule, GenerateError> {
        let virtual_stages = self.check(request)?;
        let size = Size { ranks: request.num_ranks, microbatches: request.num_microbatches, virtual_stages };
        let (copies, ranks) = match self {
            Self::Gpipe => (one_copy(size, false), rows(size, one_f_one_b::gpipe_row)),
            Self::OneFOneB => (one_copy(size, false), rows(size, one_f_one_b::row)),
            Self::OneFOneBOverlap => (one_copy(size, false), rows(size, one_f_one_b::overlap_row)),
            Self::Interleaved => (one_copy(size, false), rows(size, interleaved::row)),
            Self::InterleavedOverlap => (one_copy(size, false), rows(size, interleaved::overlap_row)),
            Self::ZbH1 => (one_copy(size, false), rows(size, zero_bubble::h1_row)),
            Self::ZbH2 => (one_copy(size, false), rows(size, zero_bubble::h2_row)),
            Self::ZbV => (one_copy(size, true), rows(size, zero_bubble::v_row)),
            Self::Zb1p | Self::Zb2p => {
                let limits = self.memory_limits(request)?;
                (one_copy(size, false), automatic::schedule(size, request.times, &limits))
            }
            Self::DualPipe => (dualpipe::copies(size), rows(size, dualpipe::row)),
            Self::DualPipeV => (one_copy(size, true), rows(size, dualpipe::v_row)),
        };
        Ok(Schedule { name: self.name().to_owned(), copies, moe_layers: Vec::new(), ranks })
    }

    fn size_error(self, what: &'static str, given: usize, right: impl Into<String>) -> GenerateError {
        GenerateError::Size { schedule: self.name(), what, given, right: right.into() }
    }

    /// Fails on sizes that the schedule does not take; returns the stages of a rank.
    fn check(self, request: &ScheduleRequest<'_>) -> Result<usize, GenerateError> {
        let virtual_stages = self.virtual_stages(request.virtual_stages)?;
        let ScheduleRequest { num_ranks, num_microbatches, .. } = *request;
        let wrong = |what, given, right: String| Err(self.size_error(what, given, right));
        if num_ranks == 0 || (self == Self::DualPipe && num_ranks % 2 != 0) {
            let right = if self == Self::DualPipe { "must be even and at least 2" } else { "must be at least 1" };
            return wrong("ranks", num_ranks, right.to_owned());
        }
        let actions = num_ranks.checked_mul(num_microbatches).and_then(|each| each.checked_mul(virtual_stages * 3));
        if actions.is_none_or(|actions| actions > MAX_ACTIONS) {
            let each = MAX_ACTIONS / 3 / virtual_stages.min(MAX_ACTIONS);
            let most = each / num_ranks.min(MAX_ACTIONS);
            if most == 0 {
                return wrong("ranks", num_ranks, format!("can be at most {each}"));
            }
            return wrong("microbatches", num_microbatches, format!("{num_ranks} ranks can have at most {most}"));
        }
        let right = match self {
            Self::Interleaved | Self::InterleavedOverlap => {
                (num_microbatches % num_ranks != 0).then(|| format!("must be a multiple of the {num_ranks} ranks"))
            }
            Self::DualPipe => (num_microbatches % 2 != 0 || num_microbatches < 2 * num_ranks)
                .then(|| format!("must be even and at least {}, twice the ranks", 2 * num_ranks)),
            Self::DualPipeV => (num_microbatches < 2 * num_ranks)
                .then(|| format!("must be at least {}, twice the ranks", 2 * num_ranks)),
            _ => None,
        };
        let right = if num_microbatches == 0 { Some("must be at least 1".to_owned()) } else { right };
        if request.memory_limit.is_some() && !matches!(self, Self::Zb1p | Self::Zb2p) {
            return Err(GenerateError::FixedMemory { schedule: self.name() });
        }
        match right {
            Some(right) => wrong("microbatches", num_microbatches, right),
            None => Ok(virtual_stages),
        }
    }

    /// Returns the most memory of each rank: p or 2p microbatches of activations, or the given limit.
    fn memory_limits(self, request: &ScheduleRequest<'_>) -> Result<Vec<f64>, GenerateError> {
        request.times.check(request.num_ranks)?;
        let microbatches = if self == Self::Zb1p { request.num_ranks } else { 2 * request.num_ranks };
        let limit = |rank: usize| {
            let least = request.times.stage(rank as u32).activation;
            let limit = request.memory_limit.unwrap_or(microbatches as f64 * least);
            if limit >= least {
                Ok(limit)
            } else {
                Err(GenerateError::Memory { schedule: self.name(), limit, rank, least })
            }
        };
        (0..request.num_ranks).map(limit).collect()
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ScheduleKind {
    type Err = UnknownSchedule;

    fn from_str(name: &str) -> Result<Self, UnknownSchedule> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == name);
        kind.ok_or_else(|| UnknownSchedule { name: name.to_owned() })
    }
}

/// p, m and v, in the limits of the schedule.
#[derive(Clone, Copy)]
struct Size {
    ranks: usize,
    microbatches: usize,
    virtual_stages: usize,
}

fn rows(size: Size, row: fn(Size, usize) -> Row) -> Vec<Vec<Entry>> {
    (0..size.ranks).map(|rank| row(size, rank).entries).collect()
}

/// Returns one copy of the weights, whose stages go over the ranks round and round, or forth and back in the form of
/// a V.
fn one_copy(size: Size, is_v: bool) -> Vec<WeightCopy> {
    let rank = |stage: usize| {
        let (round, rank) = (stage / size.ranks, stage % size.ranks);
        (if is_v && round % 2 == 1 { size.ranks - 1 - rank } else { rank }) as u32
    };
    let stage_ranks = (0..size.ranks * size.virtual_stages).map(rank).collect();
    vec![WeightCopy { num_microbatches: size.microbatches as u32, stage_ranks }]
}

/// The list of a rank while it is made.
#[derive(Default)]
struct Row {
    entries: Vec<Entry>,
}

impl Row {
    fn push(&mut self, kind: Kind, stage: usize, microbatch: usize) {
        self.entries.push(Entry::One(Action::new(kind, stage as u32, microbatch as u32)));
    }

    fn push_pair(&mut self, forward: (usize, usize), backward: (usize, usize), kind: Kind) {
        let forward = Action::new(Kind::Forward, forward.0 as u32, forward.1 as u32);
        let backward = Action::new(kind, backward.0 as u32, backward.1 as u32);
        self.entries.push(Entry::Pair(forward, backward));
    }
}
