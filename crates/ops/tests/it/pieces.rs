//! Experts that lie apart, as the files of published models have them: the same bits as in one stack, and no copy.

use std::sync::Arc;

use moeworks_ops::experts::{ExpertRows, ExpertWeights, experts_forward};
use moeworks_ops::grouped_linear::{GroupedRows, grouped_linear_backward_input};
use moeworks_ops::quantized::{dequantize, quantize};
use moeworks_ops::{Activation, Context, elementwise};
use moeworks_tensor::{Bytes, DType, MemoryPool, Purpose, Random, Tensor};

const EXPERTS: usize = 3;
const WIDTH: usize = 64;
const HIDDEN: usize = 96;
const FLOATS: [DType; 2] = [DType::F32, DType::BF16];
const TYPES: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::Q8, DType::Q4];

fn random(ctx: &Context, shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut x = ctx.empty(shape, DType::F32);
    elementwise::fill_normal(ctx, &Random::new(seed, Purpose::Test, 0), 0.1, &mut x);
    if dtype.is_quantized() { quantize(ctx, &x, dtype) } else { elementwise::cast(ctx, &x, dtype) }
}

/// A stack in `count` pieces a matrix, in a file of its own in which they come in another order, with something
/// between.
fn in_pieces(pool: &MemoryPool, stack: &Tensor, count: usize) -> Tensor {
    let rows = stack.rows() / EXPERTS / count;
    let len = stack.num_bytes() / EXPERTS / count;
    let num_pieces = EXPERTS * count;
    // A file puts the matrix "10" before "2", and down before up.
    let order = |piece: usize| (piece * 5 + 2) % num_pieces;
    // An odd number of 16 bits between them: pairs of the one half are no pairs of the other.
    let between = if stack.dtype().size() == 2 { 66 } else { 64 };
    let mut file = vec![0xff; (64 + num_pieces * (len + between)).next_multiple_of(4)];
    let place = |piece: usize| 64 + order(piece) * (len + between);
    for (piece, bytes) in stack.bytes().chunks_exact(len).enumerate() {
        file[place(piece)..][..len].copy_from_slice(bytes);
    }
    // Memory of a pool is aligned as a file's is; a vector of bytes need not be.
    let mut memory = Tensor::empty(pool, &[file.len() / 4], DType::U32);
    memory.bytes_mut().copy_from_slice(&file);
    let owner: Bytes = Arc::new(memory);
    let lent = |piece: usize| {
        let range = place(piece)..place(piece) + len;
        Tensor::from_foreign(owner.clone(), range, &[rows, stack.cols()], stack.dtype()).unwrap()
    };
    Tensor::of_pieces(pool, (0..num_pieces).map(lent).collect(), stack.shape()).unwrap()
}

/// Every token to one expert: the first has many, the last few.
fn forward(ctx: &Context, gate_up: &Tensor, down: &Tensor) -> Tensor {
    let x = random(ctx, &[43, WIDTH], DType::F32, 3);
    let tokens: Vec<u32> = (0..43).collect();
    let rows = ExpertRows::new(&[0, 40, 42, 43], &tokens, &[0.5; 43], &tokens, 1);
    let weights = ExpertWeights { gate_up, down, activation: Activation::SwiGlu };
    experts_forward(ctx, &x, weights, rows).0
}

#[test]
fn experts_that_lie_apart_give_the_bits_of_a_stack_and_are_not_copied() {
    let files = MemoryPool::new();
    for dtype in TYPES {
        let ctx = Context::cpu(2);
        let gate_up = random(&ctx, &[EXPERTS, 2 * HIDDEN, WIDTH], dtype, 1);
        let down = random(&ctx, &[EXPERTS, WIDTH, HIDDEN], dtype, 2);
        let expected = forward(&ctx, &gate_up, &down);
        let apart = (in_pieces(&files, &gate_up, 2), in_pieces(&files, &down, 1));
        let held = files.stats().used_bytes;
        let found = forward(&ctx, &apart.0, &apart.1);
        assert_eq!(found.bytes(), expected.bytes(), "{dtype:?}");
        // Whoever gathers the pieces takes memory of the pool that they were made with.
        assert_eq!(files.stats().used_bytes, held, "{dtype:?} is copied");
        assert_eq!((apart.0.bytes(), apart.1.bytes()), (gate_up.bytes(), down.bytes()));
        assert!(files.stats().used_bytes > held);
    }
}

#[test]
fn gradients_to_inputs_of_experts_that_lie_apart_are_those_of_a_stack() {
    let pool = MemoryPool::new();
    // The depth, which is that of both halves, is summed up at once or in parts that end where the first half does.
    for ((width, hidden), dtype) in [(WIDTH, HIDDEN), (640, 256)].into_iter().flat_map(|size| FLOATS.map(|x| (size, x)))
    {
        let ctx = Context::cpu(2);
        let gate_up = random(&ctx, &[EXPERTS, 2 * hidden, width], dtype, 1);
        let dh = random(&ctx, &[43, 2 * hidden], DType::F32, 2);
        let rows: Vec<u32> = (0..43).collect();
        let rows = ExpertRows::new(&[0, 40, 42, 43], &rows, &[1.0; 43], &rows, 1);
        let rows = GroupedRows { rows, first: 0, width: 2 * hidden };
        let gradient = |w: &Tensor| grouped_linear_backward_input(&ctx, &dh, w, rows).to_f32_vec();
        assert_eq!(gradient(&in_pieces(&pool, &gate_up, 2)), gradient(&gate_up), "{width} x {hidden}, {dtype:?}");
    }
}

#[test]
fn halves_in_different_memory_are_gathered() {
    let (ctx, pool) = (Context::cpu(1), MemoryPool::new());
    for dtype in TYPES {
        let gate_up = random(&ctx, &[EXPERTS, 2 * HIDDEN, WIDTH], dtype, 1);
        let down = random(&ctx, &[EXPERTS, WIDTH, HIDDEN], dtype, 2);
        let whole = in_pieces(&pool, &gate_up, 2);
        let halves = whole.pieces().unwrap().iter().map(|half| half.copied(&pool)).collect();
        let halves = Tensor::of_pieces(&pool, halves, gate_up.shape()).unwrap();
        assert_eq!(forward(&ctx, &halves, &down).bytes(), forward(&ctx, &gate_up, &down).bytes(), "{dtype:?}");
    }
}

#[test]
fn other_types_are_made_of_pieces_one_by_one() {
    let (ctx, pool) = (Context::cpu(2), MemoryPool::new());
    for dtype in TYPES {
        let stack = random(&ctx, &[EXPERTS, 2 * HIDDEN, WIDTH], dtype, 1);
        let apart = in_pieces(&pool, &stack, 2);
        let held = pool.stats().used_bytes;
        let same = |f: &dyn Fn(&Tensor) -> Tensor| assert_eq!(f(&apart).bytes(), f(&stack).bytes(), "{dtype:?}");
        if dtype.is_quantized() {
            same(&|x| dequantize(&ctx, x, DType::F32));
        } else {
            same(&|x| elementwise::cast(&ctx, x, DType::BF16));
            same(&|x| quantize(&ctx, x, DType::Q8));
        }
        assert_eq!(pool.stats().used_bytes, held, "{dtype:?} is gathered");
    }
}
