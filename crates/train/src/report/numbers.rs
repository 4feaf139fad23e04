//! Formatting of numbers for a reader: round ticks, few digits, thousands separators and units.

/// The format of the numbers of an axis or a legend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// A plain number.
    Plain,
    /// A share, written as a percentage.
    Percent,
}

/// Chooses about `count` round tick values (1, 2 or 5 times a power of ten) in `low..=high`.
pub(crate) fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let span = high - low;
    if !(span.is_finite() && span > 0.0) {
        return vec![low];
    }
    let rough = span / count as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough).unwrap_or(rough);
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|index| index as f64 * step).collect()
}

/// Formats the labels of ticks, all with the same number of decimals and the same unit.
pub(crate) fn tick_labels(ticks: &[f64], unit: Unit) -> Vec<String> {
    let largest = ticks.iter().fold(0.0f64, |max, tick| max.max(tick.abs()));
    let step = if ticks.len() > 1 { ticks[1] - ticks[0] } else { largest.max(f64::MIN_POSITIVE) };
    let (scale, suffix) = match unit {
        Unit::Percent => (100.0, "%".to_owned()),
        Unit::Plain if largest > 0.0 && largest < 1e-3 => {
            let exponent = largest.log10().floor() as i32;
            (10f64.powi(-exponent), format!("e{exponent}"))
        }
        Unit::Plain => {
            let (divisor, suffix) = magnitude(largest, 1e4);
            (1.0 / divisor, suffix.to_owned())
        }
    };
    let decimals = (-(step * scale).abs().log10().floor() + 1e-9).clamp(0.0, 6.0) as usize;
    let label = |&tick: &f64| if tick == 0.0 { "0".to_owned() } else { format!("{:.decimals$}{suffix}", tick * scale) };
    ticks.iter().map(label).collect()
}

/// Formats a number with three or four significant digits.
pub(crate) fn short(value: f64, unit: Unit) -> String {
    if !value.is_finite() {
        return "–".to_owned();
    }
    if unit == Unit::Percent {
        return format!("{}%", significant(value * 100.0, 3));
    }
    let size = value.abs();
    if size > 0.0 && size < 1e-3 {
        let exponent = size.log10().floor() as i32;
        return format!("{}e{exponent}", significant(value * 10f64.powi(-exponent), 3));
    }
    let (divisor, suffix) = magnitude(size, 1e4);
    let digits = if suffix.is_empty() && size >= 0.1 { 4 } else { 3 };
    format!("{}{suffix}", significant(value / divisor, digits))
}

/// Formats a number with at most `digits` significant digits, without trailing zeros or an exponent.
fn significant(value: f64, digits: i32) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let decimals = (digits - 1 - value.abs().log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn magnitude(value: f64, from: f64) -> (f64, &'static str) {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    units.into_iter().find(|&(divisor, _)| value >= divisor && value >= from).unwrap_or((1.0, ""))
}

/// Formats an integer with thousands separators.
pub(crate) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a duration: "43 s", "4 min 32 s", "3 h 05 min", "2 d 04 h".
pub(super) fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..10 => format!("{} s", significant(seconds, 2)),
        10..60 => format!("{whole} s"),
        60..3_600 => format!("{} min {:02} s", whole / 60, whole % 60),
        3_600..86_400 => format!("{} h {:02} min", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{} d {:02} h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

/// Formats a size in memory: "1.7 GiB".
pub(super) fn bytes(value: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|&(size, _)| value >= size) {
        Some((size, unit)) => format!("{} {unit}", significant(value as f64 / size as f64, 3)),
        None => format!("{value} B"),
    }
}
