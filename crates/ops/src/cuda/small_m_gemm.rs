//! GEMMs of up to 32 rows with weights as they are stored: the types that have kernels, and the layout of their
//! blocks.

use moeworks_tensor::{DType, Tensor};

use super::grouped::FEW_ROWS;
use super::{On, THREADS, WARPS};
use moeworks_gpu::sources::{
    ELEMENTWISE, SMALL_M_GEMM_BF16, SMALL_M_GEMM_F8, SMALL_M_GEMM_IQ4_NL, SMALL_M_GEMM_MXFP4, SMALL_M_GEMM_Q2K,
    SMALL_M_GEMM_Q3K, SMALL_M_GEMM_Q4, SMALL_M_GEMM_Q4_1, SMALL_M_GEMM_Q4K, SMALL_M_GEMM_Q5_0, SMALL_M_GEMM_Q5_1,
    SMALL_M_GEMM_Q5K, SMALL_M_GEMM_Q6K, SMALL_M_GEMM_Q8,
};
use moeworks_gpu::{Arg, Source};

/// Rows that are taken at once.
pub(super) const ROWS: usize = 32;
/// The fewest rows for which activations are reordered first, where weights are quantized.
pub(super) const MANY_ROWS: usize = 9;
/// Lines of weights that a warp copies at a time: a tile.
pub(super) const LINES: usize = 16;
/// Tiles of a block.
const TILES: usize = 2;
/// Tiles of a block for few rows with few columns.
pub(super) const LEAST_TILES: usize = 1;
/// Tiles of a block where there are many.
const MOST_TILES: usize = 8;
/// The number of blocks of most tiles that keeps all multiprocessors busy, two on each.
const MANY_BLOCKS: usize = 256;
/// The largest depth for which that many tiles are worth having there. Blocks that run for longer are balanced better
/// if they are small.
const SHORT_DEPTH: usize = 2048;
/// Chunks of lines that a warp has room for, with two blocks on a multiprocessor.
const STAGES: usize = 2;
/// Chunks of lines that a warp has room for, with one block on a multiprocessor.
const STAGES_ALONE: usize = 4;
/// The depth is a multiple of this.
const WHOLE_DEPTH: usize = 32;
/// The depth of a chunk; activations have room in whole chunks.
const CHUNK_DEPTH: usize = 256;
/// Bytes of activations that a block holds in shared memory at a time: where two blocks of a multiprocessor have room
/// for so many, and elsewhere. Kernels use the memory that they are given in whole chunks of the depth; the smaller
/// number is one chunk of 32 rows.
const STAGED_BYTES: [usize; 2] = [32 << 10, 16 << 10];
/// Static shared memory of a block in bytes.
const OTHER_BYTES: usize = 2 << 10;
/// Dynamic shared memory that each of two blocks on a multiprocessor of Hopper may have, in bytes.
const MAX_SHARED_OF_TWO: usize = 108 << 10;
/// Rows that have room where they are normed.
const NORMED_ROWS: usize = 8;
/// The most blocks that each norm several rows.
const MAX_NORMING_BLOCKS: usize = 512;

/// The layout of a product's blocks: tiles of lines of a block, chunks that a warp has in flight, and shared memory
/// in bytes. The memory holds chunks of lines in whole pieces of 16 bytes, in which blocks may begin anywhere, with
/// gaps; and activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) tiles: usize,
    pub(super) stages: usize,
    pub(super) shared: usize,
}

