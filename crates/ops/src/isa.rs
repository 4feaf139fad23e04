//! Instruction sets that kernels are written for, chosen once at start.

use std::sync::OnceLock;

/// A level of vector instructions. A kernel exists for each, or falls back to the one below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler makes of plain code.
    Portable,
    /// aarch64 with NEON, as all have: pairs of its vectors, so 8 f32 lanes. bf16 is widened. Tested by emulation, never timed.
    Neon,
    /// x86-64 with AVX2, FMA and F16C: 8 f32 lanes.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL: 16 f32 lanes.
    Avx512,
    /// [`Isa::Avx512`] and the bf16 dot product (AVX-512 BF16).
    Avx512Bf16,
    /// [`Isa::Avx512Bf16`] and the tiles of AMX with their bf16 product, on Linux.
    Amx,
    /// [`Isa::Amx`], and products of f32 of many rows in tiles, too, each as six of bf16: as exact, and in a loop of their own twice as
    /// fast. Only where `MOEWORKS_F32_TILES` asks for it: on a host whose other guests leave it little power tiles take three times as
    /// long, multiply-adds half as long again.
    AmxF32,
}

impl Isa {
    /// The level whose kernels are fastest here: the best one, but without the bf16 dot product where that is slower
    /// than f32 multiply-adds. (On some processors it is: it is then half as fast for the same number of products, and
    /// bf16 matrices are better widened while they are packed.) Measured once for a process, in under a millisecond. With
    /// `MOEWORKS_F32_TILES=1` in the environment [`Isa::AmxF32`] where there are tiles.
    #[must_use]
    pub fn detect() -> Self {
        static FASTEST: OnceLock<Isa> = OnceLock::new();
        *FASTEST.get_or_init(|| match Self::best() {
            Self::Avx512Bf16 if !crate::peak::is_bf16_dot_fast() => Self::Avx512,
            Self::Amx if std::env::var("MOEWORKS_F32_TILES").is_ok_and(|value| value == "1") => Self::AmxF32,
            best => best,
        })
    }

    /// Whether bf16 is multiplied in tiles.
    pub(crate) fn has_tiles(self) -> bool {
        self >= Self::Amx
    }

    /// The highest level whose instructions this machine has, but for [`Isa::AmxF32`], which has those of [`Isa::Amx`].
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

    /// Every level this machine can run, lowest first: tests run all of them.
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
