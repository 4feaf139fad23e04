//! Settings that change entries of the table of weights: replicated tensors and frozen ones.

use super::pattern::{matches, nearest, without_numbers};
use super::role::{WeightGroup, WeightPlace, WeightRole};
use super::spec::{Shard, WeightSpec};
use super::table::WeightTable;

/// A pattern, or a rule with one, that cannot be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rule:?} {problem}")]
pub struct WeightRuleError {
    /// The pattern or rule as it was given.
    pub rule: String,
    /// The reason, and what would be right.
    pub problem: String,
}

/// Tensors that are computed together: tensor parallelism shards either all of them or none.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CutUnit {
    Embedding,
    Head,
    Attention(usize),
    Dense(usize),
}

impl CutUnit {
    fn new(spec: &WeightSpec) -> Option<Self> {
        match (spec.place, spec.role) {
            (WeightPlace::Model, WeightRole::Embedding) => Some(Self::Embedding),
            (_, WeightRole::Head | WeightRole::HeadBias) => Some(Self::Head),
            (
                WeightPlace::Layer(_),
                WeightRole::CrossQ | WeightRole::CrossK | WeightRole::CrossV | WeightRole::CrossO,
            ) => None,
            (WeightPlace::Layer(i), role) if role.group() == WeightGroup::Attention => Some(Self::Attention(i)),
            (WeightPlace::Layer(i), WeightRole::QNorm | WeightRole::KNorm) => Some(Self::Attention(i)),
            (WeightPlace::Layer(i), WeightRole::QDownNorm | WeightRole::KvDownNorm) => Some(Self::Attention(i)),
            (WeightPlace::Layer(i), role) if role.group() == WeightGroup::Dense => Some(Self::Dense(i)),
            _ => None,
        }
    }

    fn describe(self) -> (&'static str, String) {
        match self {
            Self::Embedding => ("the embedding", "model.embed_tokens.weight".to_owned()),
            Self::Head => ("the output projection", "lm_head.*".to_owned()),
            Self::Attention(i) => ("the attention of a layer", format!("model.layers.{i}.self_attn.*")),
            Self::Dense(i) => ("the dense feed-forward of a layer", format!("model.layers.{i}.mlp.*")),
        }
    }
}

/// A rule `PATTERN=replicated` or `PATTERN=tensor`.
struct ShardRule<'a> {
    text: &'a str,
    pattern: &'a str,
    is_replicated: bool,
}

impl<'a> ShardRule<'a> {
    fn parse(text: &'a str) -> Result<Self, WeightRuleError> {
        let parsed = text.rsplit_once('=').and_then(|(pattern, cut)| match cut.trim() {
            "replicated" => Some((pattern.trim(), true)),
            "tensor" => Some((pattern.trim(), false)),
            _ => None,
        });
        let problem = "must be PATTERN=replicated or PATTERN=tensor, such as \"model.layers.0.self_attn.*=replicated\"";
        let (pattern, is_replicated) = parsed.ok_or_else(|| refused(text, problem))?;
        Ok(Self { text, pattern, is_replicated })
    }

    /// Fails if sharding of the tensor of `spec` is not a choice.
    fn check(&self, spec: &WeightSpec) -> Result<(), WeightRuleError> {
        let name = &spec.name;
        if spec.role.is_of_experts() {
            let problem = format!("matches {name}: parallel.placement says which ranks hold which experts");
            return Err(refused(self.text, problem));
        }
        if CutUnit::new(spec).is_none() && !(self.is_replicated && spec.shard.dim().is_none()) {
            let problem = format!(
                "matches {name}: only the embedding, the output projection and the attention and dense feed-forward of \
                 layers can be cut or replicated"
            );
            return Err(refused(self.text, problem));
        }
        Ok(())
    }
}

fn refused(rule: &str, problem: impl Into<String>) -> WeightRuleError {
    WeightRuleError { rule: rule.to_owned(), problem: problem.into() }
}

impl WeightTable {
    /// Freezes the tensors whose names match one of `patterns`, in which `*` matches any run of characters. Fails if
    /// a pattern matches nothing, or if nothing is left to train.
    pub fn freeze(&mut self, patterns: &[String]) -> Result<(), WeightRuleError> {
        for pattern in patterns {
            for index in self.matching(pattern, pattern)? {
                self.specs_mut()[index].is_trainable = false;
            }
        }
        match patterns.last() {
            Some(last) if self.num_trainable() == 0 => Err(refused(last, "leaves no weight to train")),
            _ => Ok(()),
        }
    }

