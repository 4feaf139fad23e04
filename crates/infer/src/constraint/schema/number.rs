//! Numbers of JSON within bounds.

use crate::constraint::grammar::{Grammar, NodeId};

/// Digits of a whole number at most, and of a fraction.
const MAX_DIGITS: u32 = 18;
const MAX_FRACTION: u32 = 16;
/// The largest whole number that is written.
pub(super) const LARGEST: i64 = 999_999_999_999_999_999;

/// A bound of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) value: i64,
    /// Says whether the bound itself is left out.
    pub(super) is_open: bool,
}

/// The numbers that are possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) least: Option<Bound>,
    pub(super) most: Option<Bound>,
}

/// Adds a whole number.
pub(super) fn integer(grammar: &mut Grammar, bounds: Bounds) -> NodeId {
    let least = bounds.least.map_or(-LARGEST, |bound| bound.value.saturating_add(bound.is_open.into()));
    let most = bounds.most.map_or(LARGEST, |bound| bound.value.saturating_sub(bound.is_open.into()));
    let (least, most) = (least.clamp(-LARGEST, LARGEST), most.clamp(-LARGEST, LARGEST));
    let mut nodes = Vec::new();
    if most >= 0 && least <= most {
        nodes.push(between(grammar, least.max(0).unsigned_abs(), most.unsigned_abs()));
    }
    if least < 0 && least <= most {
        let nearest = if most < 0 { most.unsigned_abs() } else { 1 };
        let (sign, digits) = (grammar.literal("-"), between(grammar, nearest, least.unsigned_abs()));
        nodes.push(grammar.sequence(vec![sign, digits]));
    }
    grammar.alternatives(nodes)
}

/// Adds a number, perhaps with a fraction; with an exponent only where there are no bounds.
pub(super) fn number(grammar: &mut Grammar, bounds: Bounds) -> NodeId {
    if bounds == Bounds::default() {
        return unbounded(grammar);
    }
    let Bounds { least, most } = bounds;
    let zero = Bound { value: 0, is_open: false };
    let mut nodes = Vec::new();
    if most.is_none_or(|most| most.value >= 0) {
        let least = least.filter(|least| least.value >= 0).unwrap_or(zero);
        nodes.push(positive(grammar, least, most));
    }
    if least.is_none_or(|least| least.value < 0) {
        let turned = |bound: Bound| Bound { value: bound.value.saturating_neg(), ..bound };
        let nearest = most.filter(|most| most.value <= 0).map_or(zero, turned);
        let (sign, digits) = (grammar.literal("-"), positive(grammar, nearest, least.map(turned)));
        nodes.push(grammar.sequence(vec![sign, digits]));
    }
    grammar.alternatives(nodes)
}

fn unbounded(grammar: &mut Grammar) -> NodeId {
    let sign = grammar.literal("-");
    let (sign, whole) = (grammar.optional(sign), between(grammar, 0, LARGEST.unsigned_abs()));
    let (fraction, e) = (fraction(grammar), grammar.literal("e"));
    let large_e = grammar.literal("E");
    let e = grammar.alternatives(vec![e, large_e]);
    let (plus, minus, digit) = (grammar.literal("+"), grammar.literal("-"), grammar.range(b'0', b'9'));
    let sign_of_exponent = grammar.alternatives(vec![plus, minus]);
    let sign_of_exponent = grammar.optional(sign_of_exponent);
    let digits = grammar.repeat(digit, 1, Some(2));
    let exponent = grammar.sequence(vec![e, sign_of_exponent, digits]);
    let (fraction, exponent) = (grammar.optional(fraction), grammar.optional(exponent));
    grammar.sequence(vec![sign, whole, fraction, exponent])
}

