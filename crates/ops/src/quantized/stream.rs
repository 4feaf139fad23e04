//! Streaming of weight rows in blocks, one row after the other: the code that the kernels of all x86-64 instruction
//! sets share.

use super::kernel::Panel;
use super::layouts::{Block, PART};
use super::rows::ActivationFormat;
use crate::prefetch::prefetch_far;

/// The most blocks of a unit, which a kernel takes at a time.
pub(super) const MAX_BLOCKS: usize = 4;

/// Returns the format of activations for a type of weights whose integers are raised by `offset` and, if paired, come
/// with even places first.
pub(super) const fn activation_format<B: Block>(offset: u8, is_paired: bool) -> ActivationFormat {
    match (B::LEN > PART, B::SHARED == PART) {
        (false, _) if B::HAS_MIN => ActivationFormat::Min,
        (false, _) if is_paired => ActivationFormat::Pairs(offset),
        (false, _) => ActivationFormat::Offset(offset),
        (true, true) => ActivationFormat::Parts,
        // An offset acts as a minimum of so many scales.
        (true, false) => ActivationFormat::Halves(if B::HAS_MIN { 1 } else { offset }),
    }
}

/// A row of weights.
pub(super) struct Row<'a, B> {
    pub(super) blocks: &'a [B],
    /// Its scales, if they are in a tensor of their own.
    pub(super) scales: &'a [u8],
    /// The blocks of a row some rows later, to be prefetched.
    pub(super) ahead: *const B,
    /// The first row of activations, which is the row of the sums.
    pub(super) first: usize,
    /// The column of the sums.
    pub(super) column: usize,
    /// Tiles from the sums of [`MAX_ROWS`](crate::gemm::kernel::MAX_ROWS) rows to those of the next.
    pub(super) tile_step: usize,
}
/// The blocks of a unit, and their scales if they are in a tensor of their own.
#[derive(Clone, Copy)]
pub(super) struct Unit<B> {
    pub(super) blocks: *const B,
    pub(super) scales: *const u8,
}
impl<'a, B: Block> Row<'a, B> {
    /// Describes row `column` of a panel and the row `rows_ahead` rows later, whose split scales are prefetched at
    /// once.
    #[inline(always)]
    pub(super) fn new(panel: &Panel<'a>, column: usize, rows_ahead: usize) -> Self {
        let ahead = panel.ahead(column, rows_ahead);
        if B::SPLIT_BYTES > 0 {
            prefetch_bytes(ahead.scales.address(0), ahead.scales.row_bytes().max(1));
        }
        let scales = panel.weights.scales.row(column);
        let blocks: &[B] = super::blocks_of(panel.weights.numbers.row(column));
        assert!(scales.len() >= blocks.len() * B::SPLIT_BYTES, "scales of a row");
        let (ahead, tile_step) = (ahead.numbers.address(0).cast(), panel.tile_step);
        Self { blocks, scales, ahead, first: 0, column, tile_step }
    }
}

/// Pads the split scales of fewer blocks than a unit has with zeros.
pub(super) fn unit_of_scales(scales: &[u8]) -> [u8; MAX_BLOCKS] {
    let mut all = [0; MAX_BLOCKS];
    let len = scales.len().min(MAX_BLOCKS);
    all[..len].copy_from_slice(&scales[..len]);
    all
}

/// Prefetches all cache lines of some bytes.
#[inline(always)]
pub(super) fn prefetch_bytes(at: *const u8, len: usize) {
    for line in (0..len).step_by(64) {
        prefetch_far(at.wrapping_add(line));
    }
    prefetch_far(at.wrapping_add(len - 1));
}

/// Defines `run` for a machine with `$features`. `$Units` is the trait that gives the number of blocks of a unit, and
/// `add_unit` adds the products of a unit to the `Sums` of each row.
macro_rules! streamed {
    ($features:literal, $Units:ident) => {
        /// Computes the sums of a panel as [`kernel::run`](super::kernel::run) does.
        ///
        /// # Safety
        /// The machine must have the features that the function names; rows of activations must have as many quads as
        /// a row of weights needs.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn run<B: $Units>(panel: Panel<'_>, tiles: &mut [Tile]) {
            let bytes = panel.depth / B::LEN * size_of::<B>();
            assert_eq!(panel.weights.numbers.row_bytes(), bytes, "bytes of a row of weights");
            let (pass, rows_ahead) = (panel.pass(), panel.rows_ahead());
            for column in 0..panel.columns {
                let mut row = Row::<B>::new(&panel, column, rows_ahead);
                for a in panel.a.chunks(pass) {
                    // SAFETY: the caller's promise.
                    with_rows!(a, rows => unsafe { sums(&row, rows, tiles) });
                    row.first += pass;
                }
            }
        }

        /// Computes the sums of a row of weights with some rows of activations.
        ///
        /// # Safety
        /// As for [`run`].
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn sums<B: $Units, const R: usize>(row: &Row<'_, B>, a: [&[Quad]; R], tiles: &mut [Tile]) {
            const { assert!(B::BLOCKS <= MAX_BLOCKS) };
            let mut sums = [Sums::zero(); R];
            let units = row.blocks.chunks_exact(B::BLOCKS);
            let rest = units.remainder();
            let mut at = 0;
            for unit in units {
                prefetch_bytes(row.ahead.wrapping_add(at * B::BLOCKS).cast(), B::BLOCKS * size_of::<B>());
                // SAFETY: the unit and its scales are whole, and activations have as many quads as the row.
                unsafe {
                    let scales = row.scales.as_ptr().add(at * B::BLOCKS * B::SPLIT_BYTES);
                    add_unit(Unit { blocks: unit.as_ptr(), scales }, a, at, &mut sums);
                }
                at += 1;
            }
            if !rest.is_empty() {
                // Missing blocks count as blocks of zeros.
                let mut unit = [B::zeroed(); MAX_BLOCKS];
                unit[..rest.len()].copy_from_slice(rest);
                let scales = unit_of_scales(&row.scales[at * B::BLOCKS * B::SPLIT_BYTES..]);
                // SAFETY: as above.
                unsafe { add_unit(Unit { blocks: unit.as_ptr(), scales: scales.as_ptr() }, a, at, &mut sums) };
            }
            let Row { first, column, tile_step, .. } = *row;
            for (row, sums) in (first..).zip(sums) {
                tiles[row / MAX_ROWS * tile_step].0[row % MAX_ROWS * TILE_STRIDE + column] = sums.total::<B>();
            }
        }
    };
}
pub(super) use streamed;
