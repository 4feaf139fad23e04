//! The error of a text that is no cluster.

/// The error of an invalid description of a cluster: the problem, its place and the right value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The text is not TOML, or a field is missing or unknown.
    #[error("{0}")]
    Form(String),
    /// A value out of range.
    #[error("{field} = {value}: {expected}")]
    Value {
        /// The field, such as `level 2 (rack): rails`.
        field: String,
        /// The value.
        value: String,
        /// The expected range.
        expected: String,
    },
    /// A name that no bundled cluster has.
    #[error("unknown cluster {name:?}: expected one of {known}, or a file", known = super::Cluster::NAMES.map(|(name, _)| name).join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
    /// A cluster with more levels than a topology has.
    #[error("cluster {name} has {levels} levels: a topology has two, that of a node and that between nodes")]
    Levels {
        /// The name of the cluster.
        name: String,
        /// The number of its levels.
        levels: usize,
    },
}
