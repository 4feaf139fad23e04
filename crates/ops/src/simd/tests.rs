use super::*;

/// Lists numbers next to those where rounding to bf16 changes, infinities and NaN, of both signs.
fn edges() -> Vec<f32> {
    let edges = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1_7fff, 0x1_8000, 0x1_8001];
    let tops = [0, 0x007f_0000, 0x3f80_0000, 0x7f7e_0000, 0x7f7f_0000, 0x7f80_0000, 0x7fa0_0000, 0x7fff_0000];
    let bits = tops.iter().flat_map(|top: &u32| edges.map(|edge: u32| top.wrapping_add(edge)));
    bits.flat_map(|bits| [bits, bits ^ 0x8000_0000]).map(f32::from_bits).collect()
}

kernel! {
    fn round<S: Level>(values: &[f32; 32], to: &mut [bf16; 32]) {
        let step = 2 * S::WIDTH;
        for (from, to) in values.chunks_exact(step).zip(to.chunks_exact_mut(step)) {
            // SAFETY: two vectors are read and the half of them is written.
            unsafe {
                let both = [S::load(from.as_ptr()), S::load(from[S::WIDTH..].as_ptr())];
                S::store(to.as_mut_ptr().cast(), S::round(both));
            }
        }
    }
}

#[test]
fn levels_round_as_elements_are_stored() {
    let values = edges();
    for (isa, first) in crate::Isa::available().into_iter().flat_map(|isa| (0..values.len()).map(move |at| (isa, at))) {
        let values: [f32; 32] = std::array::from_fn(|i| values[(first + i) % values.len()]);
        let mut rounded = [bf16::ZERO; 32];
        round(isa, &values, &mut rounded);
        assert_eq!(rounded.map(bf16::to_bits), values.map(|x| bf16::store(x).to_bits()), "{isa:?}");
    }
}

kernel! {
/// Computes the sums of the lanes of four vectors, each alone and all together.
    fn sums<S: Level>(values: &[f32; 4 * LANES], alone: &mut [f32; 4], together: &mut [f32; 4]) {
        // SAFETY: each vector is inside.
        let vectors: [_; 4] = std::array::from_fn(|i| unsafe { S::load(values[i * S::WIDTH..].as_ptr()) });
        (*alone, *together) = (vectors.map(S::total), S::totals(vectors));
    }
}

#[test]
fn sums_of_lanes_have_the_same_bits_alone_and_together_and_are_those_of_halves() {
    let values: [f32; 4 * LANES] = std::array::from_fn(|i| ((i * 37 + 11) % 101) as f32 * 1.37 - 60.3);
    for isa in crate::Isa::available() {
        let (mut alone, mut together) = ([0.0; 4], [0.0; 4]);
        sums(isa, &values, &mut alone, &mut together);
        assert_eq!(alone.map(f32::to_bits), together.map(f32::to_bits), "{isa:?}");
        let width = match isa {
            crate::Isa::Portable => 4,
            crate::Isa::Neon | crate::Isa::Avx2 => 8,
            _ => 16,
        };
        for (sum, lanes) in alone.iter().zip(values.chunks_exact(width)) {
            let mut halves = lanes.to_vec();
            while let Some(half) = Some(halves.len() / 2).filter(|&half| half > 0) {
                halves = (0..half).map(|i| halves[i] + halves[half + i]).collect();
            }
            assert_eq!(*sum, halves[0], "{isa:?}");
        }
    }
}

kernel! {
/// Widens 32 elements of each type; bf16 in their order in memory.
    fn widen<S: Level>(pairs: &[bf16; 32], halves: &[f16; 32], to: &mut [[f32; 32]; 2]) {
        for at in (0..32).step_by(2 * S::WIDTH) {
            // SAFETY: two vectors of elements are there.
            let vectors = unsafe { S::load_pairs(pairs[at..].as_ptr()) };
            for (odd, vector) in vectors.into_iter().enumerate() {
                let mut lanes = [0.0; LANES];
                // SAFETY: a level has at most as many lanes.
                unsafe { S::store(lanes.as_mut_ptr(), vector) };
                lanes[..S::WIDTH].iter().enumerate().for_each(|(i, &lane)| to[0][at + 2 * i + odd] = lane);
            }
        }
        for at in (0..32).step_by(S::WIDTH) {
            // SAFETY: a vector of elements is there, and room for one.
            unsafe { S::store(to[1][at..].as_mut_ptr(), S::load_halves(halves[at..].as_ptr())) };
        }
    }
}

#[test]
fn levels_widen_elements_as_they_are_loaded() {
    let bits = |i: usize, step: usize| ((i * step) % 0x1_0000) as u16;
    for (isa, round) in crate::Isa::available().into_iter().flat_map(|isa| (0..200).map(move |round| (isa, round))) {
        let pairs: [bf16; 32] = std::array::from_fn(|i| bf16::from_bits(bits(32 * round + i, 9973)));
        let halves: [f16; 32] = std::array::from_fn(|i| f16::from_bits(bits(32 * round + i, 9967)));
        let mut widened = [[0.0; 32]; 2];
        widen(isa, &pairs, &halves, &mut widened);
        for (i, (&x, &y)) in pairs.iter().zip(&halves).enumerate() {
            assert_eq!(widened[0][i].to_bits(), x.load().to_bits(), "{isa:?} {x:?}");
            let (found, expected) = (widened[1][i], y.load());
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{isa:?} {y:?}: {found}");
        }
    }
}
