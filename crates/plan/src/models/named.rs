//! The bundled models. Each file cites the sources of its figures.

use super::{Model, ModelError};

impl Model {
    /// The names and the TOML texts of the bundled models.
    pub const NAMES: [(&str, &str); 7] = [
        ("switch-c", include_str!("../../models/switch-c.toml")),
        ("meta-1.1t", include_str!("../../models/meta-1.1t.toml")),
        ("gshard-600b", include_str!("../../models/gshard-600b.toml")),
        ("deepseek-v3", include_str!("../../models/deepseek-v3.toml")),
        ("qwen3-235b", include_str!("../../models/qwen3-235b.toml")),
        ("mixtral-8x22b", include_str!("../../models/mixtral-8x22b.toml")),
        ("swinv2-moe-3b", include_str!("../../models/swinv2-moe-3b.toml")),
    ];

    /// Returns the bundled model of a name.
    ///
    /// ```
    /// let model = moeworks_plan::Model::named("deepseek-v3")?;
    /// assert_eq!((model.params() as f64 / 1e7).round() / 100.0, 671.03); // billions
    /// # Ok::<(), moeworks_plan::ModelError>(())
    /// ```
    pub fn named(name: &str) -> Result<Self, ModelError> {
        let found = Self::NAMES.into_iter().find(|(of, _)| *of == name);
        let (_, text) = found.ok_or_else(|| ModelError::Unknown { name: name.chars().take(60).collect() })?;
        Self::parse(text)
    }
}
