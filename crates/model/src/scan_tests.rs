use super::*;

fn scanned(stored: Stored, shape: &[usize], bytes: &[u8]) -> Vec<NotFinite> {
    let region = Region { name: "x".to_owned(), shape: shape.to_vec(), stored, bytes, is_of_experts: false };
    scan(&Context::cpu(2), &[region], u64::MAX).not_finite
}

#[test]
fn numbers_that_are_none_are_counted_and_the_first_is_placed() {
    let mut x = vec![1.0_f32; 2_100_000];
    (x[1_050_001], x[1_050_002], x[2_099_999]) = (f32::NEG_INFINITY, f32::NAN, f32::NAN);
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let found = scanned(Stored::F32, &[2, 1050, 1000], &bytes);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].count, found[0].first, &*found[0].place), (3, f32::NEG_INFINITY, &[1, 0, 1][..]));
    assert!(found[0].to_string().contains("3 numbers that are NaN or infinite, the first (infinity) at [1, 0, 1]"));
}

#[test]
fn halves_and_eight_bit_floats_are_looked_at() {
    let halves = |stored, bits: u16| scanned(stored, &[3], &[0_u16, bits, 0x3c00].map(u16::to_le_bytes).concat()).len();
    for (stored, bits, expected) in [
        (Stored::F16, 0x7c00, 1),
        (Stored::F16, 0xfe00, 1),
        (Stored::F16, 0x7bff, 0),
        (Stored::Bf16, 0x7f80, 1),
        (Stored::Bf16, 0xffc0, 1),
        (Stored::Bf16, 0x7f7f, 0),
    ] {
        assert_eq!(halves(stored, bits), expected, "{stored:?} {bits:x}");
    }
    assert_eq!(scanned(Stored::F8E4M3, &[4], &[0x7e, 0x7f, 0xff, 0xfe])[0].count, 2);
    assert_eq!(scanned(Stored::Powers, &[3], &[254, 255, 0])[0].place, [1]);
}

/// Random bytes with finite scales have no faults; an infinite scale spoils its block.
#[test]
fn scales_of_every_kind_of_block_are_looked_at() {
    for (dtype, name) in crate::gguf::block_types() {
        let (size, len) = (dtype.size(), dtype.block_len());
        let mut bytes = vec![0x35_u8; 3 * size];
        assert_eq!(scanned(Stored::Blocks(dtype), &[3 * len], &bytes), [], "{name}");
        let scale: (usize, &[u8]) = match half_scales(dtype) {
            [] => (0, &[255]),
            [first, ..] => (*first, &[0, 0x7c]),
        };
        bytes[size + scale.0..size + scale.0 + scale.1.len()].copy_from_slice(scale.1);
        let found = scanned(Stored::Blocks(dtype), &[3 * len], &bytes);
        assert!(found[0].count > 0 && (len..2 * len).contains(&found[0].place[0]), "{name}: {found:?}");
    }
}

#[test]
fn experts_of_a_large_model_are_left_out() {
    let nan = f32::NAN.to_le_bytes();
    let region = |name: &str, is_of_experts| {
        let shape = vec![1];
        Region { name: name.to_owned(), shape, stored: Stored::F32, bytes: &nan[..], is_of_experts }
    };
    let regions = [region("a", true), region("b", false)];
    let check = scan(&Context::cpu(1), &regions, 7);
    assert_eq!((check.num_bytes, check.num_checked, check.not_finite.len()), (8, 4, 1));
    assert_eq!(check.not_finite[0].tensor, "b");
    let problem = scan(&Context::cpu(1), &regions, 8).problem().unwrap();
    assert!(problem.contains("\"a\" holds 1 number that is") && problem.contains("so does \"b\""), "{problem}");
}
