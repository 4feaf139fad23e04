//! The settings of domains of ranks.

use std::fmt;

use moeworks_moe::{DomainBase, Range, Ranged};
use serde::{Deserialize, Serialize};

/// The sizes of domains; written as a number, or as a text with a number for each level, such as `"2,4"`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct DomainChoice(Vec<usize>);

/// A setting as it is written.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "must be a number, or two such as \"2,4\"")]
enum Written {
    Number(i64),
    Text(String),
}

impl DomainChoice {
    /// Makes domains of `size` consecutive ranks; 0: chosen by bandwidth.
    #[must_use]
    pub fn of(size: usize) -> Self {
        Self(vec![size])
    }

    /// Returns the size at each level, the outermost first.
    #[must_use]
    pub fn sizes(&self) -> &[usize] {
        &self.0
    }

    /// Returns whether the sizes are chosen by bandwidth.
    #[must_use]
    pub fn is_auto(&self) -> bool {
        self.0 == [0]
    }

    /// Returns the number of ranks of a domain; 1 without domains.
    #[must_use]
    pub fn num_members(&self) -> usize {
        self.0.iter().fold(1, |product, size| product.saturating_mul(*size))
    }
}

impl Default for DomainChoice {
    /// Returns no domains.
    fn default() -> Self {
        Self::of(1)
    }
}

impl TryFrom<Written> for DomainChoice {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let text = match written {
            Written::Number(number) => number.to_string(),
            Written::Text(text) => text,
        };
        let sizes = text.split(',').map(|size| size.trim().parse().ok()).collect::<Option<Vec<usize>>>();
        let is_valid = |sizes: &Vec<usize>| sizes.len() == 1 || sizes.len() == 2 && !sizes.contains(&0);
        let right = "must be a number of ranks, or of nodes and of ranks of a node such as \"2,4\"";
        sizes.filter(is_valid).map(Self).ok_or_else(|| right.to_owned())
    }
}

impl From<DomainChoice> for Written {
    fn from(choice: DomainChoice) -> Self {
        match choice.0[..] {
            [size] => Self::Number(size as i64),
            _ => Self::Text(choice.to_string().trim_matches('"').to_owned()),
        }
    }
}

impl fmt::Display for DomainChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        match &sizes[..] {
            [size] => f.write_str(size),
            sizes => write!(f, "\"{}\"", sizes.join(",")),
        }
    }
}

impl Ranged for DomainChoice {
    fn is_in(&self, range: &Range) -> bool {
        self.0.iter().all(|size| size.is_in(range))
    }
}

/// The base of which compressed experts are the differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DomainBaseChoice {
    /// The experts as the other ranks have them.
    Last,
    /// The mean expert of the domain.
    Mean,
}

impl From<DomainBaseChoice> for DomainBase {
    fn from(choice: DomainBaseChoice) -> Self {
        match choice {
            DomainBaseChoice::Last => Self::Last,
            DomainBaseChoice::Mean => Self::Mean,
        }
    }
}
