//! The options of `advise`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(
    before_help = "Usual use:\n  moeworks advise runs/NAME                     what holds the run back, and the settings to try\n  \
                         moeworks advise runs/NAME --try               tries each setting for ten steps from the last checkpoint\n  \
                         moeworks advise runs/NAME --memory 64GB       for a machine with this much memory"
)]
pub(crate) struct AdviseArgs {
    /// Run folder; nothing in it is changed
    #[arg(value_name = "RUN")]
    pub(crate) run: PathBuf,
    /// Number of steps at the end of the run that are judged (default: a fifth of them, from 5 to 100)
    #[arg(long, value_name = "N")]
    pub(crate) last: Option<usize>,
    /// Trace of the run, which `train --trace` wrote (default: trace.json in the run, if it is there)
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Memory of the machine that trains, such as 64GB (default: this machine's)
    #[arg(long, value_name = "SIZE", value_parser = memory_size)]
    pub(crate) memory: Option<u64>,
    /// Try each setting for some steps from the run's last checkpoint, in new folders, and print what it gave
    #[arg(long = "try")]
    pub(crate) is_try: bool,
    /// Number of steps of each trial
    #[arg(long, value_name = "N", default_value_t = 10, requires = "is_try")]
    pub(crate) steps: u64,
    /// Folder of the trials (default: the run's name with -tries, beside it)
    #[arg(long, value_name = "DIR", requires = "is_try")]
    pub(crate) out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses a size in bytes, with a unit or without.
fn memory_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 9] = [
        ("KIB", 1024.0),
        ("MIB", 1_048_576.0),
        ("GIB", 1_073_741_824.0),
        ("TIB", 1_099_511_627_776.0),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
        ("B", 1.0),
    ];
    let upper = text.trim().to_ascii_uppercase();
    let unit = UNITS.iter().find(|(unit, _)| upper.ends_with(unit));
    let (number, factor) =
        unit.map_or((upper.as_str(), 1.0), |(unit, factor)| (&upper[..upper.len() - unit.len()], *factor));
    let bytes = number.trim().parse::<f64>().unwrap_or(f64::NAN) * factor;
    if bytes.is_finite() && (1.0..=1e18).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err("must be a size such as 64GB, 512MiB or a number of bytes".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_thousands_or_of_1024() {
        let sizes = ["64GB", "512 MiB", "1000", "1.5kB"].map(|text| memory_size(text).unwrap());
        assert_eq!(sizes, [64_000_000_000, 512 << 20, 1000, 1500]);
        for text in ["", "GB", "-1GB", "0", "nan", "inf", "1e30TB", "12 apples"] {
            assert!(memory_size(text).is_err(), "{text}");
        }
    }
}
