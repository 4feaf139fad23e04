//! The placements of a model's layers: one for all, or one for each.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::{Placement, PlacementError};

/// The most ranks, experts and layers that a text may name.
const MAX_SIZE: usize = 1 << 20;

/// The placements of a model's MoE layers: one for all of them, or one for each. All have the same numbers of experts
/// and ranks.
///
/// The text form of one placement for all layers is that of a [`Placement`]. Otherwise each layer has a section after
/// the line with the sizes. A layer's number is its position in the model, from 0, counting dense layers, as in
/// `model.layers.3`:
///
/// ```
/// use moeworks_plan::{Placement, Placements};
///
/// let text = "placement experts=2 ranks=2\nlayer 0:\n0: 0\n1: 1\nlayer 3:\n0: *\n1: 0\n";
/// let placements: Placements = text.parse().unwrap();
/// assert_eq!(placements.layer(0), Some(&Placement::sharded(2, 2)));
/// assert_eq!(placements.layer(1), None);
/// assert_eq!(placements.to_string(), text);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placements {
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// One placement for all layers.
    Same(Placement),
    /// One placement for each layer that has experts, at least one.
    Layers(BTreeMap<usize, Placement>),
}

impl From<Placement> for Placements {
    fn from(placement: Placement) -> Self {
        Self { kind: Kind::Same(placement) }
    }
}

impl Placements {
    /// Makes placements by the number of the layer. Panics if there is none, or if numbers of experts or ranks
    /// differ.
    #[must_use]
    pub fn per_layer(layers: impl IntoIterator<Item = (usize, Placement)>) -> Self {
        let layers: BTreeMap<usize, Placement> = layers.into_iter().collect();
        let mut sizes = layers.values().map(|placement| (placement.num_experts(), placement.num_ranks()));
        let first = sizes.next().expect("a layer with a placement");
        assert!(sizes.all(|sizes| sizes == first), "placements of layers with other numbers of experts or ranks");
        Self { kind: Kind::Layers(layers) }
    }

    /// Returns the placement of a layer; `None` if layers have their own and this one has none.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Option<&Placement> {
        match &self.kind {
            Kind::Same(placement) => Some(placement),
            Kind::Layers(layers) => layers.get(&layer),
        }
    }

    /// Returns the placement of the MoE layer that has `place` MoE layers before it.
    #[must_use]
    pub fn nth(&self, place: usize) -> Option<&Placement> {
        match &self.kind {
            Kind::Same(placement) => Some(placement),
            Kind::Layers(layers) => layers.values().nth(place),
        }
    }

    /// Returns the numbers of the layers that have a placement of their own, ascending; empty if all share one.
    #[must_use]
    pub fn layers(&self) -> Vec<usize> {
        match &self.kind {
            Kind::Same(_) => Vec::new(),
            Kind::Layers(layers) => layers.keys().copied().collect(),
        }
    }

    /// Iterates over the different placements.
    fn all(&self) -> impl Iterator<Item = &Placement> {
        let (same, layers) = match &self.kind {
            Kind::Same(placement) => (Some(placement), None),
            Kind::Layers(layers) => (None, Some(layers.values())),
        };
        same.into_iter().chain(layers.into_iter().flatten())
    }

    fn first(&self) -> &Placement {
        self.all().next().expect("a layer with a placement")
    }

    /// Returns E, the number of experts.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.first().num_experts()
    }

    /// Returns the number of ranks of the group.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.first().num_ranks()
    }

    /// Returns whether any layer has an expert on more than one rank.
    #[must_use]
    pub fn has_replicas(&self) -> bool {
        self.all().any(Placement::has_replicas)
    }
}

impl fmt::Display for Placements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers = match &self.kind {
            Kind::Same(placement) => return placement.fmt(f),
            Kind::Layers(layers) => layers,
        };
        writeln!(f, "{}", Sizes { num_experts: self.num_experts(), num_ranks: self.num_ranks() })?;
        for (layer, placement) in layers {
            writeln!(f, "layer {layer}:")?;
            placement.write_experts(f)?;
        }
        Ok(())
    }
}

impl FromStr for Placements {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        let lines: Vec<&str> = text.lines().collect();
        if !lines.get(1).is_some_and(|line| line.starts_with("layer")) {
            return text.parse().map(|placement| Self { kind: Kind::Same(placement) });
        }
        let sizes = Sizes::parse(lines[0])?;
        let starts: Vec<usize> = (1..lines.len()).filter(|&at| lines[at].starts_with("layer")).collect();
        let ends = starts[1..].iter().copied().chain([lines.len()]);
        let mut layers = BTreeMap::new();
        for (&start, end) in starts.iter().zip(ends) {
            let wrong = |problem| PlacementError { line: start + 1, problem };
            let layer = parse_layer(lines[start]).map_err(wrong)?;
            let placement = Placement::parse_experts(&lines[start + 1..end], start + 2, sizes)?;
            if layers.insert(layer, placement).is_some() {
                return Err(wrong(format!("layer {layer} has a placement already")));
            }
        }
        Ok(Self { kind: Kind::Layers(layers) })
    }
}

fn parse_layer(line: &str) -> Result<usize, String> {
    let number = line.strip_prefix("layer ").and_then(|rest| rest.strip_suffix(':'));
    let layer = number.and_then(|number| number.parse().ok()).filter(|layer| *layer < MAX_SIZE);
    layer.ok_or_else(|| format!("{line:?}: must be \"layer N:\" with the number of a layer"))
}

/// The sizes of a placement, the first line of its text.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) num_experts: usize,
    pub(crate) num_ranks: usize,
}

impl Sizes {
    pub(crate) fn parse(header: &str) -> Result<Self, PlacementError> {
        let size = |text: &str| text.parse().ok().filter(|size| (1..=MAX_SIZE).contains(size));
        let sizes = header.strip_prefix("placement experts=").and_then(|rest| rest.split_once(" ranks="));
        let sizes = sizes.and_then(|(experts, ranks)| Some((size(experts)?, size(ranks)?)));
        let (num_experts, num_ranks) = sizes.ok_or_else(|| {
            let problem = format!("{header:?}: must be \"placement experts=E ranks=R\" with numbers of at least 1");
            PlacementError { line: 1, problem }
        })?;
        Ok(Self { num_experts, num_ranks })
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "placement experts={} ranks={}", self.num_experts, self.num_ranks)
    }
}
