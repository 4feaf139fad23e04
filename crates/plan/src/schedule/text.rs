//! The text form of a schedule.
//!
//! ```text
//! schedule dualpipe                                 # a name: the rest of the line
//! microbatches 0..8: stages on ranks 0 1 2 3        # for each copy of the weights: microbatches, rank of each stage
//! microbatches 8..16: stages on ranks 3 2 1 0
//! moe layers 1 1 1 1                                # for each stage, only if all-to-alls are actions of their own
//! rank 0: 0F0, 0F1, 0F2&0BW0, 0B1, 0W1              # for each rank its list; & joins an overlapped pair
//! rank 1: ...
//! ```
//!
//! Lines may be empty, and `#` begins a comment. [`super::Action`] says how an action is written. What is read takes
//! memory in proportion to the text, whatever the numbers in it.

use std::fmt;
use std::str::FromStr;

use super::action::{Action, Chain, Entry};
use super::{Schedule, WeightCopy};

/// Copies of the weights that a schedule may have.
pub(super) const MAX_COPIES: usize = 16;

/// A text that is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// A line that is not the expected one.
    #[error("line {line}: {text:?} is not the expected line: it must be {expected}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// The text of the line, cut off where it is long.
        text: String,
        /// The line that would be right.
        expected: String,
    },
    /// An entry of a rank's list that cannot be read.
    #[error("line {line}: rank {rank}, position {position}: {problem}")]
    Entry {
        /// The line, from 1.
        line: usize,
        /// The rank.
        rank: usize,
        /// The position in the rank's list, from 0.
        position: usize,
        /// The problem, with what would be right.
        problem: String,
    },
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "schedule {}", self.name)?;
        let mut first = 0_u64;
        for copy in &self.copies {
            let end = first + u64::from(copy.num_microbatches);
            writeln!(f, "microbatches {first}..{end}: stages on ranks {}", spaced(&copy.stage_ranks))?;
            first = end;
        }
        if !self.moe_layers.is_empty() {
            writeln!(f, "moe layers {}", spaced(&self.moe_layers))?;
        }
        for (rank, entries) in self.ranks.iter().enumerate() {
            write!(f, "rank {rank}:")?;
            for (position, entry) in entries.iter().enumerate() {
                f.write_str(if position == 0 { " " } else { ", " })?;
                write!(f, "{entry}")?;
            }
            f.write_str("\n")?;
        }
        Ok(())
    }
}

fn spaced<T: ToString>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(" ")
}

/// A line without its comment, and its number from 1.
#[derive(Clone, Copy)]
struct Line<'a> {
    number: usize,
    text: &'a str,
}

impl Line<'_> {
    fn error(&self, expected: impl Into<String>) -> ScheduleError {
        ScheduleError::Line { line: self.number, text: self.text.chars().take(60).collect(), expected: expected.into() }
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        let mut lines = text.lines().zip(1..).map(|(text, number)| {
            let text = text.split_once('#').map_or(text, |(before, _)| before).trim();
            Line { number, text }
        });
        let mut lines = lines.by_ref().filter(|line| !line.text.is_empty()).peekable();
        let first = lines.next().unwrap_or(Line { number: 1, text: "" });
        let name = first.text.strip_prefix("schedule ").map(str::trim);
        let name = name.ok_or_else(|| first.error("\"schedule NAME\""))?.to_owned();
        let mut schedule = Self { name, copies: Vec::new(), moe_layers: Vec::new(), ranks: Vec::new() };
        while let Some(line) = lines.next_if(|line| line.text.starts_with("microbatches")) {
            let copy = parse_copy(line, &schedule)?;
            schedule.copies.push(copy);
        }
        if schedule.copies.is_empty() {
            let line = lines.next().unwrap_or(Line { number: first.number + 1, text: "" });
            return Err(line.error("\"microbatches 0..M: stages on ranks R R ...\""));
        }
        if let Some(line) = lines.next_if(|line| line.text.starts_with("moe")) {
            schedule.moe_layers = parse_layers(line, schedule.num_stages())?;
        }
        for line in lines {
            let rank = schedule.ranks.len();
            let entries = line.text.strip_prefix("rank ").and_then(|rest| rest.split_once(':'));
            let entries = entries.filter(|(number, _)| number.trim() == rank.to_string());
            let (_, entries) =
                entries.ok_or_else(|| line.error(format!("\"rank {rank}: \" and the actions of the rank")))?;
            schedule.ranks.push(parse_entries(line.number, rank, entries)?);
        }
        Ok(schedule)
    }
}

