//! A number that changes over a run, such as a loss coefficient or a temperature.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The interpolation between a ramp's two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RampShape {
    /// Linear.
    Linear,
    /// Half a cosine.
    Cosine,
    /// Geometric: equal factors per step. Both values must be positive.
    Exponential,
    /// The first value throughout, then at once the second.
    Step,
}

/// A number that moves from one value to another over a share of a run and then stays.
///
/// A constant is written as a number. A ramp is written as text, `"linear 0.01 to 0.001 over 0.5"`: the shape
/// (linear, cosine, exponential, step), the two values, and the share of the run's steps (1 if omitted).
///
/// ```
/// use moeworks_moe::Ramp;
///
/// let ramp: Ramp = "linear 0.5 to 0.1 over 0.5".parse().unwrap();
/// assert_eq!([ramp.at(0.0), ramp.at(0.25), ramp.at(0.5), ramp.at(1.0)], [0.5, 0.3, 0.1, 0.1]);
/// assert_eq!("0.25".parse(), Ok(Ramp::constant(0.25)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ramp {
    /// The value at the beginning.
    pub start: f64,
    /// The value after `share` of the run.
    pub end: f64,
    /// The share of the run over which the value moves: above 0 and at most 1.
    pub share: f64,
    /// The interpolation.
    pub shape: RampShape,
}

impl Ramp {
    /// The constant 0.
    pub const ZERO: Self = Self::constant(0.0);

    /// Creates a ramp that does not change.
    #[must_use]
    pub const fn constant(value: f64) -> Self {
        Self { start: value, end: value, share: 1.0, shape: RampShape::Linear }
    }

    /// Returns whether the value never changes.
    #[must_use]
    pub fn is_constant(&self) -> bool {
        self.start.to_bits() == self.end.to_bits()
    }

    /// Returns whether it is `value` throughout.
    #[must_use]
    pub fn is(&self, value: f64) -> bool {
        (self.start, self.end) == (value, value)
    }

    /// Returns the value at `progress`, 0 to 1, of the run.
    #[must_use]
    pub fn at(&self, progress: f64) -> f64 {
        if self.is_constant() || progress >= self.share {
            return self.end;
        }
        let t = (progress / self.share).max(0.0);
        match self.shape {
            RampShape::Linear => self.start + t * (self.end - self.start),
            RampShape::Cosine => self.end + 0.5 * (1.0 + (std::f64::consts::PI * t).cos()) * (self.start - self.end),
            RampShape::Exponential => self.start * (self.end / self.start).powf(t),
            RampShape::Step => self.start,
        }
    }

    /// Returns the smallest and the largest value.
    #[must_use]
    pub fn range(&self) -> (f64, f64) {
        (self.start.min(self.end), self.start.max(self.end))
    }
}

impl fmt::Display for Ramp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_constant() {
            return write!(f, "{}", self.end);
        }
        let shape = match self.shape {
            RampShape::Linear => "linear",
            RampShape::Cosine => "cosine",
            RampShape::Exponential => "exponential",
            RampShape::Step => "step",
        };
        write!(f, "{shape} {} to {} over {}", self.start, self.end, self.share)
    }
}

/// Converts through the printed decimal, so that `0.1_f32` becomes `0.1_f64`.
impl From<f32> for Ramp {
    fn from(value: f32) -> Self {
        Self::constant(value.to_string().parse().unwrap_or(f64::from(value)))
    }
}

/// The error of a text that is not a [`Ramp`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a number or a ramp such as \"linear 0.01 to 0.001 over 0.5\" (or cosine, exponential, step)")]
pub struct RampError;

impl FromStr for Ramp {
    type Err = RampError;

    fn from_str(text: &str) -> Result<Self, RampError> {
        let number = |word: &str| word.parse().ok().filter(|x: &f64| x.is_finite()).ok_or(RampError);
        let words: Vec<&str> = text.split_whitespace().collect();
        let (shape, start, end, share) = match words[..] {
            [value] => return Ok(Self::constant(number(value)?)),
            [shape, start, "to", end] => (shape, start, end, "1"),
            [shape, start, "to", end, "over", share] => (shape, start, end, share),
            _ => return Err(RampError),
        };
        let shape = match shape {
            "linear" => RampShape::Linear,
            "cosine" => RampShape::Cosine,
            "exponential" => RampShape::Exponential,
            "step" => RampShape::Step,
            _ => return Err(RampError),
        };
        let ramp = Self { start: number(start)?, end: number(end)?, share: number(share)?, shape };
        let is_way = shape != RampShape::Exponential || ramp.range().0 > 0.0;
        if ramp.share > 0.0 && ramp.share <= 1.0 && is_way { Ok(ramp) } else { Err(RampError) }
    }
}

impl Serialize for Ramp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_constant() { serializer.serialize_f64(self.end) } else { serializer.collect_str(self) }
    }
}

impl<'de> Deserialize<'de> for Ramp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Text(String),
        }
        match Written::deserialize(deserializer).map_err(|_| de::Error::custom(RampError))? {
            Written::Number(value) if value.is_finite() => Ok(Self::constant(value)),
            Written::Number(_) => Err(de::Error::custom(RampError)),
            Written::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}
