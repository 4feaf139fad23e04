use super::*;
use crate::{F8Block, Mxfp4Block};

#[test]
fn zeros_are_zero_also_in_recycled_memory() {
    let pool = MemoryPool::new();
    let mut first = Tensor::zeros(&pool, &[10, 3], DType::F32);
    first.f32s_mut().fill(7.0);
    drop(first);
    assert!(Tensor::zeros(&pool, &[10, 3], DType::F32).f32s().iter().all(|&x| x == 0.0));
}

#[test]
fn rows_and_cols_split_off_the_last_dim() {
    let pool = MemoryPool::new();
    let tensor = Tensor::zeros(&pool, &[2, 3, 5], DType::BF16);
    assert_eq!((tensor.rows(), tensor.cols(), tensor.len(), tensor.num_bytes()), (6, 5, 30, 60));
    assert_eq!(Tensor::zeros(&pool, &[], DType::F32).rows(), 1);
}

#[test]
#[should_panic(expected = "a shared tensor is written to")]
fn a_shared_tensor_cannot_be_written() {
    let mut tensor = Tensor::zeros(&MemoryPool::new(), &[4], DType::F32);
    let _other = tensor.clone();
    tensor.f32s_mut()[0] = 1.0;
}

#[test]
fn foreign_memory_must_fit_the_shape_and_the_alignment() {
    let owner: Bytes = Arc::new(vec![0_u8; 64]);
    assert!(Tensor::from_foreign(owner.clone(), 0..16, &[4], DType::F32).is_some());
    assert!(Tensor::from_foreign(owner.clone(), 0..12, &[4], DType::F32).is_none());
    assert!(Tensor::from_foreign(owner.clone(), 60..76, &[4], DType::F32).is_none());
    assert!(Tensor::from_foreign(owner, 1..17, &[4], DType::F32).is_none());
}

#[test]
fn a_tensor_of_pieces_is_gathered_only_when_it_is_asked_for_as_one() {
    let pool = MemoryPool::new();
    let owner: Bytes = Arc::new(Tensor::from_slice(&pool, &[12], &(0..12).map(|x| x as f32).collect::<Vec<_>>()));
    let lent = |range| Tensor::from_foreign(owner.clone(), range, &[2, 2], DType::F32).unwrap();
    let (last, first) = (lent(0..16), lent(32..48));
    let tensor = Tensor::of_pieces(&pool, vec![first.clone(), last.clone()], &[2, 2, 2]).unwrap();
    let held = pool.stats().used_bytes;
    assert_eq!((tensor.shape(), tensor.rows(), tensor.num_bytes()), (&[2, 2, 2][..], 4, 32));
    assert!(tensor.pieces().unwrap()[1].bytes().as_ptr() == (*owner).as_ref().as_ptr());
    assert_eq!(tensor.parts().len(), 2);
    let mut middle = [0_u8; 16];
    tensor.read_bytes(8, &mut middle);
    assert_eq!(bytemuck::cast_slice::<u8, f32>(&middle), [10.0, 11.0, 0.0, 1.0]);
    assert_eq!(pool.stats().used_bytes, held);
    assert_eq!(tensor.clone().reshaped(&[4, 2]).f32s(), [8.0, 9.0, 10.0, 11.0, 0.0, 1.0, 2.0, 3.0]);
    let (elements, places) = first.span::<f32>(&last).unwrap();
    assert_eq!((elements.len(), places), (12, [8, 0]));
    assert!(first.span::<f32>(&first.copied(&pool)).is_none());
}

#[test]
fn pieces_must_make_the_shape() {
    let pool = MemoryPool::new();
    let piece = |shape: &[usize], dtype| Tensor::zeros(&pool, shape, dtype);
    let of = |pieces, shape: &[usize]| Tensor::of_pieces(&pool, pieces, shape);
    assert!(of(vec![], &[0, 2]).is_none());
    assert!(of(vec![piece(&[2, 2], DType::F32)], &[1, 2, 2]).is_some());
    assert!(of(vec![piece(&[2, 2], DType::F32)], &[2, 2, 2]).is_none());
    assert!(of(vec![piece(&[2, 2], DType::F32)], &[4]).is_none());
    assert!(of(vec![piece(&[1, 2], DType::F32), piece(&[1, 2], DType::BF16)], &[2, 2]).is_none());
}

