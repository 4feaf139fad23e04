//! The bundled clusters. Each file cites the sources of its figures.

use super::{Cluster, ClusterError};

impl Cluster {
    /// The names and the TOML texts of the bundled clusters.
    pub const NAMES: [(&str, &str); 8] = [
        ("a100-ndm-v4", include_str!("../../clusters/a100-ndm-v4.toml")),
        ("h100", include_str!("../../clusters/h100.toml")),
        ("h800", include_str!("../../clusters/h800.toml")),
        ("gb200", include_str!("../../clusters/gb200.toml")),
        ("tpu-v3", include_str!("../../clusters/tpu-v3.toml")),
        ("two-sites", include_str!("../../clusters/two-sites.toml")),
        ("1000-datacentres", include_str!("../../clusters/1000-datacentres.toml")),
        ("optical", include_str!("../../clusters/optical.toml")),
    ];

    /// Returns the bundled cluster of a name.
    ///
    /// ```
    /// let h100 = moeworks_plan::Cluster::named("h100")?;
    /// assert_eq!(h100.level_between(0, 7), Some(0)); // NVLink
    /// assert_eq!(h100.level_between(7, 8), Some(1)); // InfiniBand
    /// # Ok::<(), moeworks_plan::ClusterError>(())
    /// ```
    pub fn named(name: &str) -> Result<Self, ClusterError> {
        let found = Self::NAMES.into_iter().find(|(of, _)| *of == name);
        let (_, text) = found.ok_or_else(|| ClusterError::Unknown { name: name.chars().take(60).collect() })?;
        Self::parse(text)
    }

    /// Returns the line of the file that says what the cluster is: the first comment.
    #[must_use]
    pub fn summary(text: &str) -> &str {
        text.lines().next().unwrap_or_default().trim_start_matches(['#', ' '])
    }
}
