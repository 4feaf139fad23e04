//! Checks of a pipeline's settings against others. What cannot be carried out is refused before a run begins.

use moeworks_model::PositionKind;

use super::check::wrong;
use super::{ConfigError, MovingChoice, PlacementChoice, RebalanceMode, RunConfig};
use crate::pipeline::PipelinePlan;

/// The highest stage of ZeRO in a pipeline that keeps two copies of the weights.
const MAX_ZERO_OF_COPIES: u8 = 1;

impl RunConfig {
    /// Checks that a pipeline can be made of the model, and goes with the other settings.
    pub(super) fn check_pipeline(&self) -> Result<(), ConfigError> {
        if self.parallel.pp == 1 {
            let text = &self.parallel.stage_ep;
            let wrong = || wrong("parallel.stage_ep", format!("{text:?}"), "needs parallel.pp above 1");
            return if text.is_empty() { Ok(()) } else { Err(wrong()) };
        }
        self.check_what_is_cut()?;
        self.check_beside_pipeline()?;
        let Some(plan) = PipelinePlan::new(self)? else { return Ok(()) };
        self.check_stage_ep(&plan)?;
        let (zero, num_copies) = (self.parallel.zero, plan.schedule.copies.len());
        if zero > MAX_ZERO_OF_COPIES && num_copies > 1 {
            let expected = "must be 0 or 1 with a schedule that keeps two copies of the weights: ranks of different stages \
                            hold a tensor, at different times of a step";
            return Err(wrong("parallel.zero", zero, expected));
        }
        Ok(())
    }

    /// Checks the numbers of ranks that stage groups spread their experts over.
    fn check_stage_ep(&self, plan: &PipelinePlan) -> Result<(), ConfigError> {
        let (parallel, text) = (&self.parallel, &self.parallel.stage_ep);
        if text.is_empty() {
            return Ok(());
        }
        let num_ranks = parallel.dp * parallel.ep;
        let fits = |ep: &usize| *ep > 0 && num_ranks.is_multiple_of(*ep);
        let is_right = parallel.stage_eps().is_some_and(|eps| eps.len() == parallel.pp && eps.iter().all(fits));
        let expected = if !is_right {
            let (pp, form) = (parallel.pp, "must be a number of ranks for each stage group, with commas between");
            format!("{form}: parallel.pp, {pp}, numbers that divide parallel.dp times parallel.ep, {num_ranks}")
        } else if plan.schedule.copies.len() > 1 {
            "needs a schedule that keeps one copy of the weights".to_owned()
        } else if parallel.placement != PlacementChoice::Sharded {
            "needs parallel.placement = \"sharded\"".to_owned()
        } else if self.rebalance.mode != RebalanceMode::Off {
            "needs rebalance.mode = \"off\"".to_owned()
        } else {
            return Ok(());
        };
        Err(wrong("parallel.stage_ep", format!("{text:?}"), expected))
    }

    /// Refuses models that are not cut into stages.
    fn check_what_is_cut(&self) -> Result<(), ConfigError> {
        let variant = &self.model.variant;
        let what = if variant.encoder.is_some() {
            "a model with an encoder"
        } else if matches!(variant.positions, PositionKind::Relative { .. }) {
            "a model with relative positions"
        } else {
            return Ok(());
        };
        Err(wrong("parallel.pp", self.parallel.pp, format!("must be 1: {what} is not cut into stages")))
    }

    /// Refuses settings of ranks that a pipeline does not go with.
    fn check_beside_pipeline(&self) -> Result<(), ConfigError> {
        let parallel = &self.parallel;
        if parallel.moving != MovingChoice::Tokens {
            let expected = "must be \"tokens\" with parallel.pp above 1";
            let value = if parallel.moving == MovingChoice::Auto { "\"auto\"" } else { "\"weights\"" };
            return Err(wrong("parallel.moving", value, expected));
        }
        if parallel.chunks == 0 {
            return Err(wrong("parallel.chunks", 0, "must be at least 1 with parallel.pp above 1"));
        }
        let num_shares = parallel.dp.saturating_mul(parallel.ep);
        if self.train.batch_size < num_shares {
            let expected = format!(
                "must be at least {num_shares}, parallel.dp times parallel.ep, with parallel.pp above 1: each rank of a stage \
                 needs a sequence of a microbatch"
            );
            return Err(wrong("train.batch_size", self.train.batch_size, expected));
        }
        Ok(())
    }
}