/// Rows of 256 FP8 values from byte 3 on with two bytes between them, and scales for two rows each.
fn eight_bits(rows: usize) -> Option<Tensor> {
    let numbers: Bytes = Arc::new((0..3 + 258 * 3 + 256).map(|i| (i % 251) as u8).collect::<Vec<u8>>());
    let scales: Bytes =
        Arc::new([1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<u8>>());
    let places = [
        Place { owner: numbers, start: 3, step: 258, rows_each: 1 },
        Place { owner: scales, start: 0, step: 8, rows_each: 2 },
    ];
    Tensor::with_split_scales(&MemoryPool::new(), &[rows, 256], DType::F8, places)
}

#[test]
fn numbers_and_scales_are_where_they_were_said_to_be_and_are_joined_only_when_asked_for() {
    let tensor = eight_bits(4).unwrap();
    let [numbers, scales] = tensor.lines().unwrap();
    assert_eq!((numbers.row(2)[0], numbers.starting_at(1).row(1).len()), (((3 + 2 * 258) % 251) as u8, 256));
    assert_eq!((scales.row(1), scales.row(3)), (scales.row(0), scales.starting_at(2).row(0)));
    assert_eq!(tensor.stored_bytes(), 4 * 256 + 2 * 8);
    let blocks = tensor.slice::<F8Block>();
    assert_eq!(
        blocks.iter().map(|block| f32::from_le_bytes(block.scale)).collect::<Vec<_>>(),
        [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]
    );
    assert_eq!(blocks[5].values.as_flattened(), &numbers.row(2)[128..]);
}

#[test]
fn rows_that_are_not_there_make_no_tensor() {
    assert!(eight_bits(5).is_none() && eight_bits(0).is_some_and(|none| none.slice::<F8Block>().is_empty()));
    let place = |len: usize, step: usize| Place { owner: Arc::new(vec![0_u8; len]), start: 0, step, rows_each: 1 };
    let tensor =
        |numbers: Place, dtype| Tensor::with_split_scales(&MemoryPool::new(), &[2, 128], dtype, [numbers, place(8, 4)]);
    assert!(tensor(place(256, 128), DType::F8).is_some());
    assert!(tensor(place(255, 128), DType::F8).is_none());
    assert!(tensor(place(256, usize::MAX), DType::F8).is_none());
    assert!(tensor(place(1 << 12, 128), DType::Q8).is_none());
}

#[test]
fn the_two_tensors_of_four_bit_floats_are_made_one_and_two_again() {
    let values = std::array::from_fn(|i| (17 * i) as u8);
    let block = Mxfp4Block::joined(&values, &[99]);
    // The first 16 in the low halves.
    assert_eq!(block.bytes()[..3], [99, values[0] & 15 | values[8] << 4, values[0] >> 4 | values[8] & 0xf0]);
    assert_eq!(block.parted(), (values, 99));
}

#[test]
fn a_transposed_stack_is_copied_in_order_only_when_it_is_asked_for() {
    let pool = MemoryPool::new();
    // Two matrices of 3 x 4.
    let base = Tensor::from_slice(&pool, &[2, 3, 4], &(0..24).map(|x| x as f32).collect::<Vec<_>>());
    let plain = Tensor::transposed(&pool, base.clone(), false).unwrap();
    assert_eq!((plain.shape(), plain.as_transposed().unwrap().0.shape()), (&[2, 4, 3][..], &[2, 3, 4][..]));
    assert_eq!(plain.f32s()[..6], [0.0, 4.0, 8.0, 1.0, 5.0, 9.0]);
    assert_eq!(plain.f32s()[21..], [15.0, 19.0, 23.0]);
    let interleaved = Tensor::transposed(&pool, base.clone(), true).unwrap();
    assert_eq!(interleaved.f32s()[..9], [0.0, 4.0, 8.0, 2.0, 6.0, 10.0, 1.0, 5.0, 9.0]);
    assert!(Tensor::transposed(&pool, base.clone().reshaped(&[8, 3]), false).is_none());
    assert!(Tensor::transposed(&pool, base.reshaped(&[2, 4, 3]), true).is_none());
}
