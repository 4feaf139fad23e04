//! The version of this program, for `--version`.

use std::sync::OnceLock;

use moeworks_infer::system::System;
use moeworks_ops::Isa;

use crate::environment;

/// Returns the version, with the commit and its date if the program was built from a checkout.
pub(crate) fn short() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| format!("{}{}", env!("CARGO_PKG_VERSION"), option_env!("MOEWORKS_COMMIT").unwrap_or_default()))
}

/// Returns the target that the program is built for.
pub(crate) fn target() -> &'static str {
    env!("MOEWORKS_TARGET")
}

/// Returns the version with the target, this machine's instruction sets and the kernels chosen for it.
pub(crate) fn long() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| {
        let found = System::default().processors().instructions;
        let found = if found.is_empty() { "not known".to_owned() } else { found.join(" ") };
        format!("{}\ntarget:       {}\ninstructions: {found}\nkernels:      {}", short(), target(), kernels())
    })
}

/// Describes the kernels that this machine computes with.
pub(crate) fn kernels() -> &'static str {
    match environment::machine().isa() {
        Isa::Portable => "plain code, without vector instructions of their own",
        Isa::Neon => "NEON",
        Isa::Avx2 => "AVX2",
        Isa::Avx512 if Isa::best() > Isa::Avx512 => "AVX-512, whose bf16 products are slower here than those of f32",
        Isa::Avx512 => "AVX-512",
        Isa::Avx512Bf16 => "AVX-512 with bf16 products",
        Isa::Amx => "AVX-512 with bf16 products, and AMX tiles",
        Isa::AmxF32 => "AVX-512 with bf16 products, and AMX tiles also for f32",
    }
}
