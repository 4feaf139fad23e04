//! Reduction of a run's records to a size that a page can show.
//!
//! Records are read one at a time into buckets of equally many steps. When all buckets are full, neighbours are
//! merged and each bucket covers twice as many steps from then on. Memory and page stay small for a run of any
//! length, and a short run keeps every step.

use std::path::Path;

use crate::metrics::{LayerRecord, MetricsError, Record, read_records};

/// The most buckets of a series; more would be closer than a pixel.
const MAX_BUCKETS: usize = 500;
/// The most columns of a heat map.
const MAX_COLUMNS: usize = 160;
/// The most validation points kept.
const MAX_EVALUATIONS: usize = 400;

/// A point of a line: a step and a value.
pub(super) type Point = (f64, f64);

/// The reduced records of a run.
pub(super) struct RunData {
    names: Vec<String>,
    buckets: Buckets<Means>,
    loads: Buckets<Loads>,
    evaluations: Vec<Point>,
    /// The evaluation with the lowest loss.
    pub(super) best_evaluation: Option<Point>,
    /// The newest evaluation.
    pub(super) last_evaluation: Option<Point>,
    /// The last record.
    pub(super) last: Record,
    /// The number of steps with a record.
    pub(super) num_steps: u64,
    /// The number of steps whose update was skipped.
    pub(super) num_skipped: u64,
    /// The duration of all steps in seconds.
    pub(super) seconds: f64,
    /// The largest `memory_peak_bytes`.
    pub(super) memory_peak_bytes: u64,
}

/// The load of one MoE layer over time.
pub(super) struct LayerLoad {
    /// The index of the layer in the model.
    pub(super) layer: usize,
    /// The last step of each bucket and its choices per expert.
    pub(super) columns: Vec<(f64, Vec<f64>)>,
    /// The choices per expert near the end of the run; the router's other figures are not set.
    pub(super) recent: LayerRecord,
    /// The first step that `recent` includes.
    pub(super) recent_from: u64,
}

impl RunData {
    /// Reads `metrics.jsonl`. Returns `None` if it has no record. Records whose number of layers or experts differs
    /// from the first one's are skipped: they belong to another model.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, MetricsError> {
        let mut data: Option<Self> = None;
        for record in read_records(path)? {
            let record = record?;
            match &mut data {
                None => data = Some(Self::begin(record)),
                Some(data) => data.add(record),
            }
        }
        Ok(data)
    }

    fn begin(record: Record) -> Self {
        let mut data = Self {
            names: record.scalars().into_iter().map(|(name, _)| name).collect(),
            buckets: Buckets::new(MAX_BUCKETS),
            loads: Buckets::new(MAX_COLUMNS),
            evaluations: Vec::new(),
            best_evaluation: None,
            last_evaluation: None,
            last: record.clone(),
            num_steps: 0,
            num_skipped: 0,
            seconds: 0.0,
            memory_peak_bytes: 0,
        };
        data.add(record);
        data
    }

    fn add(&mut self, record: Record) {
        let shape = |record: &Record| -> Vec<(usize, usize)> {
            record.layers.iter().map(|layer| (layer.layer, layer.tokens_per_expert.len())).collect()
        };
        if shape(&record) != shape(&self.last) {
            return;
        }
        if let Some(loss) = record.val_loss.filter(|loss| loss.is_finite()) {
            let point = (record.step as f64, loss);
            if self.best_evaluation.is_none_or(|best| loss < best.1) {
                self.best_evaluation = Some(point);
            }
            self.last_evaluation = Some(point);
            self.evaluations.push(point);
            if self.evaluations.len() > 2 * MAX_EVALUATIONS {
                // Every second point is dropped, counted from the end so that the last one is kept.
                let odd = self.evaluations.len() % 2;
                let mut index = 0;
                self.evaluations.retain(|_| {
                    index += 1;
                    index % 2 == odd
                });
            }
        }
        // The record of an evaluation before training has no training figures.
        if record.step == 0 {
            return;
        }
        self.num_steps += 1;
        self.num_skipped += u64::from(record.is_skipped);
        self.seconds += if record.step_ms.is_finite() { record.step_ms / 1e3 } else { 0.0 };
        self.memory_peak_bytes = self.memory_peak_bytes.max(record.memory_peak_bytes);
        let values: Vec<f64> = record.scalars().into_iter().map(|(_, value)| value).collect();
        self.buckets.add(record.step, Means::new(&values));
        if !record.layers.is_empty() {
            self.loads.add(record.step, Loads::new(&record.layers));
        }
        self.last = record;
    }

    /// Returns the points of the scalar `name`. Buckets without a finite value are NaN, at which a line breaks.
    pub(super) fn series(&self, name: &str) -> Vec<Point> {
        let Some(index) = self.names.iter().position(|known| known == name) else { return Vec::new() };
        self.buckets.all().map(|bucket| (bucket.step(), bucket.value.mean(index))).collect()
    }

    /// Returns the validation losses.
    pub(super) fn evaluations(&self) -> &[Point] {
        &self.evaluations
    }

    /// Returns steps near which an update was skipped.
    pub(super) fn skipped_steps(&self) -> Vec<f64> {
        let skipped = self.series("train/is_skipped");
        skipped.into_iter().filter(|&(_, share)| share > 0.0).map(|(step, _)| step).collect()
    }

    /// Returns the first and the last step of the run.
    pub(super) fn step_range(&self) -> (f64, f64) {
        let first = self.buckets.all().next().map_or(0.0, |bucket| bucket.first_step as f64);
        (first, self.last.step as f64)
    }

    /// Returns whether the model has MoE layers.
    pub(super) fn has_experts(&self) -> bool {
        !self.last.layers.is_empty()
    }

    /// Returns the load of every MoE layer over time.
    pub(super) fn layer_loads(&self) -> Vec<LayerLoad> {
        // `recent` covers about the last tenth of the run, at least one bucket.
        let num_buckets = self.loads.all().count();
        let recent_buckets = num_buckets.div_ceil(10);
        let load_of = |(index, layer): (usize, &LayerRecord)| {
            let columns: Vec<_> = self
                .loads
                .all()
                .map(|bucket| {
                    let counts = bucket.value.counts[index].iter().map(|&count| count as f64).collect();
                    (bucket.last_step as f64, counts)
                })
                .collect();
            let mut recent = LayerRecord {
                layer: layer.layer,
                tokens_per_expert: vec![0; layer.tokens_per_expert.len()],
                ..LayerRecord::default()
            };
            let mut recent_from = 0;
            for bucket in self.loads.all().skip(num_buckets - recent_buckets) {
                recent_from = if recent_from == 0 { bucket.first_step } else { recent_from };
                recent.num_dropped += bucket.value.dropped[index];
                for (sum, count) in recent.tokens_per_expert.iter_mut().zip(&bucket.value.counts[index]) {
                    *sum += count;
                }
            }
            LayerLoad { layer: layer.layer, columns, recent, recent_from }
        };
        self.last.layers.iter().enumerate().map(load_of).collect()
    }
}

