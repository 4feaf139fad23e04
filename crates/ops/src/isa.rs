//! Instruction sets that kernels are written for, chosen once at start.

use std::sync::OnceLock;

/// A level of vector instructions. A kernel exists for each level, or falls back to the one below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain code as the compiler vectorises it.
    Portable,
    /// aarch64 with NEON, which all have: pairs of its vectors, so 8 f32 lanes. bf16 is widened. Tested by emulation,
    /// never timed.
    Neon,
    /// x86-64 with AVX2, FMA and F16C: 8 f32 lanes.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL: 16 f32 lanes.
    Avx512,
    /// [`Isa::Avx512`] and the bf16 dot product (AVX-512 BF16).
    Avx512Bf16,
    /// [`Isa::Avx512Bf16`] and the AMX tiles with their bf16 product, on Linux.
    Amx,
    /// [`Isa::Amx`], with f32 products of many rows in tiles as well, each as six bf16 products: as exact, and twice
    /// as fast in a loop of its own. Chosen only [on demand](Isa::with_f32_tiles): on a host whose other guests use
    /// much power, tiles take three times as long and multiply-adds one and a half times.
    AmxF32,
}

impl Isa {
    /// Returns the level whose kernels are fastest on this machine: the best one, but without the bf16 dot product if
    /// that is slower than f32 multiply-adds. (On some CPUs it is half as fast for the same number of products, and
    /// bf16 matrices are better widened while they are packed.) Measured once per process, in under a millisecond.
    #[must_use]
    pub fn detect() -> Self {
        static FASTEST: OnceLock<Isa> = OnceLock::new();
        *FASTEST.get_or_init(|| match Self::best() {
            Self::Avx512Bf16 if !crate::peak::is_bf16_dot_fast() => Self::Avx512,
            best => best,
        })
    }

    /// Returns [`Isa::AmxF32`] for [`Isa::Amx`] if it is `wanted`, and this level otherwise.
    #[must_use]
    pub fn with_f32_tiles(self, wanted: bool) -> Self {
        if wanted && self == Self::Amx { Self::AmxF32 } else { self }
    }

    /// Returns whether bf16 is multiplied in AMX tiles.
    pub(crate) fn has_tiles(self) -> bool {
        self >= Self::Amx
    }

    /// Returns the highest level whose instructions this machine has, except [`Isa::AmxF32`], which needs those of
    /// [`Isa::Amx`].
    #[must_use]
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi2");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512 && is_x86_feature_detected!("avx512bf16") {
                return if crate::gemm::amx::is_available() { Self::Amx } else { Self::Avx512Bf16 };
            }
            if avx512 {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        if cfg!(target_arch = "aarch64") { Self::Neon } else { Self::Portable }
    }

    /// Lists every level that this machine can run, lowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let best = Self::best();
        let all: &[Self] = if cfg!(target_arch = "aarch64") {
            &[Self::Portable, Self::Neon]
        } else {
            &[Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx, Self::AmxF32]
        };
        all.iter().copied().filter(|&isa| isa <= best || isa.has_tiles() && best.has_tiles()).collect()
    }
}
