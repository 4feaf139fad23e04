//! CPUs and their vector instructions.

use std::collections::BTreeSet;

use super::System;

/// The names that x86-64 and aarch64 give to vector instructions that kernels use or could use.
const INSTRUCTIONS: [&str; 16] = [
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
];

/// The CPUs of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processors {
    /// The model name of the first CPU.
    pub model: Option<String>,
    /// Logical cores: a core with two threads counts twice.
    pub num_logical: usize,
    /// Physical cores, if the system tells.
    pub num_physical: Option<usize>,
    /// The vector instructions, by the names of the system.
    pub instructions: Vec<String>,
}

impl System {
    /// Reads the CPUs from `/proc/cpuinfo`.
    #[must_use]
    pub fn processors(&self) -> Processors {
        let text = self.text("proc/cpuinfo").unwrap_or_default();
        let field = |block: &str, names: &[&str]| {
            let pair = |line: &str| {
                line.split_once(':').map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
            };
            block.lines().filter_map(pair).find(|(name, _)| names.contains(&name.as_str())).map(|(_, value)| value)
        };
        let blocks: Vec<&str> = text.split("\n\n").filter(|block| field(block, &["processor"]).is_some()).collect();
        let core = |block: &&str| Some((field(block, &["physical id"])?, field(block, &["core id"])?));
        let cores: Option<BTreeSet<(String, String)>> = blocks.iter().map(core).collect();
        let flags = field(&text, &["flags", "Features"]).unwrap_or_default();
        let flags: BTreeSet<&str> = flags.split_whitespace().collect();
        Processors {
            model: field(&text, &["model name", "Model", "Hardware", "cpu model"]),
            num_logical: blocks.len(),
            num_physical: cores.map(|cores| cores.len()).filter(|&count| count > 0),
            instructions: INSTRUCTIONS
                .iter()
                .filter(|name| flags.contains(*name))
                .map(|&name| name.to_owned())
                .collect(),
        }
    }
}
