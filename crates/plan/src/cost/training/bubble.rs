//! Bubbles, messages and peaks of memory of pipeline schedules by their closed forms, which are as exact as carrying
//! the schedule out where all stages take equally long (`tests/it/meshes.rs` compares the two).

use crate::{Mesh, ScheduleKind};

/// The seconds of a microbatch on a pipeline rank, over all its stages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassTimes {
    /// F, the forward.
    pub forward: f64,
    /// B, the input's gradient.
    pub input_grad: f64,
    /// W, the weights' gradients.
    pub weight_grad: f64,
    /// The all-to-alls among F and B, which paired schedules hide.
    pub hidden_by_pairs: f64,
}

/// Returns the seconds that a pipeline rank waits in a step of `m` microbatches, without messages.
#[must_use]
pub fn bubble_seconds(mesh: &Mesh, m: usize, times: &PassTimes) -> f64 {
    let PassTimes { forward: f, input_grad: b, weight_grad: w, hidden_by_pairs } = *times;
    let (ahead, v, p) = (mesh.pp as f64 - 1.0, mesh.virtual_stages as f64, mesh.pp as f64);
    if mesh.pp <= 1 {
        return 0.0;
    }
    let whole = f + b + w;
    // The pair leaves out what it hides, as far as computation reaches.
    let pair = whole - hidden_by_pairs.min(whole - hidden_by_pairs);
    let warm = m.min(mesh.pp) as f64 - 1.0;
    let seconds = match mesh.schedule {
        ScheduleKind::Gpipe | ScheduleKind::OneFOneB => ahead * whole,
        ScheduleKind::Interleaved => ahead * whole / v,
        ScheduleKind::ZbH1 | ScheduleKind::Zb1p => ahead * (f + b) - warm * w,
        ScheduleKind::ZbH2 | ScheduleKind::Zb2p => ahead * (f + b) - 2.0 * warm * w,
        ScheduleKind::ZbV => ahead * (f + b - 2.0 * w).max(0.0),
        ScheduleKind::OneFOneBOverlap => ahead * (f + b),
        ScheduleKind::InterleavedOverlap => ahead * (f + b) / v,
        ScheduleKind::DualPipe => (p / 2.0 - 1.0) * (pair + b + w - 3.0 * w),
        ScheduleKind::DualPipeV => ahead * (pair + b + w - 3.0 * w) / 2.0,
    };
    seconds.max(0.0)
}

/// Returns the seconds that messages of `seconds` each add to a step of `m` microbatches.
#[must_use]
pub fn message_seconds(mesh: &Mesh, m: usize, seconds: f64) -> f64 {
    let (p, v, m) = (mesh.pp as f64, mesh.virtual_stages as f64, m as f64);
    if mesh.pp <= 1 {
        return 0.0;
    }
    let messages = match mesh.schedule {
        ScheduleKind::Gpipe | ScheduleKind::OneFOneB | ScheduleKind::OneFOneBOverlap => {
            2.0 * (p - 1.0) * (m / p).max(1.0) + 2.0 * (p - 2.0)
        }
        ScheduleKind::Interleaved | ScheduleKind::InterleavedOverlap => 2.0 * p * v - p - 2.0,
        ScheduleKind::ZbH1 | ScheduleKind::Zb1p => 4.0 * (p - 1.0),
        _ => 2.0 * (p - 1.0),
    };
    messages.max(0.0) * seconds
}

/// Returns the most microbatches whose activations a pipeline rank holds at a time, in units of all its stages.
#[must_use]
pub fn peak_microbatches(mesh: &Mesh, m: usize) -> f64 {
    let (p, v) = (mesh.pp as f64, mesh.virtual_stages as f64);
    if mesh.pp <= 1 {
        return 1.0;
    }
    let peak = match mesh.schedule {
        ScheduleKind::Gpipe => m as f64,
        ScheduleKind::OneFOneB | ScheduleKind::ZbH1 | ScheduleKind::Zb1p | ScheduleKind::ZbV => p,
        ScheduleKind::Interleaved => p + (p - 1.0) / v,
        ScheduleKind::ZbH2 => 2.0 * p - 1.0,
        ScheduleKind::Zb2p | ScheduleKind::OneFOneBOverlap => 2.0 * p,
        ScheduleKind::DualPipe => p + 1.0,
        ScheduleKind::DualPipeV => p + 0.5,
        ScheduleKind::InterleavedOverlap => p + p / v,
    };
    peak.min(m as f64)
}
