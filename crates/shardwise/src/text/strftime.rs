//! Dates in chat templates.

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
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The present time in UTC, in the format of C's `strftime`.
pub(super) fn strftime_now(format: &str) -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, seconds)
}

/// A time in seconds since 1970, in the format of C's `strftime`. Unknown directives stay as they are.
fn strftime(format: &str, seconds: u64) -> String {
    let (days, time) = (seconds / 86400, seconds % 86400);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let (year, month, day) = civil(days);
    let twelve = (hour + 11) % 12 + 1;
    let (month_name, weekday) = (MONTHS[month as usize], WEEKDAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = rest.next();
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let number = |value: u64, width: usize| if unpadded { value.to_string() } else { format!("{value:0width$}") };
        text += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month + 1, 2),
            Some('d') => number(day, 2),
            Some('e') => format!("{day:2}"),
            Some('j') => number(days - days_before_year(year) + 1, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(twelve, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
            Some('B') => month_name.to_string(),
            Some('b' | 'h') => month_name[..3].to_string(),
            Some('A') => weekday.to_string(),
            Some('a') => weekday[..3].to_string(),
            Some('F') => format!("{year}-{:02}-{day:02}", month + 1),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_string(),
            Some('%') => "%".to_string(),
            Some(other) => format!("%{other}"),
            None => "%".to_string(),
        };
    }
    text
}

/// Year, month from 0 and day from 1 of a number of days since 1970.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let mut year = 1970;
    while days >= year_days(year) {
        days -= year_days(year);
        year += 1;
    }
    let mut month = 0;
    while days >= month_days(year, month) {
        days -= month_days(year, month);
        month += 1;
    }
    (year, month, days + 1)
}

fn days_before_year(year: u64) -> u64 {
    (1970..year).map(year_days).sum()
}

fn year_days(year: u64) -> u64 {
    365 + u64::from(is_leap(year))
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
}

fn month_days(year: u64, month: u64) -> u64 {
    [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month as usize]
}

#[test]
fn dates_are_those_of_python() {
    // datetime.fromtimestamp(t, UTC).strftime(...) in Python
    for (seconds, expected) in [
        (0, "01 Jan 1970 Thursday 001 12:00:00 AM 1970-01-01"),
        (951_782_400, "29 Feb 2000 Tuesday 060 12:00:00 AM 2000-02-29"),
        (1_735_689_599, "31 Dec 2024 Tuesday 366 11:59:59 PM 2024-12-31"),
        (4_107_542_400, "01 Mar 2100 Monday 060 12:00:00 AM 2100-03-01"),
    ] {
        assert_eq!(strftime("%d %b %Y %A %j %I:%M:%S %p %F", seconds), expected);
    }
    assert_eq!(strftime("%-d %B %y%% %-I %q %", 1_735_689_599), "31 December 24% 11 %q %");
}
