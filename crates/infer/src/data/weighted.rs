//! Paths with a weight, from which training draws in proportion.

use std::path::Path;

use super::{DataError, STDIN};

/// A path of the user's, perhaps with a weight, such as `books=0.3`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightedPath<'p> {
    /// The path.
    pub path: &'p str,
    /// Its weight, if it has one.
    pub weight: Option<f64>,
}

impl<'p> WeightedPath<'p> {
    /// Reads a path as it is given. One that exists as it is has no weight.
    ///
    /// # Errors
    /// If its weight is no number above 0.
    pub fn parse(given: &'p str) -> Result<Self, DataError> {
        let whole = Ok(Self { path: given, weight: None });
        if Path::new(given).exists() {
            return whole;
        }
        let Some((path, number)) = given.rsplit_once('=').filter(|(path, _)| !path.is_empty()) else { return whole };
        match number.trim().parse::<f64>() {
            Ok(weight) if weight > 0.0 && weight.is_finite() => Ok(Self { path, weight: Some(weight) }),
            // Not a weight, but a part of a name that does not exist.
            Err(_) if path != STDIN && !Path::new(path).exists() => whole,
            _ => {
                let problem = "its weight, behind the last =, must be a number above 0, such as 0.3".into();
                Err(DataError::Weight { path: given.into(), problem })
            }
        }
    }
}

/// Whether a path of the user's has a weight, be it a wrong one.
pub(super) fn has_weight(given: &str) -> bool {
    !matches!(WeightedPath::parse(given), Ok(WeightedPath { weight: None, .. }))
}

#[cfg(test)]
#[path = "weighted_tests.rs"]
mod tests;
