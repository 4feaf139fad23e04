//! The table of routing schemes. A new scheme is a file in this folder and a line at the end of this one.

use serde::{Deserialize, Serialize};

use super::scheme::{RoutingScheme, SchemeDoc};

/// Expands each line `Type: file` to the module, the variant of [`RouterKind`] and the field of [`Schemes`]. The
/// first line is the default.
macro_rules! schemes {
    ($($kind:ident: $module:ident,)*) => {
        $(mod $module;)*

        /// A routing scheme's name. `docs/routing-schemes.md` describes each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum RouterKind {
            $(#[doc = concat!("The scheme of `schemes/", stringify!($module), ".rs`.")] $kind,)*
        }

        impl RouterKind {
            /// All schemes, in the order of the table.
            pub const ALL: &'static [Self] = &[$(Self::$kind,)*];

            /// Returns the name in configurations.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => stringify!($module),)*
                }
            }
        }

        /// The schemes' own settings, of chosen and other schemes alike. In files they stand in the router's section.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Schemes {
            $(
                #[doc = concat!("The settings of `", stringify!($module), "`.")]
                #[serde(flatten)]
                pub $module: $module::$kind,
            )*
        }

        impl Schemes {
            /// Returns the scheme of `kind`.
            pub(crate) fn get(&self, kind: RouterKind) -> &dyn RoutingScheme {
                match kind {
                    $(RouterKind::$kind => &self.$module,)*
                }
            }
        }
    };
}

impl Default for RouterKind {
    fn default() -> Self {
        Self::ALL[0]
    }
}

impl RouterKind {
    /// Returns the documentation of the scheme.
    #[must_use]
    pub fn doc(self) -> &'static SchemeDoc {
        Schemes::default().get(self).doc()
    }

    /// Returns the K that the scheme requires; none if any works.
    #[must_use]
    pub fn fixed_top_k(self) -> Option<usize> {
        Schemes::default().get(self).fixed_top_k()
    }
}

pub use gshard::SecondExpert;
pub use hash::{HashTable, balanced_hash};

schemes! {
    TopK: top_k,
    Switch: switch,
    NoisyTopK: noisy_top_k,
    Gshard: gshard,
    Cosine: cosine,
    Gumbel: gumbel,
    ExpertChoice: expert_choice,
    Base: base,
    Sinkhorn: sinkhorn,
    Hash: hash,
    TopP: top_p,
    Relu: relu,
    Hierarchical: hierarchical,
    LowRank: low_rank,
    DenseToSparse: dense_to_sparse,
    Forced: forced,
}
