//! Switch routing: the single expert with the highest probability.

use serde::{Deserialize, Serialize};

use crate::router::scheme::{BenchChange, FusedOps, RoutingScheme, SchemeDoc};

static DOC: SchemeDoc = SchemeDoc {
    // The probability is the weight; capacity factor 1.25 and jitter 0.01 are the paper's.
    companions: &[
        ("model.top_k", "1"),
        ("model.normalize_weights", "false"),
        ("model.capacity_factor", "1.25"),
        ("model.jitter", "0.01"),
    ],
    bench: Some(BenchChange { label: ", input jitter 0.01", apply: |config| config.jitter = 0.01.into() }),
    ..SchemeDoc::new(
        "Each token takes the one expert with the highest probability and weighs it by that; K is 1. The router's input gets a \
         little noise in training, and tokens above an expert's capacity are dropped.",
        "Fedus et al., \"Switch Transformers\", 2101.03961, section 2",
    )
};

/// No settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Switch {}

impl RoutingScheme for Switch {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn fixed_top_k(&self) -> Option<usize> {
        Some(1)
    }

    fn is_plain_when_trained(&self) -> bool {
        true
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }
}
