use super::*;

fn chosen(scores: &[f32], k: usize) -> Vec<u32> {
    let mut ids = vec![7; k];
    top_k(scores, &mut ids);
    ids
}

#[test]
fn the_highest_come_first_and_the_lowest_index_wins_a_tie() {
    assert_eq!(chosen(&[0.1, 0.5, 0.5, -0.0, 0.0], 4), [1, 2, 0, 3]);
    assert_eq!(chosen(&[1.0; 6], 3), [0, 1, 2]);
    assert_eq!(chosen(&[0.0, 1.0, 2.0, 3.0], 2), [3, 2]);
    assert_eq!(chosen(&[3.0, 2.0, 1.0, 0.0], 1), [0]);
}

#[test]
fn what_is_out_of_reach_is_never_chosen() {
    let far = f32::NEG_INFINITY;
    assert_eq!(chosen(&[far, 1.0, far], 2), [1, NO_EXPERT]);
    assert_eq!(chosen(&[far, far], 1), [NO_EXPERT]);
}

#[test]
fn any_k_is_what_a_stable_sort_gives() {
    for seed in 0..40_u32 {
        let scores: Vec<f32> = (0..13_u32).map(|i| ((i * i + 3 * seed * i + seed) % 7) as f32).collect();
        let mut sorted: Vec<u32> = (0..13).collect();
        sorted.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
        for k in 1..=13 {
            assert_eq!(chosen(&scores, k), sorted[..k]);
        }
    }
}

#[test]
fn groups_are_chosen_by_their_best_or_their_two_best() {
    let scores = [0.9, 0.0, 0.5, 0.6, 0.1, 0.2];
    let reach = |top_groups, by| {
        let mut scores = scores;
        limit_groups(&mut scores, 3, top_groups, by);
        scores.map(|score| score > f32::NEG_INFINITY)
    };
    assert_eq!(reach(1, GroupScore::Max), [true, true, false, false, false, false]);
    assert_eq!(reach(1, GroupScore::TopTwo), [false, false, true, true, false, false]);
    assert_eq!(reach(2, GroupScore::TopTwo), [true, true, true, true, false, false]);
    assert_eq!(reach(3, GroupScore::Max), [true; 6]);
}

#[test]
fn top_p_takes_no_more_than_it_needs() {
    let chosen = |p| {
        let mut ids = [9; 4];
        top_p(&[0.1, 0.5, 0.25, 0.15], p, &mut ids);
        ids.iter().copied().take_while(|&id| id != NO_EXPERT).collect::<Vec<_>>()
    };
    assert_eq!(chosen(0.4), [1]);
    assert_eq!(chosen(0.5), [1]);
    assert_eq!(chosen(0.51), [1, 2]);
    assert_eq!(chosen(0.8), [1, 2, 3]);
    assert_eq!(chosen(1.0), [1, 2, 3, 0]);
}

#[test]
fn only_positive_gates_are_chosen() {
    let mut ids = [9; 4];
    positive(&[0.0, 0.5, 0.0, 0.7], &mut ids);
    assert_eq!(ids, [3, 1, NO_EXPERT, NO_EXPERT]);
    positive(&[0.0; 4], &mut ids);
    assert_eq!(ids, [NO_EXPERT; 4]);
    assert_eq!(compact(&[3, 1, NO_EXPERT, 2, NO_EXPERT, NO_EXPERT], 3), (vec![3, 1, 2, NO_EXPERT], 2));
    assert_eq!(compact(&[NO_EXPERT; 4], 2), (vec![NO_EXPERT; 2], 1));
}

#[test]
fn the_experts_of_a_token_are_those_that_took_it() {
    let scores = [0.1, 0.9, 0.5, 0.4, 0.3, 0.3];
    assert_eq!(invert(&[vec![0, 1], vec![0]], &scores), (vec![1, 0, 0, NO_EXPERT, NO_EXPERT, NO_EXPERT], 2));
}
