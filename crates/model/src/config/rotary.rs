//! The variants of the rotary embedding: which elements are rotated, and frequencies scaled for long contexts.
//!
//! The formulas are those of `modeling_rope_utils.py` in transformers 5.23, which follow the papers named below.

use moeworks_moe::ConfigError;
use moeworks_ops::rope::{RopeLayout, RopeTable, default_frequencies};
use serde::{Deserialize, Serialize};

/// The variant of the rotary embedding; the default is the plain one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rotary {
    /// The number of elements of a head that are rotated, the first ones; even. 0: all.
    pub dim: usize,
    /// True if neighbours rotate together (DeepSeek); otherwise an element pairs with the one half the width after
    /// it.
    pub is_interleaved: bool,
    /// The scaling of frequencies.
    pub scaling: RopeScaling,
}

/// The scaling of rotary frequencies for contexts beyond the original one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    None,
    /// Position interpolation (Chen et al., 2306.15595): all frequencies are divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided, high ones kept, with a smooth transition between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Frequencies with fewer turns than this in the original context are divided.
        low_freq_factor: f64,
        /// Frequencies with more turns than this are kept.
        high_freq_factor: f64,
        /// The context length of the original training.
        original_len: usize,
    },
    /// YaRN (Peng et al., 2309.00071): a ramp from kept to divided frequencies, and an amplitude.
    Yarn {
        /// The divisor.
        factor: f64,
        /// The number of turns in the original context above which frequencies are kept.
        beta_fast: f64,
        /// The number of turns below which frequencies are divided.
        beta_slow: f64,
        /// The context length of the original training.
        original_len: usize,
        /// True if the ends of the ramp are rounded outwards to whole numbers.
        truncate: bool,
        /// The factor of cosines and sines; none: it follows from `factor`, `mscale` and `mscale_all_dim`.
        #[serde(skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// DeepSeek's weight of the amplitude.
        #[serde(skip_serializing_if = "Option::is_none")]
        mscale: Option<f64>,
        /// DeepSeek's weight of the amplitude in attention scores.
        #[serde(skip_serializing_if = "Option::is_none")]
        mscale_all_dim: Option<f64>,
    },
    /// LongRoPE (Ding et al., 2402.13753): one divisor per frequency, and other divisors beyond the original context.
    LongRope {
        /// Divisors up to the original context.
        short_factor: Vec<f64>,
        /// Divisors beyond it.
        long_factor: Vec<f64>,
        /// The factor of cosines and sines up to the original context.
        short_amplitude: f64,
        /// The factor of cosines and sines beyond it.
        long_amplitude: f64,
        /// The context length of the original training.
        original_len: usize,
    },
}

impl Rotary {
    /// Returns true for the plain rotary embedding.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the number of rotated elements of a head of `head_dim`.
    fn rotated(&self, head_dim: usize) -> usize {
        if self.dim == 0 { head_dim } else { self.dim }
    }

    pub(super) fn validate(&self, head_dim: usize) -> Result<(), ConfigError> {
        let dim = self.rotated(head_dim);
        if !dim.is_multiple_of(2) || dim > head_dim {
            let (setting, value) =
                if self.dim == 0 { ("head_dim", head_dim) } else { ("variant.rotary.dim", self.dim) };
            return Err(ConfigError::new(setting, value, "must be even, for the rotary embedding, and within a head"));
        }
        self.scaling.validate(dim / 2)
    }

    /// Builds the table of positions below `max_len` for heads of `head_dim` elements, of which the last `rotary_dim`
    /// may be rotated.
    pub(crate) fn table(&self, head_dim: usize, rotary_dim: usize, theta: f64, max_len: usize) -> RopeTable {
        let (frequencies, amplitude) = self.frequencies(rotary_dim, theta, max_len);
        let layout = RopeLayout { head_dim, start: head_dim - rotary_dim, is_interleaved: self.is_interleaved };
        RopeTable::with_frequencies(layout, &frequencies, amplitude, max_len)
    }

