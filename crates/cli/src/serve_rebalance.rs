//! The options of experts that move between ranks while a model is served.

use std::path::Path;

use moeworks_infer::InferError;
use moeworks_infer::model_ranks::check_placements;
use moeworks_infer::open::Model;
use moeworks_serve::{RebalanceOptions, RebalanceSource};

use crate::args::RebalanceArgs;
use crate::failure::Failure;
use crate::model_ranks::read_placements;

/// Resolves the options for `model`, which is open.
pub(crate) fn options(args: &RebalanceArgs, model: &Model) -> Result<RebalanceOptions, Failure> {
    let RebalanceArgs { rebalance, spare_slots, rebalance_every, rebalance_megabytes } = args;
    if *rebalance_every == 0 {
        return Err(Failure::input("--rebalance-every 0: must be at least 1"));
    }
    let off = || RebalanceOptions {
        every_tokens: *rebalance_every,
        spare_slots: *spare_slots,
        bytes_per_turn: rebalance_megabytes.saturating_mul(1_000_000),
        ..RebalanceOptions::default()
    };
    if rebalance == "off" {
        if *spare_slots > 0 {
            return Err(Failure::input(format!("--spare-slots {spare_slots}: needs --rebalance online")));
        }
        return Ok(off());
    }
    let Some(remote) = model.decoder.remote_experts() else {
        return Err(Failure::input(format!("--rebalance {rebalance}: there is one rank; it needs --ep above 1")));
    };
    if model.decoder.remote_stages().is_some() {
        let problem = "experts of a model over stages do not move; leave --pp out";
        return Err(Failure::input(format!("--rebalance {rebalance}: {problem}")));
    }
    if rebalance == "online" {
        return Ok(RebalanceOptions { source: RebalanceSource::Online, ..off() });
    }
    let placements = read_placements("--rebalance", Path::new(rebalance))?;
    match check_placements(&placements, model.decoder.config(), remote.num_ranks()) {
        Err(InferError::Placement { problem }) => Err(Failure::input(format!("--rebalance {rebalance}: {problem}"))),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(RebalanceOptions { source: RebalanceSource::Placements(placements), ..off() }),
    }
}
