use std::fs;

use moeworks_model::safetensors::Payload;
use moeworks_moe::Routing;
use moeworks_ops::Context;

use super::*;

fn sample(choices: &[[u32; 2]]) -> RoutingSample {
    let ids: Vec<u32> = choices.as_flattened().to_vec();
    let routing = Routing::new(&Context::cpu(1), 8, 2, &ids, &vec![0.5; ids.len()]).unwrap();
    let mut sample = RoutingSample::new((0..choices.len() as u32).collect());
    sample.add(3, &routing);
    sample
}

#[test]
fn agreement_is_the_share_of_choices_that_stayed_in_whatever_order() {
    let before = sample(&[[0, 1], [2, 3], [4, 5], [6, 7]]);
    let now = sample(&[[1, 0], [2, 4], [5, 6], [0, 1]]);
    assert_eq!(now.agreement(3, &before), Some(0.5));
    assert_eq!(now.agreement(3, &now), Some(1.0));
    assert_eq!(now.agreement(2, &before), None, "no such layer");
}

#[test]
fn samples_of_other_tokens_are_not_compared() {
    let before = sample(&[[0, 1], [2, 3]]);
    assert_eq!(sample(&[[0, 1]]).agreement(3, &before), None);
    let mut other = before.clone();
    other.token_ids[1] = 77;
    assert_eq!(other.agreement(3, &before), None);
}

#[test]
fn parts_add_up_to_one_sample() {
    let ctx = Context::cpu(1);
    let mut whole = RoutingSample::new(vec![9, 8]);
    for ids in [[0, 1], [2, 3]] {
        whole.add(3, &Routing::new(&ctx, 8, 2, &ids, &[0.5; 2]).unwrap());
    }
    assert_eq!(whole.layers, sample(&[[0, 1], [2, 3]]).layers);
}

#[test]
fn a_sample_reads_back_from_a_checkpoint_also_with_uneven_choices() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(RoutingSample::load(dir.path()).unwrap(), None);
    let mut written = sample(&[[0, 1], [2, 3], [4, 5]]);
    written.layers.insert(7, vec![vec![], vec![1, 2, 3], vec![5]]);
    written.layers.insert(9, vec![vec![]; 3]);
    written.save(dir.path()).unwrap();
    assert_eq!(RoutingSample::load(dir.path()).unwrap(), Some(written));
}

#[test]
fn a_damaged_sample_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("routing.safetensors");
    fs::write(&path, [1, 2, 3]).unwrap();
    assert!(RoutingSample::load(dir.path()).unwrap_err().to_string().contains("routing.safetensors"));
    let floats = [TensorBytes {
        name: "token_ids".into(),
        dtype: FileDType::F32,
        shape: vec![1],
        bytes: Payload::Lent(&[0; 4]),
    }];
    safetensors::write(&path, &floats, &BTreeMap::new()).unwrap();
    assert!(RoutingSample::load(dir.path()).unwrap_err().to_string().contains("U32"));
    let flat = [
        TensorBytes { name: "token_ids".into(), dtype: FileDType::U32, shape: vec![1], bytes: Payload::Lent(&[0; 4]) },
        TensorBytes {
            name: "layers.0.expert_ids".into(),
            dtype: FileDType::U32,
            shape: vec![1],
            bytes: Payload::Lent(&[0; 4]),
        },
    ];
    safetensors::write(&path, &flat, &BTreeMap::new()).unwrap();
    assert!(RoutingSample::load(dir.path()).unwrap_err().to_string().contains("two dims"));
}

#[test]
fn runs_of_several_ranks_join_to_one_sample() {
    let whole = sample(&[[0, 1], [2, 3], [4, 5], [6, 7]]);
    let of_tokens = |range: std::ops::Range<usize>| {
        let mut part = whole.clone();
        part.layers.get_mut(&3).unwrap().drain(range);
        part
    };
    // The first rank has one token, the second none, the third the rest.
    let parts = [of_tokens(1..4), of_tokens(0..4), of_tokens(0..1)];
    let mut given = Vec::new();
    for part in &parts {
        let give = |own: &[u32]| {
            given.extend(own);
            Ok::<_, ()>(own.to_vec())
        };
        part.joined([3], give).unwrap();
    }
    assert_eq!(parts[1].joined([3], |_| Ok::<_, ()>(given.clone())).unwrap(), whole);
    assert_eq!(parts[0].joined([3], |_| Err("gone")), Err("gone"));
}