/// Values that can be summed into a bucket.
trait Merge {
    fn merge(&mut self, other: Self);
}

struct Bucket<V> {
    first_step: u64,
    last_step: u64,
    num_records: u64,
    value: V,
}

impl<V> Bucket<V> {
    /// The position on the axis: the middle of the bucket's steps.
    fn step(&self) -> f64 {
        (self.first_step as f64 + self.last_step as f64) / 2.0
    }
}

struct Buckets<V> {
    full: Vec<Bucket<V>>,
    filling: Option<Bucket<V>>,
    records_per_bucket: u64,
    max: usize,
}

impl<V: Merge> Buckets<V> {
    fn new(max: usize) -> Self {
        Self { full: Vec::new(), filling: None, records_per_bucket: 1, max }
    }

    fn all(&self) -> impl Iterator<Item = &Bucket<V>> {
        self.full.iter().chain(&self.filling)
    }

    fn add(&mut self, step: u64, value: V) {
        match &mut self.filling {
            None => self.filling = Some(Bucket { first_step: step, last_step: step, num_records: 1, value }),
            Some(bucket) => {
                bucket.last_step = step;
                bucket.num_records += 1;
                bucket.value.merge(value);
            }
        }
        if self.filling.as_ref().is_some_and(|bucket| bucket.num_records == self.records_per_bucket) {
            self.full.extend(self.filling.take());
        }
        if self.full.len() >= self.max {
            self.halve();
        }
    }

    /// Merges neighbouring buckets in pairs. `max` is even, so that every bucket has a partner.
    fn halve(&mut self) {
        let mut halved = Vec::with_capacity(self.max);
        let mut buckets = std::mem::take(&mut self.full).into_iter();
        while let Some(mut bucket) = buckets.next() {
            if let Some(next) = buckets.next() {
                bucket.last_step = next.last_step;
                bucket.num_records += next.num_records;
                bucket.value.merge(next.value);
            }
            halved.push(bucket);
        }
        self.full = halved;
        self.records_per_bucket *= 2;
    }
}

/// The sums of scalars over the steps at which they were finite.
struct Means {
    sums: Vec<(f64, u32)>,
}

impl Means {
    fn new(values: &[f64]) -> Self {
        // Sums of larger values could overflow f64.
        let is_usable = |value: f64| value.is_finite() && value.abs() < 1e200;
        Self { sums: values.iter().map(|&v| if is_usable(v) { (v, 1) } else { (0.0, 0) }).collect() }
    }

    fn mean(&self, index: usize) -> f64 {
        let (sum, count) = self.sums[index];
        if count == 0 { f64::NAN } else { sum / f64::from(count) }
    }
}

impl Merge for Means {
    fn merge(&mut self, other: Self) {
        for (into, from) in self.sums.iter_mut().zip(other.sums) {
            into.0 += from.0;
            into.1 = into.1.saturating_add(from.1);
        }
    }
}

/// The choices per layer and expert, and the dropped choices per layer.
struct Loads {
    counts: Vec<Vec<u64>>,
    dropped: Vec<u64>,
}

impl Loads {
    fn new(layers: &[LayerRecord]) -> Self {
        Self {
            counts: layers.iter().map(|layer| layer.tokens_per_expert.clone()).collect(),
            dropped: layers.iter().map(|layer| layer.num_dropped).collect(),
        }
    }
}

impl Merge for Loads {
    fn merge(&mut self, other: Self) {
        for (into, from) in self.counts.iter_mut().zip(other.counts) {
            for (into, from) in into.iter_mut().zip(from) {
                *into = into.saturating_add(from);
            }
        }
        for (into, from) in self.dropped.iter_mut().zip(other.dropped) {
            *into = into.saturating_add(from);
        }
    }
}
