//! The exchange of tokens, from the settings and the measured links.

use std::fs;
use std::path::Path;

use moeworks_comm::Communicator;
use moeworks_plan::cost::collectives::{Rows, fastest_path};
use moeworks_plan::{Algorithm, Exchange, Group, Link, Links, Moving, Topology};

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
