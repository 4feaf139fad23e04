//! The date, for templates that tell a model what day it is.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const DAY_SECONDS: u64 = 86_400;

/// Formats the current time, in UTC, as Python's `strftime` does.
pub(super) fn strftime_now(format: &str) -> Result<String, String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    strftime(now, format)
}

/// Formats a time in seconds since 1970.
fn strftime(seconds: u64, format: &str) -> Result<String, String> {
    let (days, second) = (seconds / DAY_SECONDS, seconds % DAY_SECONDS);
    let (year, month, day) = date(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let hour = second / 3600;
    let mut result = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            result.push(c);
            continue;
        }
        let directive = chars.next();
        result += &match directive {
            Some('Y') => format!("{year:04}"),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{:02}", (hour + 11) % 12 + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('j') => format!("{:03}", days - days_before_year(year) + 1),
            Some('%') => "%".to_owned(),
            _ => {
                let found = directive.map(String::from).unwrap_or_default();
                return Err(format!("strftime_now: %{found} is not known, only Y y m d B b A a H I p M S j %"));
            }
        };
    }
    Ok(result)
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Returns the days from the beginning of 1970 to that of a year.
fn days_before_year(year: u64) -> u64 {
    (1970..year).map(|year| 365 + u64::from(is_leap(year))).sum()
}

/// Returns year, month and day of the month from the days since the beginning of 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before_year(year + 1) <= days {
        year += 1;
    }
    let mut left = days - days_before_year(year);
    let february = 28 + u64::from(is_leap(year));
    for (month, len) in (1..).zip([31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]) {
        if left < len {
            return (year, month, left + 1);
        }
        left -= len;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_python() {
        // datetime.fromtimestamp(seconds, UTC).strftime(...)
        let format = "%Y-%m-%d %H:%M:%S %a %A %d %b %B %y %j %I %p %%";
        let cases = [
            (0, "1970-01-01 00:00:00 Thu Thursday 01 Jan January 70 001 12 AM %"),
            (951_827_696, "2000-02-29 12:34:56 Tue Tuesday 29 Feb February 00 060 12 PM %"),
            (1_735_689_599, "2024-12-31 23:59:59 Tue Tuesday 31 Dec December 24 366 11 PM %"),
            (4_107_542_400, "2100-03-01 00:00:00 Mon Monday 01 Mar March 00 060 12 AM %"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(seconds, format).unwrap(), expected);
        }
        assert!(strftime(0, "%Q").unwrap_err().contains("%Q"));
    }
}
