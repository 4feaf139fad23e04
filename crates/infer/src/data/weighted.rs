//! Paths with a weight, in proportion to which training draws from them.

use std::path::Path;

use super::{DataError, STDIN};

/// A user's path, possibly with a weight, such as `books=0.3`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightedPath<'p> {
    /// The path.
    pub path: &'p str,
    /// Its weight, if it has one.
    pub weight: Option<f64>,
}

impl<'p> WeightedPath<'p> {
    /// Parses a path as given. If the whole text is an existing path it has no weight.
    ///
    /// # Errors
    /// Fails if the weight is not a number above 0.
    pub fn parse(given: &'p str) -> Result<Self, DataError> {
        let whole = Ok(Self { path: given, weight: None });
        if Path::new(given).exists() {
            return whole;
        }
        let Some((path, number)) = given.rsplit_once('=').filter(|(path, _)| !path.is_empty()) else { return whole };
        match number.trim().parse::<f64>() {
            Ok(weight) if weight > 0.0 && weight.is_finite() => Ok(Self { path, weight: Some(weight) }),
            // The text after = is not a weight, but part of a name that does not exist.
            Err(_) if path != STDIN && !Path::new(path).exists() => whole,
            _ => {
                let problem = "its weight, behind the last =, must be a number above 0, such as 0.3".into();
                Err(DataError::Weight { path: given.into(), problem })
            }
        }
    }
}

/// Returns whether a user's path has a weight, valid or not.
pub(super) fn has_weight(given: &str) -> bool {
    !matches!(WeightedPath::parse(given), Ok(WeightedPath { weight: None, .. }))
}

#[cfg(test)]
#[path = "weighted_tests.rs"]
mod tests;
