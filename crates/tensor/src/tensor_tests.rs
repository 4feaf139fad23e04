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
