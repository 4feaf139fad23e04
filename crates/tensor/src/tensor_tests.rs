use super::*;

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
