use moeworks_tensor::DType;

use super::*;

fn values(tensor: &Tensor) -> Vec<f32> {
    let mut bytes = vec![0; tensor.num_bytes()];
    tensor.read_bytes(0, &mut bytes);
    bytes.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
}

/// The stack `[4, 2, 3]` of the numbers from 0 on, in memory, in memory of another owner, and in pieces.
fn stacks(ctx: &Context) -> [Tensor; 3] {
    let numbers: Vec<f32> = (0_u8..24).map(f32::from).collect();
    let own = Tensor::from_slice(ctx.pool(), &[4, 2, 3], &numbers);
    let owner: Bytes = Arc::new(Whole(own.clone()));
    let foreign = Tensor::from_foreign(owner.clone(), 0..96, &[4, 2, 3], DType::F32).unwrap();
    let half = |i: usize| Tensor::from_foreign(owner.clone(), i * 12..(i + 1) * 12, &[1, 3], DType::F32).unwrap();
    let pieces = Tensor::of_pieces(ctx.pool(), (0..8).map(half).collect(), &[4, 2, 3]).unwrap();
    [own, foreign, pieces]
}

#[test]
fn the_experts_that_are_chosen_are_those_of_the_stack_wherever_it_lies() {
    let ctx = Context::cpu(1);
    for stack in stacks(&ctx) {
        for experts in [&[0][..], &[1, 2], &[0, 3], &[1, 2, 3]] {
            let part = select(&ctx, &stack, experts);
            assert_eq!(part.shape(), [experts.len(), 2, 3]);
            let expected: Vec<f32> = experts.iter().flat_map(|e| (6 * e..6 * e + 6).map(|i| i as f32)).collect();
            assert_eq!(values(&part), expected, "{experts:?}");
        }
    }
}

#[test]
fn experts_of_a_file_are_not_copied() {
    let ctx = Context::cpu(1);
    let [_, foreign, _] = stacks(&ctx);
    let part = select(&ctx, &foreign, &[1, 2]);
    assert_eq!(part.bytes().as_ptr(), foreign.bytes()[24..].as_ptr());
}

#[test]
fn a_transposed_stack_stays_transposed() {
    let ctx = Context::cpu(1);
    let [_, base, _] = stacks(&ctx);
    let stack = Tensor::transposed(ctx.pool(), base, false).unwrap();
    let part = select(&ctx, &stack, &[2, 3]);
    assert_eq!(part.shape(), [2, 3, 2]);
    assert!(part.as_transposed().is_some());
    assert_eq!(part.bytes(), &stack.bytes()[2 * 24..]);
}
