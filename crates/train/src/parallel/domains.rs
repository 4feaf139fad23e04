//! Domains of ranks that gather each other's experts: by the settings, or chosen by the bandwidth that is measured,
//! and again when exchanges see that it has changed.

use moeworks_comm::{CommError, Communicator, Reduce};
use moeworks_moe::{DomainOptions, LevelDomain, SeenTraffic};
use moeworks_plan::{DomainChange, DomainLevel, DomainTuner, DomainWindow, DomainWork};

use super::{Ranks, time_all_to_all};
use crate::config::{RunConfig, wrong};
use crate::error::TrainError;
use crate::metrics::{NamedFigure, Record};

/// Steps after which domains are chosen again.
const WINDOW: u64 = 10;
/// The most and the fewest bytes that each rank sends each other one to measure links.
const PROBE_BYTES: [usize; 2] = [1 << 12, 1 << 18];
/// Seconds that a message of a measurement may take.
const PROBE_S: f64 = 5e-3;

/// The choice of domains in a run that chooses them by bandwidth.
pub(super) struct DomainTuning {
    tuner: DomainTuner,
    options: DomainOptions,
    num_steps: u64,
    /// The figures of the last window.
    window: DomainWindow,
}

/// The levels of a group of ranks: its nodes and the ranks of a node, or all ranks as one level.
#[derive(Clone, Copy)]
struct Levels {
    num_nodes: usize,
    per_node: usize,
}

impl Levels {
    /// Finds nodes of equally many consecutive ranks.
    fn new(nodes: &[usize]) -> Option<Self> {
        let num_nodes = 1 + nodes.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let per_node = nodes.len() / num_nodes;
        let is_regular =
            nodes.chunks(per_node.max(1)).all(|node| node.len() == per_node && node[0] == node[per_node - 1]);
        (is_regular && per_node > 0).then_some(Self { num_nodes, per_node })
    }

    /// Returns whether there are both nodes and ranks of a node to choose domains of.
    fn are_two(self) -> bool {
        self.num_nodes > 1 && self.per_node > 1
    }
}

/// Returns the domains of a group of ranks on these nodes, for the sizes of the settings; none without domains.
pub(super) fn of_config(config: &RunConfig, nodes: &[usize]) -> Result<Option<DomainOptions>, TrainError> {
    let parallel = &config.parallel;
    let levels = match *parallel.domain.sizes() {
        [size] => vec![LevelDomain { size: nodes.len(), domain: size }],
        [outer, inner] => {
            let Levels { num_nodes, per_node } = Levels::new(nodes).unwrap_or(Levels { num_nodes: 1, per_node: 1 });
            let levels = [(num_nodes, outer), (per_node, inner)];
            levels.map(|(size, domain)| LevelDomain { size, domain }).to_vec()
        }
        _ => Vec::new(),
    };
    let is_divided = |level: &LevelDomain| level.domain > 0 && level.size.is_multiple_of(level.domain);
    if !parallel.domain.is_auto() && !levels.iter().all(is_divided) {
        let expected = match Levels::new(nodes) {
            Some(Levels { num_nodes, per_node }) => format!(
                "must divide the {num_nodes} node(s) and the {per_node} rank(s) of each that hold the experts between them"
            ),
            None => "must be one number: the nodes have different numbers of ranks".to_owned(),
        };
        return Err(wrong("parallel.domain", &parallel.domain, expected).into());
    }
    let options = DomainOptions {
        keep: parallel.domain_keep,
        base: parallel.domain_base.into(),
        keep_gradients: parallel.domain_keep_gradients,
        ..DomainOptions::of_levels(levels)
    };
    Ok((parallel.domain.num_members() != 1).then_some(options))
}