/// Adds a number that is not negative.
fn positive(grammar: &mut Grammar, least: Bound, most: Option<Bound>) -> NodeId {
    let most = most.unwrap_or(Bound { value: LARGEST, is_open: false });
    let (least_value, most_value) = (least.value.unsigned_abs(), most.value.unsigned_abs());
    let mut nodes = Vec::new();
    let first_whole = least_value + u64::from(least.is_open);
    if least_value < most_value && least.is_open {
        let (whole, fraction) = (between(grammar, least_value, least_value), fraction_above_zero(grammar));
        nodes.push(grammar.sequence(vec![whole, fraction]));
    }
    if first_whole < most_value {
        let (whole, fraction) = (between(grammar, first_whole, most_value - 1), fraction(grammar));
        let fraction = grammar.optional(fraction);
        nodes.push(grammar.sequence(vec![whole, fraction]));
    }
    let is_single = least_value == most_value && least.is_open;
    if least_value <= most_value && !most.is_open && !is_single {
        let (whole, point, zero) =
            (between(grammar, most_value, most_value), grammar.literal("."), grammar.literal("0"));
        let zeros = grammar.repeat(zero, 1, Some(MAX_FRACTION));
        let zeros = grammar.sequence(vec![point, zeros]);
        let zeros = grammar.optional(zeros);
        nodes.push(grammar.sequence(vec![whole, zeros]));
    }
    grammar.alternatives(nodes)
}

fn fraction(grammar: &mut Grammar) -> NodeId {
    let (point, digit) = (grammar.literal("."), grammar.range(b'0', b'9'));
    let digits = grammar.repeat(digit, 1, Some(MAX_FRACTION));
    grammar.sequence(vec![point, digits])
}

fn fraction_above_zero(grammar: &mut Grammar) -> NodeId {
    let (point, digit, last) = (grammar.literal("."), grammar.range(b'0', b'9'), grammar.range(b'1', b'9'));
    let digits = grammar.repeat(digit, 0, Some(MAX_FRACTION - 1));
    grammar.sequence(vec![point, digits, last])
}

/// Adds the digits of a whole number from `least` to `most`, without zeros before them.
fn between(grammar: &mut Grammar, least: u64, most: u64) -> NodeId {
    let (shortest, longest) = (least.to_string().len() as u32, most.to_string().len() as u32);
    let mut nodes = Vec::new();
    for len in shortest..=longest.min(MAX_DIGITS) {
        let smallest = if len == 1 { 0 } else { 10_u64.pow(len - 1) };
        let (first, last) = (least.max(smallest), most.min(10_u64.pow(len) - 1));
        if first <= last {
            nodes.push(same_len(grammar, first.to_string().as_bytes(), last.to_string().as_bytes()));
        }
    }
    grammar.alternatives(nodes)
}

/// Adds the digits from `least` to `most`, which are as many.
fn same_len(grammar: &mut Grammar, least: &[u8], most: &[u8]) -> NodeId {
    let (Some((&first, least_rest)), Some((&last, most_rest))) = (least.split_first(), most.split_first()) else {
        return grammar.empty();
    };
    if first == last {
        let (digit, rest) = (grammar.range(first, first), same_len(grammar, least_rest, most_rest));
        return grammar.sequence(vec![digit, rest]);
    }
    let (zeros, nines) = (vec![b'0'; least_rest.len()], vec![b'9'; least_rest.len()]);
    if least_rest == zeros && most_rest == nines {
        return digits(grammar, first, last, zeros.len());
    }
    let (low, rest) = (grammar.range(first, first), same_len(grammar, least_rest, &nines));
    let mut nodes = vec![grammar.sequence(vec![low, rest])];
    if last - first > 1 {
        nodes.push(digits(grammar, first + 1, last - 1, zeros.len()));
    }
    let (high, rest) = (grammar.range(last, last), same_len(grammar, &zeros, most_rest));
    nodes.push(grammar.sequence(vec![high, rest]));
    grammar.alternatives(nodes)
}

/// Adds a digit from `first` to `last` and any digits behind it.
fn digits(grammar: &mut Grammar, first: u8, last: u8, num_behind: usize) -> NodeId {
    let (digit, any) = (grammar.range(first, last), grammar.range(b'0', b'9'));
    let count = num_behind as u32;
    let rest = grammar.repeat(any, count, Some(count));
    grammar.sequence(vec![digit, rest])
}