fn parse_copy(line: Line<'_>, before: &Schedule) -> Result<WeightCopy, ScheduleError> {
    let first: u64 = before.copies.iter().map(|copy| u64::from(copy.num_microbatches)).sum();
    let num_stages = match before.num_stages() {
        0 => "for each stage the rank that holds it".to_owned(),
        stages => format!("the ranks of {stages} stages, as many as the first copy has"),
    };
    let wrong = || line.error(format!("\"microbatches {first}..END: stages on ranks \" and {num_stages}"));
    if before.copies.len() == MAX_COPIES {
        return Err(line.error(format!("\"rank 0: \" and its actions: there are at most {MAX_COPIES} copies")));
    }
    let (range, ranks) = line.text["microbatches".len()..].split_once(':').ok_or_else(wrong)?;
    let (start, end) = range.trim().split_once("..").ok_or_else(wrong)?;
    let end: u32 = end.parse().map_err(|_| wrong())?;
    let size = u64::from(end).checked_sub(first).filter(|&size| size > 0 && start == first.to_string());
    let num_microbatches = size.and_then(|size| u32::try_from(size).ok()).ok_or_else(wrong)?;
    let ranks = ranks.trim().strip_prefix("stages on ranks").ok_or_else(wrong)?;
    let stage_ranks: Vec<u32> =
        ranks.split_whitespace().map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
    let has_right_len =
        if before.copies.is_empty() { !stage_ranks.is_empty() } else { stage_ranks.len() == before.num_stages() };
    if has_right_len { Ok(WeightCopy { num_microbatches, stage_ranks }) } else { Err(wrong()) }
}

fn parse_layers(line: Line<'_>, num_stages: usize) -> Result<Vec<u16>, ScheduleError> {
    let wrong = || line.error(format!("\"moe layers \" and a number of layers for each of {num_stages} stages"));
    let layers = line.text.strip_prefix("moe layers").ok_or_else(wrong)?;
    let layers: Vec<u16> = layers.split_whitespace().map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
    if layers.len() == num_stages { Ok(layers) } else { Err(wrong()) }
}

fn parse_entries(line: usize, rank: usize, text: &str) -> Result<Vec<Entry>, ScheduleError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let entries = text.split(',').enumerate().map(|(position, text)| {
        parse_entry(text.trim()).map_err(|problem| ScheduleError::Entry { line, rank, position, problem })
    });
    entries.collect()
}

fn parse_entry(text: &str) -> Result<Entry, String> {
    let action = |text: &str| text.trim().parse::<Action>().map_err(|error| error.to_string());
    let Some((forward, backward)) = text.split_once('&') else {
        return Ok(Entry::One(action(text)?));
    };
    let (forward, backward) = (action(forward)?, action(backward)?);
    if is_pair(forward, backward) {
        return Ok(Entry::Pair(forward, backward));
    }
    Err(format!("{forward} and {backward} are not a pair: expected an F and then a B or BW, as in 0F1&0BW0"))
}

/// Returns whether the actions are an F of a whole stage and a B or BW of a whole stage.
pub(super) fn is_pair(forward: Action, backward: Action) -> bool {
    let is_whole = |action: Action| action.kind.is_compute() && !action.kind.is_part();
    let chains = (forward.kind.chain(), backward.kind.chain());
    is_whole(forward) && is_whole(backward) && chains == (Chain::Forward, Chain::Backward)
}