impl Layout {
    /// Chooses the layout for tiles of up to `rows` rows, of one matrix if `is_one`. `blocks` returns the number of
    /// blocks with a number of tiles each. The number of tiles of a block decides the order of sums and does not
    /// depend on the GPU's shared memory.
    pub(super) fn new(
        on: On<'_>,
        dtype: DType,
        depth: usize,
        rows: usize,
        is_one: bool,
        blocks: impl Fn(usize) -> usize,
    ) -> Self {
        let (processors, most) = (on.gpu.processors(), blocks(MOST_TILES));
        if is_one && rows > FEW_ROWS {
            // As few blocks as keep most multiprocessors busy, because each block loads all activations.
            let tiles = [MOST_TILES, MOST_TILES / 2].into_iter().find(|tiles| 2 * blocks(*tiles) > processors);
            return Self::with_all_rows(on, dtype, depth, tiles.unwrap_or(TILES));
        }
        if is_one {
            return Self::for_two_blocks(on, dtype, TILES);
        }
        if most >= MANY_BLOCKS && depth <= SHORT_DEPTH {
            // bf16 is bound by memory, not by instructions: smaller blocks end together.
            return Self::for_two_blocks(on, dtype, if dtype == DType::BF16 { MOST_TILES / 2 } else { MOST_TILES });
        }
        // About as many blocks as multiprocessors: each warp has a tile to itself.
        if (processors - processors / 4..=processors + processors / 8).contains(&most) {
            return Self::for_one_block(on, dtype, MOST_TILES);
        }
        Self::for_two_blocks(on, dtype, TILES)
    }

    /// Returns a layout for two blocks on a multiprocessor.
    fn for_two_blocks(on: On<'_>, dtype: DType, tiles: usize) -> Self {
        let [many, few] = STAGED_BYTES.map(|bytes| chunk_bytes(dtype, STAGES) + bytes);
        let shared = if 2 * (many + OTHER_BYTES) <= on.gpu.most_shared() { many } else { few };
        Self { tiles, stages: STAGES, shared }
    }

    /// Returns a layout for one block on a multiprocessor.
    fn for_one_block(on: On<'_>, dtype: DType, tiles: usize) -> Self {
        let shared = chunk_bytes(dtype, STAGES_ALONE) + STAGED_BYTES[0];
        Self { tiles, stages: STAGES_ALONE, shared }.or_for_two_blocks(on, dtype)
    }

    /// Returns a layout for blocks that hold all activations of up to 32 rows at once, because each piece of them
    /// takes longer to load than to multiply.
    fn with_all_rows(on: On<'_>, dtype: DType, depth: usize, tiles: usize) -> Self {
        let shared = chunk_bytes(dtype, STAGES) + depth.next_multiple_of(CHUNK_DEPTH) * ROWS * 2;
        Self { tiles, stages: STAGES, shared }.or_for_two_blocks(on, dtype)
    }

    /// Returns this layout where a block may have so much memory, and a smaller one elsewhere.
    fn or_for_two_blocks(self, on: On<'_>, dtype: DType) -> Self {
        let has_room = self.shared + OTHER_BYTES <= on.gpu.most_shared();
        if has_room { self } else { Self::for_two_blocks(on, dtype, self.tiles) }
    }

    /// Returns the layout for `blocks` blocks of one tile. Where each has a multiprocessor, it asks for more than
    /// half of its memory, needed or not: otherwise blocks that start while others still run share a multiprocessor.
    /// (H200, OLMoE, one text: 3%.)
    pub(super) fn for_one_tile(on: On<'_>, dtype: DType, blocks: usize) -> Self {
        let is_alone = blocks <= on.gpu.processors();
        if is_alone {
            Self::for_one_block(on, dtype, LEAST_TILES)
        } else {
            Self::for_two_blocks(on, dtype, LEAST_TILES)
        }
    }

    /// Returns the layout with room for `rows` rows of `depth` elements that each block norms; none if there is not
    /// enough shared memory. With many blocks a separate kernel that norms several rows once is faster.
    pub(super) fn with_norm(self, on: On<'_>, dtype: DType, rows: usize, depth: usize, blocks: usize) -> Option<Self> {
        let shared = self.shared.max(chunk_bytes(dtype, self.stages) + depth * NORMED_ROWS * 2);
        let most = if self.stages == STAGES { MAX_SHARED_OF_TWO } else { usize::MAX };
        let is_worth_it = rows == 1 || blocks <= MAX_NORMING_BLOCKS;
        (is_worth_it && shared <= most.min(on.gpu.most_shared())).then_some(Self { shared, ..self })
    }

