//! Settings as a table: the definition of a section holds each setting's name, type, default, range and comment.
//!
//! The macro [`settings!`](macro@crate::settings) expands a definition to the struct, its `Default`, and the rows
//! ([`Setting`]) from which the commented configuration file, the checks and `docs/settings.md` are made:
//!
//! ```
//! use moeworks_moe::{Range, Section, settings};
//!
//! settings! {
//!     /// The optimizer.
//!     #[serde(default)]
//!     pub struct Optimizer in "optimizer." {
//!         /// AdamW beta1: decay of the first moment.
//!         ///
//!         /// Text after an empty line is for readers of the code; the file shows the lines before it.
//!         beta1: f64 = 0.9, in Range::BELOW_ONE;
//!         /// Steps of the linear warm-up.
//!         warmup_steps: u64 = 25, in Range::COUNT;
//!         /// Whether norms have weight decay, too.
//!         decays_norms: bool = false;
//!     }
//! }
//!
//! assert_eq!(Optimizer::default().beta1, 0.9);
//! assert_eq!(Optimizer::SETTINGS[0].comment(), "AdamW beta1: decay of the first moment.");
//! let wrong = Optimizer { beta1: 1.0, ..Optimizer::default() };
//! assert_eq!(wrong.check_ranges().unwrap_err().to_string(), "optimizer.beta1 = 1: must be at least 0 and below 1");
//! ```

use std::fmt;
use std::ops::Bound::{self, Excluded, Included, Unbounded};
use std::ops::RangeInclusive;

use crate::{ConfigError, Ramp};

/// The largest whole number of a configuration file, because TOML's integers are signed.
const MAX_WHOLE: u64 = i64::MAX as u64;

/// The values that a setting may have, independent of other settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Range {
    /// Every value of its type: text, a choice, true or false.
    Any,
    /// Whole numbers between two inclusive bounds.
    Whole {
        /// The least.
        least: u64,
        /// The greatest.
        most: u64,
    },
    /// Numbers between two bounds.
    Number {
        /// The lower bound.
        low: Bound<f64>,
        /// The upper bound.
        high: Bound<f64>,
    },
}

impl Range {
    /// Whole numbers from 0.
    pub const COUNT: Self = Self::whole(0..=MAX_WHOLE);
    /// Whole numbers from 1.
    pub const AT_LEAST_ONE: Self = Self::whole(1..=MAX_WHOLE);
    /// Finite numbers.
    pub const FINITE: Self = Self::Number { low: Unbounded, high: Unbounded };
    /// Numbers of at least 0.
    pub const NOT_NEGATIVE: Self = Self::Number { low: Included(0.0), high: Unbounded };
    /// Numbers above 0.
    pub const POSITIVE: Self = Self::Number { low: Excluded(0.0), high: Unbounded };
    /// Numbers from 0 to 1.
    pub const SHARE: Self = Self::Number { low: Included(0.0), high: Included(1.0) };
    /// Numbers above 0 and at most 1.
    pub const POSITIVE_SHARE: Self = Self::Number { low: Excluded(0.0), high: Included(1.0) };
    /// Numbers of at least 0 and below 1.
    pub const BELOW_ONE: Self = Self::Number { low: Included(0.0), high: Excluded(1.0) };

    /// Creates a range of whole numbers between two bounds.
    #[must_use]
    pub const fn whole(values: RangeInclusive<u64>) -> Self {
        Self::Whole { least: *values.start(), most: *values.end() }
    }

    /// Creates a range of numbers between two inclusive bounds.
    #[must_use]
    pub const fn number(values: RangeInclusive<f64>) -> Self {
        Self::Number { low: Included(*values.start()), high: Included(*values.end()) }
    }

    /// Creates a range of numbers of at least `least`.
    #[must_use]
    pub const fn at_least(least: f64) -> Self {
        Self::Number { low: Included(least), high: Unbounded }
    }

    fn contains_whole(&self, value: u64) -> bool {
        matches!(self, Self::Whole { least, most } if (*least..=*most).contains(&value))
    }

    fn contains(&self, value: f64) -> bool {
        let Self::Number { low, high } = *self else { return false };
        value.is_finite() && std::ops::RangeBounds::contains(&(low, high), &value)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Any => f.write_str("any"),
            Self::Whole { least, most: MAX_WHOLE } => write!(f, "at least {least}"),
            Self::Whole { least, most } => write!(f, "from {least} to {most}"),
            Self::Number { low: Unbounded, high: Unbounded } => f.write_str("a finite number"),
            Self::Number { low: Included(low), high: Unbounded } => write!(f, "a number of at least {low}"),
            Self::Number { low: Excluded(low), high: Unbounded } => write!(f, "a number above {low}"),
            Self::Number { low: Included(low), high: Included(high) } => write!(f, "a number from {low} to {high}"),
            Self::Number { low, high } => {
                let low = match low {
                    Included(low) => format!("at least {low}"),
                    Excluded(low) => format!("above {low}"),
                    Unbounded => "finite".into(),
                };
                match high {
                    Included(high) => write!(f, "{low} and at most {high}"),
                    Excluded(high) => write!(f, "{low} and below {high}"),
                    Unbounded => f.write_str(&low),
                }
            }
        }
    }
}

/// A numeric type of settings.
pub trait Ranged: fmt::Display {
    /// True if the setting may also be the text of a ramp.
    const IS_RAMP: bool = false;

