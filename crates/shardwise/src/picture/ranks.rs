//! Lists of ranks as short texts.

/// Ranges that are written before a list is abbreviated.
const MAX_RANGES: usize = 4;

/// Ascending ranks as ranges, such as `0-3,6`; a long list ends in the number of all.
pub(super) fn rank_list(ranks: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => ranges.push((rank, rank)),
        }
    }
    let text = |&(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first},{last}"),
        _ => format!("{first}-{last}"),
    };
    let shown: Vec<String> = ranges.iter().take(MAX_RANGES).map(text).collect();
    match ranges.len() {
        0..=MAX_RANGES => shown.join(","),
        _ => format!("{},… ({})", shown[..2].join(","), ranks.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_short_and_long_lists_are_counted() {
        assert_eq!(rank_list(&[0, 1, 2, 3]), "0-3");
        assert_eq!(rank_list(&[0, 1, 4]), "0,1,4");
        assert_eq!(rank_list(&[0, 2, 4, 6]), "0,2,4,6");
        assert_eq!(rank_list(&[0, 2, 4, 6, 8]), "0,2,… (5)");
        assert_eq!(rank_list(&[]), "");
    }
}