    /// Returns the layout as arguments of a kernel.
    pub(super) fn args(self) -> [Arg<'static>; 2] {
        [self.tiles, self.stages].map(Arg::from)
    }
}

/// Returns the source of the kernels for weights of a type, and the end of their names.
fn of_type(dtype: DType) -> Option<(&'static Source, &'static str)> {
    Some(match dtype {
        DType::BF16 => (&SMALL_M_GEMM_BF16, "bf16"),
        DType::Q8 => (&SMALL_M_GEMM_Q8, "q8"),
        DType::Q4 => (&SMALL_M_GEMM_Q4, "q4"),
        DType::Q4K => (&SMALL_M_GEMM_Q4K, "q4k"),
        DType::Q5K => (&SMALL_M_GEMM_Q5K, "q5k"),
        DType::Q6K => (&SMALL_M_GEMM_Q6K, "q6k"),
        DType::Mxfp4 => (&SMALL_M_GEMM_MXFP4, "mxfp4"),
        DType::F8 => (&SMALL_M_GEMM_F8, "f8"),
        DType::Q4_1 => (&SMALL_M_GEMM_Q4_1, "q4_1"),
        DType::Q5_0 => (&SMALL_M_GEMM_Q5_0, "q5_0"),
        DType::Q5_1 => (&SMALL_M_GEMM_Q5_1, "q5_1"),
        DType::Q2K => (&SMALL_M_GEMM_Q2K, "q2k"),
        DType::Q3K => (&SMALL_M_GEMM_Q3K, "q3k"),
        DType::Iq4Nl => (&SMALL_M_GEMM_IQ4_NL, "iq4_nl"),
        _ => return None,
    })
}

/// Returns whether there are kernels for weights of a type and depth.
pub(super) fn takes(dtype: DType, depth: usize) -> bool {
    of_type(dtype).is_some() && depth > 0 && depth.is_multiple_of(WHOLE_DEPTH)
}

/// Returns the kernel that does `what` with weights of a type, which must have kernels.
pub(super) fn kernel(what: &str, dtype: DType) -> (&'static Source, String) {
    let (source, name) = of_type(dtype).expect("a type with kernels");
    (source, format!("small_m_{what}_{name}"))
}

/// Returns the bytes of all warps' chunks of lines.
fn chunk_bytes(dtype: DType, stages: usize) -> usize {
    let line = match dtype {
        DType::BF16 => row_bytes(dtype, 128),
        _ => (((row_bytes(dtype, 256) + 2 * 15) / 16) | 1) * 16,
    };
    WARPS * stages * LINES * line
}

/// Returns the bytes of a row of `width` elements.
pub(super) fn row_bytes(dtype: DType, width: usize) -> usize {
    width / dtype.block_len() * dtype.size()
}

/// Returns the order and type of numbers as an argument of a kernel.
pub(super) fn kind_of(dtype: DType, are_in_levels: bool) -> Arg<'static> {
    (u32::from(dtype == DType::BF16) + u32::from(are_in_levels)).into()
}

/// Returns activations as bf16 in the order in which kernels take them with quantized weights (`small_m_gemm.cuh`);
/// none if they stay as they are. Reordered once, blocks of threads copy them without looking at them, which is worth
/// a launch where there `are_many` rows.
pub(super) fn in_level_order(on: On<'_>, x: &Tensor, weights: DType, are_many: bool) -> Option<Tensor> {
    if !are_many || !weights.is_quantized() || !x.cols().is_multiple_of(WHOLE_DEPTH) {
        return None;
    }
    let mut y = on.empty(x.shape(), DType::BF16);
    let args = [on.read(x), (x.dtype() == DType::BF16).into(), on.write(&mut y), Arg::elements(x.len())];
    // SAFETY: a thread reads eight numbers of 32 and writes as many there.
    unsafe { on.launch(&ELEMENTWISE, "cast_to_levels", x.len().div_ceil(8 * THREADS), &args) };
    Some(y)
}
