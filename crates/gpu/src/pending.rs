//! The operations whose launches may be fused with the launch after them, with their arguments by name.
//!
//! While a step is captured its last launch can still be replaced. A launcher that allows this declares the operation
//! beside the launch ([`Gpu::launch_pending`](crate::Gpu::launch_pending)). A later launcher compares the declared
//! arguments with its own and takes the launch back ([`Gpu::fuse_with_last`](crate::Gpu::fuse_with_last)): neither
//! the names of kernels nor the order of their arguments matter to it.

use crate::Arg;

/// An operation that is declared with its launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pending<'a> {
    /// RMSNorm of rows.
    Norm(PendingNorm<'a>),
    /// The sum of experts' rows of each token.
    Combine(PendingCombine<'a>),
    /// A product of rows with matrices along the depth.
    Product(PendingProduct<'a>),
    /// The norms, rotation and appending of one token's queries, keys and values of each sequence.
    QkvAppend(PendingQkvAppend<'a>),
}

/// A norm that is about to be launched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PendingNorm<'a> {
    /// The rows to be normed, bf16 or f32.
    pub x: Arg<'a>,
    /// `x` is bf16.
    pub x_is_bf16: bool,
    /// The weight.
    pub weight: Arg<'a>,
    /// The epsilon.
    pub eps: Arg<'a>,
    /// The normed rows.
    pub y: Arg<'a>,
    /// `y` is bf16.
    pub y_is_bf16: bool,
    /// The inverse root mean square of each row.
    pub inv_rms: Arg<'a>,
    /// The number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

/// A sum of experts' rows that is about to be launched, with blocks of the whole width or of a part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PendingCombine<'a> {
    /// The sums.
    pub y: Arg<'a>,
    /// The number of tokens.
    pub tokens: usize,
}

/// The kernels whose products can be fused with the next operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductKernel {
    /// Few rows on the plain units.
    Vec,
    /// Up to 32 rows on tensor cores, which can combine the rows of a token.
    SmallM,
}

/// A product that is about to be launched and only stores its sums.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PendingProduct<'a> {
    /// The kernel.
    pub kernel: ProductKernel,
    /// The rows.
    pub a: Arg<'a>,
    /// The row of `a` for each row; the null pointer if they are in order.
    pub gather: Arg<'a>,
    /// The matrices are bf16.
    pub b_is_bf16: bool,
    /// Columns of the sums.
    pub columns: usize,
    /// Terms of each sum.
    pub depth: usize,
    /// The sums.
    pub to: Arg<'a>,
    /// The summand; the null pointer without.
    pub base: Arg<'a>,
    /// The number of blocks.
    pub grid: [usize; 3],
}

/// The norms, rotation and appending of queries, keys and values that are about to be launched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PendingQkvAppend<'a> {
    /// The projections of queries, keys and values.
    pub projections: [Arg<'a>; 3],
    /// The projections are bf16.
    pub is_bf16: bool,
    /// The queries, and the rows of keys and values that are kept.
    pub to: [Arg<'a>; 3],
    /// The weights of the norms of queries and keys; null pointers without.
    pub norms: [Arg<'a>; 2],
    /// Elements that each of the norms spans.
    pub norm_widths: [usize; 2],
    /// The norms' epsilon.
    pub eps: Arg<'a>,
    /// The table of angles.
    pub angles: Arg<'a>,
    /// The position of each token.
    pub positions: Arg<'a>,
    /// Elements of a head.
    pub head_dim: usize,
    /// The first rotated element of a head.
    pub start: Arg<'a>,
    /// Half of the rotated elements.
    pub half: Arg<'a>,
    /// A kernel argument: pairs of rotated elements are neighbours.
    pub is_interleaved: Arg<'a>,
    /// Elements of a row of each projection.
    pub widths: [usize; 3],
    /// The number of rows of all sequences.
    pub rows: usize,
    /// Rows of each sequence.
    pub rows_each: usize,
    /// Rows of keys that a sequence has room for.
    pub capacity: usize,
    /// Rows of keys that a sequence had before.
    pub held: usize,
}

impl Pending<'_> {
    /// Returns the operation without the borrows. The caller ensures that the tensors' memory outlives it.
    pub(crate) fn detached(self) -> Pending<'static> {
        match self {
            Self::Norm(PendingNorm { x, weight, eps, y, inv_rms, x_is_bf16, y_is_bf16, rows, width }) => {
                let [x, weight, eps, y, inv_rms] = [x, weight, eps, y, inv_rms].map(Arg::detached);
                Pending::Norm(PendingNorm { x, weight, eps, y, inv_rms, x_is_bf16, y_is_bf16, rows, width })
            }
            Self::Combine(PendingCombine { y, tokens }) => Pending::Combine(PendingCombine { y: y.detached(), tokens }),
            Self::Product(PendingProduct { kernel, a, gather, b_is_bf16, columns, depth, to, base, grid }) => {
                let [a, gather, to, base] = [a, gather, to, base].map(Arg::detached);
                Pending::Product(PendingProduct { kernel, a, gather, b_is_bf16, columns, depth, to, base, grid })
            }
            Self::QkvAppend(append) => Pending::QkvAppend(append.detached()),
        }
    }
}

impl PendingQkvAppend<'_> {
    fn detached(self) -> PendingQkvAppend<'static> {
        let [eps, angles, positions] = [self.eps, self.angles, self.positions].map(Arg::detached);
        let [start, half, is_interleaved] = [self.start, self.half, self.is_interleaved].map(Arg::detached);
        PendingQkvAppend {
            projections: self.projections.map(Arg::detached),
            is_bf16: self.is_bf16,
            to: self.to.map(Arg::detached),
            norms: self.norms.map(Arg::detached),
            norm_widths: self.norm_widths,
            eps,
            angles,
            positions,
            head_dim: self.head_dim,
            start,
            half,
            is_interleaved,
            widths: self.widths,
            rows: self.rows,
            rows_each: self.rows_each,
            capacity: self.capacity,
            held: self.held,
        }
    }
}