    /// Changes how tensor parallelism shards the tensors that `rules` name. A rule is `PATTERN=replicated` or
    /// `PATTERN=tensor` (the default sharding); later rules win. Fails if a rule matches nothing, or if it cannot be
    /// applied.
    pub fn set_sharding(&mut self, rules: &[String]) -> Result<(), WeightRuleError> {
        let mut is_replicated = vec![false; self.specs().len()];
        let mut last_rules = vec![""; self.specs().len()];
        for text in rules {
            let rule = ShardRule::parse(text)?;
            for index in self.matching(text, rule.pattern)? {
                rule.check(&self.specs()[index])?;
                (is_replicated[index], last_rules[index]) = (rule.is_replicated, text);
            }
        }
        self.check_units(&is_replicated, &last_rules)?;
        let replicated: Vec<CutUnit> =
            self.cut_specs().filter(|spec| is_replicated[spec.index]).filter_map(CutUnit::new).collect();
        for spec in self.specs_mut() {
            if CutUnit::new(spec).is_some_and(|unit| replicated.contains(&unit)) {
                spec.shard = Shard::Replicated;
            }
        }
        Ok(())
    }

    /// Iterates over the weights that tensor-parallel ranks shard.
    fn cut_specs(&self) -> impl Iterator<Item = &WeightSpec> {
        self.specs().iter().filter(|spec| spec.shard.is_over_tensor_ranks())
    }

    /// Fails if some tensors of a unit are replicated and others are not.
    fn check_units(&self, is_replicated: &[bool], rules: &[&str]) -> Result<(), WeightRuleError> {
        for replicated in self.cut_specs().filter(|spec| is_replicated[spec.index]) {
            let unit = CutUnit::new(replicated);
            let other = self.cut_specs().find(|spec| CutUnit::new(spec) == unit && !is_replicated[spec.index]);
            if let (Some(unit), Some(other)) = (unit, other) {
                let (what, pattern) = unit.describe();
                let problem = format!(
                    "replicates {} but not {}: {what} is replicated as a whole, as by \"{pattern}=replicated\"",
                    replicated.name, other.name
                );
                return Err(refused(rules[replicated.index], problem));
            }
        }
        Ok(())
    }

    /// Returns the indices of the tensors whose names match `pattern`. Fails for `rule` if there are none.
    fn matching(&self, rule: &str, pattern: &str) -> Result<Vec<usize>, WeightRuleError> {
        let found: Vec<usize> =
            self.specs().iter().filter(|spec| matches(pattern, &spec.name)).map(|spec| spec.index).collect();
        if found.is_empty() {
            let near = nearest(pattern, self.specs().iter().map(|spec| spec.name.as_str()));
            return Err(refused(rule, format!("matches no weight; near names: {}", near.join(", "))));
        }
        Ok(found)
    }

    /// Returns true if a pass skips the gradient of the tensor of `spec`: the tensor is frozen, and so is the one
    /// whose gradient is computed with it.
    #[must_use]
    pub fn skips_gradient(&self, spec: &WeightSpec) -> bool {
        use WeightRole::{
            CrossK, CrossO, CrossQ, CrossV, DenseDown, DenseDownBias, DenseGateUp, DenseGateUpBias, Embedding,
            ExpertDown, ExpertDownBias, ExpertGateUp, ExpertGateUpBias, K, KBias, KvDown, KvDownBias, KvUp, O, OBias,
            Q, QBias, QDown, QDownBias, QUp, SharedDown, SharedGateUp, V, VBias,
        };
        let partner = match spec.role {
            Q | QBias | K | KBias | V | VBias | O | OBias | QDown | QDownBias | QUp | KvDown | KvDownBias | KvUp => {
                None
            }
            CrossQ | CrossK | CrossV | CrossO => None,
            // The head's gradient is computed with its loss, and an encoder may share the decoder's embedding.
            Embedding if spec.place == WeightPlace::Model && !self.is_tied() => None,
            DenseGateUp => Some(DenseDown),
            DenseDown => Some(DenseGateUp),
            DenseGateUpBias => Some(DenseDownBias),
            DenseDownBias => Some(DenseGateUpBias),
            ExpertGateUp => Some(ExpertDown),
            ExpertDown => Some(ExpertGateUp),
            ExpertGateUpBias => Some(ExpertDownBias),
            ExpertDownBias => Some(ExpertGateUpBias),
            SharedGateUp => Some(SharedDown),
            SharedDown => Some(SharedGateUp),
            _ => return false,
        };
        let is_frozen = |role: WeightRole| {
            // The two are neighbours in the table.
            let near = self.specs()[spec.index.saturating_sub(1)..].iter().take(3);
            near.filter(|other| other.place == spec.place && other.role == role).all(|other| !other.is_trainable)
        };
        !spec.is_trainable && partner.is_none_or(is_frozen)
    }
}

impl WeightSpec {
    /// Returns the name with `*` for the number of its layer, under which the tensors of several layers are shown
    /// together.
    #[must_use]
    pub fn general_name(&self) -> String {
        without_numbers(&self.name)
    }
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