    /// Returns the frequencies and the amplitude for a sequence of `len` tokens.
    fn frequencies(&self, rotary_dim: usize, theta: f64, len: usize) -> (Vec<f64>, f64) {
        let dim = self.rotated(rotary_dim);
        let plain = default_frequencies(dim, theta);
        match &self.scaling {
            RopeScaling::None => (plain, 1.0),
            RopeScaling::Linear { factor } => (plain.iter().map(|f| f / factor).collect(), 1.0),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                let stretch = |frequency: &f64| {
                    let turns = *original_len as f64 * frequency / std::f64::consts::TAU;
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = if turns < *low_freq_factor { 0.0 } else { kept.min(1.0) };
                    frequency * (kept + (1.0 - kept) / factor)
                };
                (plain.iter().map(stretch).collect(), 1.0)
            }
            yarn @ RopeScaling::Yarn { factor, .. } => {
                let (low, high) = yarn.yarn_ramp(dim, theta);
                let stretch = |(i, frequency): (usize, &f64)| {
                    let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    frequency * (divided / factor + (1.0 - divided))
                };
                (plain.iter().enumerate().map(stretch).collect(), yarn.yarn_amplitude())
            }
            RopeScaling::LongRope { short_factor, long_factor, short_amplitude, long_amplitude, original_len } => {
                let (factors, amplitude) =
                    if len > *original_len { (long_factor, long_amplitude) } else { (short_factor, short_amplitude) };
                (plain.iter().zip(factors).map(|(f, factor)| f / factor).collect(), *amplitude)
            }
        }
    }

    /// Returns the length beyond which frequencies change, if they depend on the length.
    pub(crate) fn changes_beyond(&self) -> Option<usize> {
        match &self.scaling {
            RopeScaling::LongRope { original_len, .. } => Some(*original_len),
            _ => None,
        }
    }
}

/// Returns YaRN's amplitude for a scaling by `factor`.
fn yarn_mscale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

impl RopeScaling {
    /// Returns the ends of YaRN's ramp, as indices of frequencies.
    fn yarn_ramp(&self, dim: usize, theta: f64) -> (f64, f64) {
        let Self::Yarn { beta_fast, beta_slow, original_len, truncate, .. } = self else { return (0.0, 1.0) };
        // Inverts `turns = original_len * theta^(-2 i / dim) / (2 pi)` for the index i.
        let at = |turns: f64| {
            dim as f64 * (*original_len as f64 / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
        };
        let (low, high) = (at(*beta_fast), at(*beta_slow));
        let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high { (low, high + 0.001) } else { (low, high) }
    }

    fn yarn_amplitude(&self) -> f64 {
        match *self {
            Self::Yarn { attention_factor: Some(amplitude), .. } => amplitude,
            Self::Yarn { factor, mscale: Some(a), mscale_all_dim: Some(b), .. } if a != 0.0 && b != 0.0 => {
                yarn_mscale(factor, a) / yarn_mscale(factor, b)
            }
            Self::Yarn { factor, .. } => yarn_mscale(factor, 1.0),
            _ => 1.0,
        }
    }

    /// Returns DeepSeek's factor of attention scores under YaRN.
    pub(crate) fn score_factor(&self) -> f64 {
        match *self {
            Self::Yarn { factor, mscale_all_dim: Some(weight), .. } if weight != 0.0 => {
                yarn_mscale(factor, weight).powi(2)
            }
            _ => 1.0,
        }
    }

    fn validate(&self, num_frequencies: usize) -> Result<(), ConfigError> {
        let setting = "variant.rotary.scaling";
        let wrong = |value: String, expected: String| Err(ConfigError::new(setting, value, expected));
        let (numbers, original_len): (Vec<(&str, f64)>, usize) = match self {
            Self::None => (vec![], 1),
            Self::Linear { factor } => (vec![("factor", *factor)], 1),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                if low_freq_factor >= high_freq_factor {
                    let expected = format!("low_freq_factor must be below high_freq_factor, {high_freq_factor}");
                    return wrong(low_freq_factor.to_string(), expected);
                }
                let low = ("low_freq_factor", *low_freq_factor);
                (vec![("factor", *factor), low, ("high_freq_factor", *high_freq_factor)], *original_len)
            }
            Self::Yarn { factor, beta_fast, beta_slow, original_len, attention_factor, .. } => {
                let amplitude = ("attention_factor", attention_factor.unwrap_or(1.0));
                let betas = [("beta_fast", *beta_fast), ("beta_slow", *beta_slow)];
                ([("factor", *factor), betas[0], betas[1], amplitude].to_vec(), *original_len)
            }
            Self::LongRope { short_factor, long_factor, short_amplitude, long_amplitude, original_len } => {
                for factors in [short_factor, long_factor] {
                    if factors.len() != num_frequencies {
                        let found = format!("{} factors", factors.len());
                        return wrong(found, format!("must have one for each of {num_frequencies} frequencies"));
                    }
                }
                let amplitudes = [("attention_factor", *short_amplitude), ("attention_factor", *long_amplitude)];
                let factors = short_factor.iter().chain(long_factor).map(|&factor| ("factor", factor));
                (factors.chain(amplitudes).collect(), *original_len)
            }
        };
        match numbers.into_iter().find(|(_, x)| !(*x > 0.0 && x.is_finite())) {
            Some((name, number)) => wrong(number.to_string(), format!("{name} must be a positive number")),
            None if original_len == 0 => wrong("0".to_owned(), "the original context must be at least 1".to_owned()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "rotary_tests.rs"]
mod tests;
