//! Rows in their wire format, and sums of them.

use moeworks_plan::Wire;
use moeworks_tensor::{DType, MemoryPool, Tensor, bf16};

use crate::wire::{decode, encode};

/// Copies the rows with these numbers, of `bytes` bytes each.
pub(super) fn pick(rows: &[u8], numbers: &[u32], bytes: usize) -> Vec<u8> {
    let mut picked = Vec::with_capacity(numbers.len() * bytes);
    for &number in numbers {
        picked.extend_from_slice(&rows[number as usize * bytes..(number as usize + 1) * bytes]);
    }
    picked
}

/// The wire format of rows of one width.
pub(super) struct RowFormat {
    pub(super) wire: Wire,
    pub(super) width: usize,
    /// Bytes of a row.
    pub(super) bytes: usize,
}

impl RowFormat {
    /// Makes the format of rows of `width` numbers.
    pub(super) fn new(wire: Wire, width: usize) -> Self {
        Self { wire, width, bytes: wire.row_bytes(width) }
    }

    /// Encodes the rows with these numbers.
    pub(super) fn pack(&self, rows: &Tensor, numbers: &[u32]) -> Vec<u8> {
        let is_same = matches!((self.wire, rows.dtype()), (Wire::F32, DType::F32) | (Wire::Bf16, DType::BF16));
        if is_same {
            return pick(rows.bytes(), numbers, self.bytes);
        }
        let mut packed = vec![0; numbers.len() * self.bytes];
        let mut row = vec![0.0; self.width];
        for (&number, out) in numbers.iter().zip(packed.chunks_exact_mut(self.bytes.max(1))) {
            let range = number as usize * self.width..(number as usize + 1) * self.width;
            match rows.dtype() {
                DType::F32 => encode(self.wire, &rows.f32s()[range], out),
                _ => {
                    row.iter_mut().zip(&rows.bf16s()[range]).for_each(|(wide, x)| *wide = x.to_f32());
                    encode(self.wire, &row, out);
                }
            }
        }
        packed
    }

    pub(super) fn unpack(&self, bytes: &[u8], dtype: DType, pool: &MemoryPool) -> Tensor {
        let num_rows = bytes.len().checked_div(self.bytes).unwrap_or(0);
        let mut rows = Tensor::empty(pool, &[num_rows, self.width], dtype);
        if matches!((self.wire, dtype), (Wire::F32, DType::F32) | (Wire::Bf16, DType::BF16)) {
            rows.bytes_mut().copy_from_slice(bytes);
            return rows;
        }
        let mut values = vec![0.0; num_rows * self.width];
        for (row, bytes) in values.chunks_exact_mut(self.width.max(1)).zip(bytes.chunks_exact(self.bytes.max(1))) {
            decode(self.wire, bytes, row);
        }
        self.tensor(&values, num_rows, dtype, pool)
    }

    pub(super) fn encode_all(&self, values: &[f32]) -> Vec<u8> {
        let num_rows = values.len().checked_div(self.width).unwrap_or(0);
        let mut packed = vec![0; num_rows * self.bytes];
        for (row, out) in values.chunks_exact(self.width.max(1)).zip(packed.chunks_exact_mut(self.bytes.max(1))) {
            encode(self.wire, row, out);
        }
        packed
    }

    /// Sums rows into `num_rows` rows of f32: row i of `parts` is added to the row with number `numbers[i]`.
    pub(super) fn sum(&self, parts: &[u8], numbers: &[u32], num_rows: usize) -> Vec<f32> {
        let mut sums = Sums::new(num_rows, self.width);
        let mut row = vec![0.0; self.width];
        for (&number, part) in numbers.iter().zip(parts.chunks_exact(self.bytes.max(1))) {
            decode(self.wire, part, &mut row);
            sums.add(number as usize, &row);
        }
        sums.values
    }

    pub(super) fn tensor(&self, values: &[f32], num_rows: usize, dtype: DType, pool: &MemoryPool) -> Tensor {
        let mut rows = Tensor::empty(pool, &[num_rows, self.width], dtype);
        match dtype {
            DType::F32 => rows.f32s_mut().copy_from_slice(values),
            _ => rows.bf16s_mut().iter_mut().zip(values).for_each(|(x, &value)| *x = bf16::from_f32(value)),
        }
        rows
    }
}

/// Sums of rows. The first part is copied, not added to zero, so that the result does not depend on how often zeros
/// were added.
pub(super) struct Sums {
    pub(super) values: Vec<f32>,
    has_part: Vec<bool>,
    width: usize,
}

impl Sums {
    pub(super) fn new(num_rows: usize, width: usize) -> Self {
        Self { values: vec![0.0; num_rows * width], has_part: vec![false; num_rows], width }
    }

    pub(super) fn add(&mut self, number: usize, part: &[f32]) {
        let sum = &mut self.values[number * self.width..(number + 1) * self.width];
        if self.has_part[number] {
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        } else {
            sum.copy_from_slice(part);
        }
        self.has_part[number] = true;
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        for number in (0..other.has_part.len()).filter(|&number| other.has_part[number]) {
            self.add(number, &other.values[number * self.width..(number + 1) * self.width]);
        }
    }
}
