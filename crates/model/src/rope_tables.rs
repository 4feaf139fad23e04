//! A cache of a model's rotary tables, which are computed on first use.

use std::sync::{Arc, Mutex, PoisonError};

use moeworks_ops::rope::RopeTable;

use crate::config::{ModelConfig, PositionKind};

/// The tables computed so far.
#[derive(Debug, Default)]
pub(crate) struct RopeTables {
    tables: Mutex<Vec<Arc<RopeTable>>>,
}

impl RopeTables {
    /// Returns a rotary table for at least `len` positions; none without a rotary embedding. The table grows as
    /// needed, so that a model made for a million positions does not cost them in every run. There is a second table
    /// if frequencies change beyond some length.
    pub(crate) fn get(&self, config: &ModelConfig, len: usize) -> Option<Arc<RopeTable>> {
        let ModelConfig { head_dim, rope_theta, max_seq_len, variant, .. } = config;
        if variant.positions != PositionKind::Rotary {
            return None;
        }
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let bound = variant.rotary.changes_beyond();
        let is_beyond = |len: usize| bound.is_some_and(|bound| len > bound);
        let found = tables.iter().position(|table| is_beyond(table.max_len()) == is_beyond(len));
        if let Some(table) = found.map(|at| &tables[at]).filter(|table| table.max_len() >= len) {
            return Some(Arc::clone(table));
        }
        let most = bound.filter(|_| !is_beyond(len)).unwrap_or(*max_seq_len);
        let rotary_dim = variant.latent.map_or(*head_dim, |latent| latent.rotary_dim);
        let grown = len.next_power_of_two().min(most).max(len);
        let table = Arc::new(variant.rotary.table(*head_dim, rotary_dim, *rope_theta, grown));
        match found {
            Some(at) => tables[at] = Arc::clone(&table),
            None => tables.push(Arc::clone(&table)),
        }
        Some(table)
    }
}
