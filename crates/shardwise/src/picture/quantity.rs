//! Bytes, counts and times as short texts, and back.

use crate::error::{ErrorKind, Result};

/// Decimal prefixes, largest first.
const PREFIXES: [(f64, &str); 5] = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];

/// Returns bytes in decimal units, such as `16.8 MB`; below 10,000 all digits.
///
/// ```
/// use shardwise::picture::bytes_text;
/// assert_eq!([bytes_text(1024), bytes_text(16_777_216)], ["1024 B", "16.8 MB"]);
/// ```
pub fn bytes_text(bytes: usize) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        _ => scaled(bytes as f64, " ") + "B",
    }
}

/// Returns a number with a decimal prefix, such as `8.03B` for parameters: thousands are `k`, then `M`, `B` and `T`.
///
/// ```
/// use shardwise::picture::count_text;
/// assert_eq!([count_text(999), count_text(8_030_261_248)], ["999", "8.03B"]);
/// ```
pub fn count_text(count: usize) -> String {
    match count {
        0..1000 => count.to_string(),
        _ => scaled(count as f64, "").replace('G', "B"),
    }
}

/// Returns microseconds as a time in a fitting unit, such as `1.25 ms`.
///
/// ```
/// use shardwise::picture::time_text;
/// assert_eq!([time_text(0.25), time_text(1250.0), time_text(2.5e6)], ["0.250 us", "1.25 ms", "2.50 s"]);
/// ```
pub fn time_text(us: f64) -> String {
    match us {
        us if us < 1e3 => format!("{} us", three_digits(us)),
        us if us < 1e6 => format!("{} ms", three_digits(us / 1e3)),
        us if us < 120e6 => format!("{} s", three_digits(us / 1e6)),
        us if us < 7200e6 => format!("{} min", three_digits(us / 60e6)),
        us => format!("{} h", three_digits(us / 3600e6)),
    }
}

fn scaled(number: f64, space: &str) -> String {
    // Rounded to three digits first, so that 999,999 is 1.00M and not 1000k.
    let (scale, prefix) = PREFIXES.into_iter().find(|(scale, _)| number >= scale * 0.9995).unwrap_or((1.0, ""));
    format!("{}{space}{prefix}", three_digits(number / scale))
}

fn three_digits(number: f64) -> String {
    match number {
        n if (0.9995..9.995).contains(&n) => format!("{n:.2}"),
        n if n < 0.9995 && n > 0.0 => format!("{n:.3}"),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

/// Parses a number with an optional prefix: `k`, `M`, `G`, `T`, `P` for powers of 1000, `Ki`, `Mi`, `Gi`, `Ti` for powers of
/// 1024, and an optional `B` at the end, as in `80G`, `1.5GB` or `16GiB`. `what` names the number in the error.
///
/// ```
/// use shardwise::picture::parse_quantity;
/// assert_eq!(parse_quantity("memory", "80G")?, 80e9);
/// assert_eq!(parse_quantity("memory", "2 GiB")?, 2.0 * 1024f64.powi(3));
/// assert!(parse_quantity("memory", "much").is_err());
/// # Ok::<(), shardwise::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the text is not such a number, or the number is not positive and finite.
pub fn parse_quantity(what: &'static str, text: &str) -> Result<f64> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim().trim_end_matches(['B', 'b']);
    let scale = match unit {
        "" => Some(1.0),
        "Ki" => Some(1024f64),
        "Mi" => Some(1024f64.powi(2)),
        "Gi" => Some(1024f64.powi(3)),
        "Ti" => Some(1024f64.powi(4)),
        "K" => Some(1e3),
        _ => PREFIXES.into_iter().find(|(_, prefix)| *prefix == unit).map(|(scale, _)| scale),
    };
    let number = number.replace('_', "").parse::<f64>().ok();
    match number.zip(scale).map(|(number, scale)| number * scale) {
        Some(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err(ErrorKind::Argument.error(
            what,
            format!("`{text}`"),
            "a positive number with an optional prefix k, M, G, T or P",
            "write for example `80G` or `1.5T`",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_in_every_range() {
        let texts: Vec<String> =
            [999_499, 999_500, 1_000_000, 12_345_678, 70_553_706_496].into_iter().map(count_text).collect();
        assert_eq!(texts, ["999k", "1.00M", "1.00M", "12.3M", "70.6B"]);
        // `scripts/check-report` has the same table for the page of a report.
        let sizes = [0, 9_999, 10_000, 999_499, 999_500, 16_777_216, 70_553_706_496].map(bytes_text);
        assert_eq!(sizes, ["0 B", "9999 B", "10.0 kB", "999 kB", "1.00 MB", "16.8 MB", "70.6 GB"]);
        assert_eq!([time_text(0.0), time_text(999.0), time_text(61e6)], ["0.0 us", "999 us", "61.0 s"]);
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in ["", "G", "-1", "1.2.3G", "80X", "inf", "0"] {
            assert!(parse_quantity("memory", text).is_err(), "{text}");
        }
        assert_eq!(parse_quantity("flops", "400T").unwrap(), 400e12);
    }
}
