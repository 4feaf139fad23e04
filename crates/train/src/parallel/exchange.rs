//! The exchange of tokens, from the settings and the measured links.

use std::fs;
use std::path::Path;
use std::time::Instant;

use moeworks_comm::{Communicator, Reduce};
use moeworks_moe::DomainOptions;
use moeworks_plan::cost::collectives::{Rows, fastest_path};
use moeworks_plan::{
    Algorithm, DomainLevel, DomainWork, Exchange, Group, Link, Links, Moving, Topology, choose_domains,
};

use crate::config::{MovingChoice, PathChoice, RunConfig};
use crate::error::TrainError;

/// The algorithms by index, for the root's broadcast.
const PATHS: [Algorithm; 3] = [Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop];

/// Creates the exchange of `config`. With `auto` the root chooses the algorithm of the least cost. All ranks call
/// this.
pub(super) fn of_config(comm: &dyn Communicator, config: &RunConfig) -> Result<Exchange, TrainError> {
    let parallel = &config.parallel;
    let algorithm = match parallel.all_to_all {
        PathChoice::Linear => Algorithm::Linear,
        PathChoice::Hierarchical => Algorithm::Hierarchical,
        PathChoice::TwoHop => Algorithm::TwoHop,
        PathChoice::Auto => {
            let mut chosen = [0_u32];
            if comm.rank() == 0 {
                let fastest = by_cost(comm, config)?;
                chosen[0] = PATHS.iter().position(|&path| path == fastest).unwrap_or(0) as u32;
            }
            comm.broadcast(&mut chosen, 0)?;
            PATHS.get(chosen[0] as usize).copied().unwrap_or_default()
        }
    };
    Ok(Exchange { algorithm, chunks: parallel.chunks, wire: parallel.wire.wire() })
}

/// Returns the rule of moving tokens or experts, with the link costs that the root knows. All ranks call this.
pub(super) fn moving(comm: &dyn Communicator, config: &RunConfig) -> Result<Moving, TrainError> {
    match config.parallel.moving {
        MovingChoice::Tokens => return Ok(Moving::Tokens),
        MovingChoice::Weights => return Ok(Moving::Weights),
        MovingChoice::Auto => {}
    }
    let mut rates = [0.0; 5];
    if comm.rank() == 0 {
        let Topology { node_link: node, cluster_link: cluster, rank, .. } = topology(config)?;
        rates = [node.latency_s, node.bytes_per_s, cluster.latency_s, cluster.bytes_per_s, rank.flops];
    }
    comm.broadcast(&mut rates, 0)?;
    let link = |at: usize| Link { latency_s: rates[at], bytes_per_s: rates[at + 1] };
    Ok(Moving::Cheapest { links: Links { node: link(0), cluster: link(2) }, flops: rates[4] })
}

/// Bytes that each rank sends each other one to measure links.
const PROBE_BYTES: usize = 1 << 18;
/// The number of measurements, of which the fastest counts.
const NUM_PROBES: usize = 3;

/// Returns the domains of the ranks that hold the experts between them; none if each rank computes its experts alone.
/// All ranks call this.
pub(super) fn domain(comm: &dyn Communicator, config: &RunConfig) -> Result<Option<DomainOptions>, TrainError> {
    let parallel = &config.parallel;
    let size = match parallel.domain {
        0 if comm.size() > 1 && config.model.num_experts > 0 => measured_domain(comm, config)?,
        size => size,
    };
    Ok((size > 1).then_some(DomainOptions { size, keep: parallel.domain_keep }))
}

/// Chooses the size of domains that takes the least time by the measured bandwidth of a rank.
fn measured_domain(comm: &dyn Communicator, config: &RunConfig) -> Result<usize, TrainError> {
    let bytes_per_s = bandwidth(comm)?;
    let (parallel, model) = (&config.parallel, &config.model);
    let num_ranks = parallel.layout().num_expert_ranks();
    let moe = model.moe();
    let params = (moe.activation.num_inputs() + 1) * moe.width * moe.expert_width;
    let tokens = config.train.batch_size.div_ceil(comm.size()) * config.train.seq_len;
    let sent = model.top_k.min(num_ranks) as f64 * parallel.wire.wire().row_bytes(model.width) as f64;
    let work = DomainWork {
        data_bytes: tokens as f64 * sent,
        expert_bytes: (size_of::<f32>() * params) as f64 * model.num_experts as f64 / num_ranks as f64
            * (2.0 * parallel.domain_keep).min(1.0),
        hidden_s: 0.0,
    };
    let chosen = choose_domains(&[DomainLevel { size: num_ranks, bytes_per_s }], &work);
    let size = chosen.first().copied().unwrap_or(1);
    if comm.rank() == 0 {
        tracing::info!("domains of {size} of {num_ranks} ranks, by {:.0} MB/s of a rank", bytes_per_s / 1e6);
    }
    Ok(size)
}

/// Measures the bytes a second that a rank sends when all send to all; the same on all ranks.
fn bandwidth(comm: &dyn Communicator) -> Result<f64, TrainError> {
    let sent = vec![0_u8; PROBE_BYTES * comm.size()];
    let (mut received, mut least) = (sent.clone(), f64::INFINITY);
    for _ in 0..NUM_PROBES {
        comm.barrier()?;
        let start = Instant::now();
        comm.all_to_all(&sent, &mut received)?;
        let mut seconds = [start.elapsed().as_secs_f64()];
        comm.all_reduce(&mut seconds, Reduce::Max)?;
        least = least.min(seconds[0]);
    }
    Ok((PROBE_BYTES * (comm.size() - 1)) as f64 / least.max(1e-9))
}

fn by_cost(comm: &dyn Communicator, config: &RunConfig) -> Result<Algorithm, TrainError> {
    let layout = config.parallel.layout();
    let nodes = comm.nodes();
    let num_nodes = nodes.iter().max().map_or(0, |last| last + 1);
    let mut in_node = vec![0; num_nodes];
    layout.ep_group(0).into_iter().for_each(|rank| in_node[nodes[rank]] += 1);
    let group = Group { ranks: layout.ep, per_node: in_node.into_iter().max().unwrap_or(1).max(1) };
    let rows = Rows {
        tokens: config.train.batch_size.div_ceil(comm.size()) * config.train.seq_len,
        top_k: config.model.top_k,
        num_experts: config.model.num_experts,
        row_bytes: config.parallel.wire.wire().row_bytes(config.model.width),
    };
    Ok(fastest_path(&topology(config)?, group, &rows))
}

/// Returns the topology for costs: that of the file, or else an example cluster.
fn topology(config: &RunConfig) -> Result<Topology, TrainError> {
    Ok(measured(&config.parallel.topology)?.unwrap_or_else(|| Topology::example_cluster(1)))
}

/// Reads the topology of the file; none if there is no file.
fn measured(path: &Path) -> Result<Option<Topology>, TrainError> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(TrainError::io(path))?,
    };
    let wrong = |error: moeworks_plan::TopologyError| {
        let problem = error.to_string().lines().collect::<Vec<_>>().join(" ");
        TrainError::State { path: path.to_owned(), problem }
    };
    Topology::parse(&text).map(Some).map_err(wrong)
}