    /// Returns whether the value is in `range`.
    fn is_in(&self, range: &Range) -> bool;

    /// Checks the value of `setting`.
    ///
    /// # Errors
    /// If it is out of `range`.
    fn check(&self, setting: &'static str, range: &Range) -> Result<(), ConfigError> {
        if self.is_in(range) { Ok(()) } else { Err(ConfigError::new(setting, self, format!("must be {range}"))) }
    }
}

impl Ranged for u8 {
    fn is_in(&self, range: &Range) -> bool {
        range.contains_whole(u64::from(*self))
    }
}

impl Ranged for u64 {
    fn is_in(&self, range: &Range) -> bool {
        range.contains_whole(*self)
    }
}

impl Ranged for usize {
    fn is_in(&self, range: &Range) -> bool {
        range.contains_whole(*self as u64)
    }
}

impl Ranged for f32 {
    fn is_in(&self, range: &Range) -> bool {
        range.contains(f64::from(*self))
    }
}

impl Ranged for f64 {
    fn is_in(&self, range: &Range) -> bool {
        range.contains(*self)
    }
}

impl Ranged for Ramp {
    const IS_RAMP: bool = true;

    fn is_in(&self, range: &Range) -> bool {
        range.contains(self.start) && range.contains(self.end)
    }
}

/// A row of the table of settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// The dotted name within the configuration of the crate that defines the setting.
    pub name: &'static str,
    /// The lines of its documentation.
    doc: &'static [&'static str],
    /// The valid values.
    pub range: Range,
    /// True if the setting may also be the text of a [`Ramp`].
    pub is_ramp: bool,
    /// The former name, which is still read.
    pub old_name: Option<&'static str>,
}

impl Setting {
    /// Creates a setting without a range.
    #[must_use]
    pub const fn new(name: &'static str, doc: &'static [&'static str]) -> Self {
        Self { name, doc, range: Range::Any, is_ramp: false, old_name: None }
    }

    /// Sets the range of a setting of type `T`.
    #[must_use]
    pub const fn in_range<T: Ranged>(self, range: Range) -> Self {
        Self { range, is_ramp: T::IS_RAMP, ..self }
    }

    /// Sets the former name of a setting.
    #[must_use]
    pub const fn was(self, old_name: &'static str) -> Self {
        Self { old_name: Some(old_name), ..self }
    }

    /// Returns the comment for a configuration file: the documentation up to its first empty line.
    #[must_use]
    pub fn comment(&self) -> String {
        comment(self.doc)
    }
}

/// Joins the lines of the first paragraph of documentation.
fn comment(doc: &[&str]) -> String {
    let lines: Vec<&str> = doc.iter().map(|line| line.trim()).take_while(|line| !line.is_empty()).collect();
    lines.join("\n")
}

/// A section of a configuration: a struct whose fields are settings. [`settings!`](macro@crate::settings) implements
/// this trait.
pub trait Section {
    /// The lines of its documentation.
    const DOC: &'static [&'static str];
    /// Its settings, in the order in which they are printed.
    const SETTINGS: &'static [Setting];

    /// The comment in a configuration file.
    #[must_use]
    fn comment() -> String {
        comment(Self::DOC)
    }

    /// Checks the range of every setting.
    ///
    /// # Errors
    /// For the first setting out of its range.
    fn check_ranges(&self) -> Result<(), ConfigError>;
}

/// Defines a section of settings: its struct, defaults and rows. The head of `settings.rs` has an example. Fields
/// that are not settings themselves, such as nested sections, come in a block `besides`.
#[macro_export]
macro_rules! settings {
    (
        $(#[doc = $section_doc:literal])+
        $(#[serde($($section_serde:tt)*)])*
        pub struct $section:ident in $prefix:literal {
            $(
                $(#[doc = $doc:literal])+
                $(#[serde($($serde:tt)*)])*
                $field:ident: $type:ty = $default:expr $(, in $range:expr)? $(, was $was:literal)?;
            )*
        }
        $(besides {
            $(
                $(#[$more_meta:meta])*
                $more:ident: $more_type:ty;
            )*
        })?
    ) => {
        $(#[doc = $section_doc])+
        #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        $(#[serde($($section_serde)*)])*
        pub struct $section {
            $(
                $(#[doc = $doc])+
                $(#[serde($($serde)*)])*
                $(#[serde(alias = $was)])?
                pub $field: $type,
            )*
            $($(
                $(#[$more_meta])*
                pub $more: $more_type,
            )*)?
        }

        impl ::core::default::Default for $section {
            fn default() -> Self {
                Self {
                    $($field: $default,)*
                    $($($more: ::core::default::Default::default(),)*)?
                }
            }
        }

        impl $crate::Section for $section {
            const DOC: &'static [&'static str] = &[$($section_doc),+];
            const SETTINGS: &'static [$crate::Setting] = &[$(
                $crate::Setting::new(concat!($prefix, stringify!($field)), &[$($doc),+])
                    $(.in_range::<$type>($range))?
                    $(.was(concat!($prefix, $was)))?,
            )*];

            fn check_ranges(&self) -> ::core::result::Result<(), $crate::ConfigError> {
                $($(
                    $crate::Ranged::check(&self.$field, concat!($prefix, stringify!($field)), &$range)?;
                )?)*
                Ok(())
            }
        }
    };
}
