//! Layers shared out over stages.

use moeworks_plan::split_layers;

#[test]
fn equal_layers_are_shared_out_evenly() {
    assert_eq!(split_layers(&[1.0; 8], 4), [2, 2, 2, 2]);
    assert_eq!(split_layers(&[1.0; 3], 3), [1, 1, 1]);
    let mut counts = split_layers(&[1.0; 7], 3);
    counts.sort_unstable();
    assert_eq!(counts, [2, 2, 3]);
}

#[test]
fn a_costly_head_leaves_its_stage_fewer_layers() {
    assert_eq!(split_layers(&[1.0, 1.0, 1.0, 1.0, 1.0, 3.0], 2), [4, 2]);
    assert_eq!(split_layers(&[1.0, 1.0, 1.0, 9.0], 2), [3, 1]);
}
