//! The choices of routers while texts are served: counts by layer and expert, and the experts of each token.
//!
//! A pass tells its hook what each MoE layer decided. The counts go to [`ExpertLoad`], which metrics read while the
//! engine goes on; the ids go to a record that has a place for each token whose keys and values are kept, so that a
//! prompt that was found in the prefix cache has its experts too.

mod load;
mod ranks;
mod record;

use std::sync::Arc;

use moeworks_infer::routing_record::{PassTokens, RoutingRecorder, Run};
use moeworks_model::ModelConfig;
use moeworks_moe::MoeSaved;

pub use load::{ExpertLoad, LayerLoad};
pub use ranks::RankLoad;
pub use record::RoutedExperts;
pub(crate) use record::{ExpertRecord, Slots};

/// The choices of routers so far.
pub(crate) struct Experts {
    load: Arc<ExpertLoad>,
    record: ExpertRecord,
    /// The file that choices are written to, if there is one.
    recorder: Option<RoutingRecorder>,
}

/// The choices of a pass that is under way.
pub(crate) struct PassExperts<'a> {
    experts: &'a mut Experts,
    /// The places of the pass's tokens, in the order of its rows.
    slots: Slots,
    /// Rows that each MoE layer has told.
    num_told: Vec<usize>,
    /// True if the choices are on a device, which an early look would make wait.
    is_late: bool,
    late: Vec<(usize, MoeSaved)>,
}

impl Experts {
    /// Nothing chosen yet; none for a model without MoE layers.
    pub(crate) fn new(config: &ModelConfig, num_blocks: usize, block_len: usize) -> Option<Self> {
        let layers: Vec<usize> = (0..config.num_layers).filter(|&layer| config.is_moe_layer(layer)).collect();
        if layers.is_empty() {
            return None;
        }
        let load = Arc::new(ExpertLoad::new(&layers, config.moe().num_choosable()));
        let record = ExpertRecord::new(layers.len(), config.top_k, num_blocks * block_len);
        Some(Self { load, record, recorder: None })
    }

    pub(crate) fn load(&self) -> &Arc<ExpertLoad> {
        &self.load
    }

    /// Writes all choices from now on to `recorder`.
    pub(crate) fn record_to(&mut self, recorder: RoutingRecorder) {
        self.recorder = Some(recorder);
    }

    /// Returns whether choices are written to a file.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorder.is_some()
    }

    /// Writes the choices of the pass that is over. A record that cannot be written ends, and the serving goes on.
    pub(crate) fn write_record(&mut self, runs: &[Run], token_ids: &[u32]) {
        let Some(recorder) = &mut self.recorder else { return };
        if let Err(error) = recorder.finish_pass(PassTokens { runs, token_ids }) {
            tracing::warn!("the routing is no longer recorded: {error}");
            self.recorder = None;
        }
    }

    pub(crate) fn record(&mut self) -> &mut ExpertRecord {
        &mut self.record
    }

    /// Begins a pass over tokens that have these places. `is_late` says that their experts are read when the pass is
    /// over.
    pub(crate) fn begin(&mut self, slots: Slots, is_late: bool) -> PassExperts<'_> {
        let num_told = vec![0; self.load.num_layers()];
        PassExperts { experts: self, slots, num_told, is_late, late: Vec::new() }
    }
}

impl PassExperts<'_> {
    /// Takes in what layer `layer` of the model decided for its next rows.
    pub(crate) fn tell(&mut self, layer: usize, saved: &MoeSaved) {
        if self.is_late { self.late.push((layer, saved.clone())) } else { self.add(layer, saved) }
    }

    /// Ends the pass.
    pub(crate) fn finish(mut self) {
        for (layer, saved) in std::mem::take(&mut self.late) {
            self.add(layer, &saved);
        }
    }

    fn add(&mut self, layer: usize, saved: &MoeSaved) {
        let routing = saved.routing();
        let Some(place) = self.experts.load.place(layer) else { return };
        let (ids, top_k) = (routing.expert_ids(), routing.top_k());
        let first = self.num_told[place];
        self.num_told[place] += routing.num_tokens();
        self.experts.load.add(place, routing.num_tokens(), ids);
        if let Some(recorder) = &mut self.experts.recorder {
            recorder.tell(layer, saved);
        }
        self.experts.record.write(place, self.slots.rows(first, routing.num_tokens()), ids, top_k);
    }
}