/// Returns the bytes of a layer's exchange, for domains with these options among `num_ranks`.
fn work(config: &RunConfig, num_ranks: usize, options: &DomainOptions) -> DomainWork {
    let (parallel, model) = (&config.parallel, &config.model);
    let moe = model.moe();
    let params = (moe.activation.num_inputs() + 1) * moe.width * moe.expert_width;
    let tokens = config.train.batch_size.div_ceil(parallel.num_ranks() / parallel.pp) * config.train.seq_len;
    let sent = model.top_k.min(num_ranks) as f64 * parallel.wire.wire().row_bytes(model.width) as f64;
    DomainWork {
        data_bytes: tokens as f64 * sent,
        expert_bytes: (size_of::<f32>() * params * model.num_experts) as f64 / num_ranks as f64
            * options.share_of_bytes(),
        hidden_s: 0.0,
    }
}

impl Ranks {
    /// Begins to choose domains by bandwidth, where the settings ask for it. All ranks call this.
    pub(super) fn with_domain_tuning(self, config: &RunConfig) -> Result<Self, TrainError> {
        if !config.parallel.domain.is_auto() || config.model.num_experts == 0 {
            return Ok(self);
        }
        let num_ranks = self.experts.group().size();
        match of_config(config, self.experts.group().nodes())? {
            Some(options) => self.choosing_domains(work(config, num_ranks, &options), options),
            None => Ok(self),
        }
    }

    /// Chooses the domains of the ranks that hold the experts between them by bandwidth, for a layer's exchange of
    /// this `work`, and again while steps go on. The levels of `options` do not count. All ranks call this.
    ///
    /// # Errors
    /// If a rank died, hangs, or made another call.
    pub fn choosing_domains(mut self, work: DomainWork, options: DomainOptions) -> Result<Self, TrainError> {
        let group = self.experts.group();
        if group.size() == 1 {
            return Ok(self);
        }
        let sizes = match Levels::new(group.nodes()).filter(|levels| levels.are_two()) {
            Some(Levels { num_nodes, per_node }) => vec![num_nodes, per_node],
            None => vec![group.size()],
        };
        let rates = self.bandwidths(&sizes)?;
        let levels = sizes.iter().zip(&rates).map(|(&size, &bytes_per_s)| DomainLevel { size, bytes_per_s });
        let tuner = DomainTuner::new(levels.collect(), work);
        let tuning = DomainTuning { tuner, options, num_steps: 0, window: DomainWindow::default() };
        self.experts.set_domain(Some(tuning.domain()))?;
        if self.is_root() {
            tracing::info!("domains of {} ranks, by {}", tuning.text(), text_of_rates(&rates));
        }
        self.domain_tuning = Some(std::sync::Mutex::new(tuning));
        Ok(self)
    }

    /// Chooses domains again after the step of `record`, if a window of steps is over, and adds figures to it. All
    /// ranks call this after the same step.
    pub(crate) fn tune_domains(&self, record: &mut Record) -> Result<(), TrainError> {
        let Some(tuning) = &self.domain_tuning else { return Ok(()) };
        let mut tuning = tuning.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        tuning.num_steps += 1;
        let mut change = None;
        if tuning.num_steps.is_multiple_of(WINDOW) {
            tuning.window = self.agree(self.experts.take_seen_traffic())?;
            let window = tuning.window;
            if tuning.tuner.observe(&window) {
                let sizes: Vec<usize> = tuning.tuner.levels().iter().map(|level| level.size).collect();
                let rates = self.bandwidths(&sizes)?;
                tuning.tuner.set_bandwidth(&rates);
            }
            change = tuning.tuner.decide();
        }
        if let Some(change) = &change {
            self.experts.set_domain(Some(tuning.domain()))?;
            if self.is_root() {
                tracing::info!("step {}: {}", record.step, tuning.text_of(change));
            }
        }
        let named = |(name, value): (&str, f64)| NamedFigure { name: format!("domains/{name}"), value };
        record.metrics.extend(tuning.figures(change.as_ref()).into_iter().map(named));
        Ok(())
    }

