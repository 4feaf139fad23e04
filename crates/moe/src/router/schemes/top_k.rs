//! Plain top-k routing.

use serde::{Deserialize, Serialize};

use crate::router::scheme::{FusedOps, RouterOption, RoutingScheme, SchemeDoc};

static DOC: SchemeDoc = SchemeDoc::new(
    "Each token takes the K experts with the highest scores and weighs them by these. Scores are a softmax or sigmoids \
     (`router.scores`) of a linear map of the token; `router.expert_bias`, groups, noise and all other options of routers can \
     be combined with it.",
    "Shazeer et al., 1701.06538; DeepSeek-V3, 2412.19437, section 2.1.2",
);

/// No settings of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TopK {}

impl RoutingScheme for TopK {
    fn doc(&self) -> &'static SchemeDoc {
        &DOC
    }

    fn allows(&self, _: RouterOption) -> bool {
        true
    }

    fn is_plain_when_trained(&self) -> bool {
        true
    }

    fn fused_ops(&self) -> FusedOps {
        FusedOps::Softmax
    }
}