    /// Returns the figures of the rank where they are least.
    fn agree(&self, seen: SeenTraffic) -> Result<DomainWindow, TrainError> {
        let unless_unseen = |rate: f64| if rate > 0.0 { rate } else { f64::INFINITY };
        let mut least = [unless_unseen(seen.node_bytes_per_s), unless_unseen(seen.cluster_bytes_per_s), seen.hidden_s];
        self.experts.world().all_reduce(&mut least, Reduce::Min)?;
        let seen = |rate: f64| if rate.is_finite() { rate } else { 0.0 };
        Ok(DomainWindow { node_bytes_per_s: seen(least[0]), cluster_bytes_per_s: seen(least[1]), hidden_s: least[2] })
    }

    /// Measures the bytes a second that a rank sends when all send to all, at each level of the group that holds the
    /// experts; the same on all ranks.
    fn bandwidths(&self, sizes: &[usize]) -> Result<Vec<f64>, TrainError> {
        let group = self.experts.group();
        let (rank, mut rates) = (group.rank(), Vec::with_capacity(sizes.len()));
        for level in 0..sizes.len() {
            let stride: usize = sizes[level + 1..].iter().product();
            let first = rank - rank / stride % sizes[level] * stride;
            let peers = group.split(Some(first as u32), rank)?.expect("a rank with a color is in a group");
            rates.push(bandwidth(&*peers, self.experts.world())?);
        }
        Ok(rates)
    }
}

/// Measures the bytes a second that a rank of `peers` sends when all send to all, on the slowest rank of `world`.
fn bandwidth(peers: &dyn Communicator, world: &dyn Communicator) -> Result<f64, CommError> {
    let [fewest, most] = PROBE_BYTES;
    let num_peers = peers.size() - 1;
    let probe = |bytes: usize| -> Result<f64, CommError> {
        Ok((bytes * num_peers) as f64 / time_all_to_all(peers, world, bytes)?.max(1e-9))
    };
    let rough = probe(fewest)?;
    let bytes = ((rough * PROBE_S) as usize / num_peers.max(1)).clamp(fewest, most);
    if bytes > fewest { probe(bytes) } else { Ok(rough) }
}

fn text_of_rates(rates: &[f64]) -> String {
    let rates: Vec<String> = rates.iter().map(|rate| format!("{:.1} MB/s", rate / 1e6)).collect();
    format!("{} of a rank", rates.join(" between nodes and "))
}

fn text_of_sizes(sizes: &[usize]) -> String {
    let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
    sizes.join(" times ")
}

impl DomainTuning {
    /// Returns the domains that are chosen.
    fn domain(&self) -> DomainOptions {
        let levels = self.tuner.levels().iter().zip(self.tuner.domains());
        let levels = levels.map(|(level, &domain)| LevelDomain { size: level.size, domain }).collect();
        DomainOptions { levels, ..self.options.clone() }
    }

    fn text(&self) -> String {
        text_of_sizes(self.tuner.domains())
    }

    fn rates(&self) -> Vec<f64> {
        self.tuner.levels().iter().map(|level| level.bytes_per_s).collect()
    }

    fn text_of(&self, change: &DomainChange) -> String {
        let [before, after] = change.seconds.map(|seconds| seconds * 1e3);
        format!(
            "domains of {} ranks instead of {}, by {} and {:.2} ms under which experts are gathered: an exchange takes \
             {after:.2} ms instead of {before:.2} ms, by the model",
            text_of_sizes(&change.to),
            text_of_sizes(&change.from),
            text_of_rates(&self.rates()),
            self.window.hidden_s * 1e3,
        )
    }

    /// Returns the figures of a step, by name.
    fn figures(&self, change: Option<&DomainChange>) -> Vec<(&'static str, f64)> {
        let rates = self.rates();
        let [before, after] = change.map_or([0.0; 2], |change| change.seconds);
        vec![
            ("ranks", self.tuner.domains().iter().product::<usize>() as f64),
            ("bytes_per_s", rates[0]),
            ("bytes_per_s_in_node", rates[rates.len() - 1]),
            ("seen_in_node", self.window.node_bytes_per_s),
            ("seen_between_nodes", self.window.cluster_bytes_per_s),
            ("hidden_ms", self.window.hidden_s * 1e3),
            ("foretold_ms_before", before * 1e3),
            ("foretold_ms", after * 1e3),
        ]
    }
}
