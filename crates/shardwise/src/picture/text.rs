//! Grids as text with box-drawing characters, for terminals.

use super::grid::{GridLine, PictureGrid};

/// Background colours of the 256-colour palette that black text is readable on.
const COLORS: [u8; 12] = [153, 217, 157, 223, 183, 159, 229, 181, 194, 147, 216, 152];

/// Most lines of text that one row of boxes takes.
const MAX_HEIGHT: usize = 3;

/// Writes a grid in at most `width` columns.
pub(super) fn text(grid: &PictureGrid, width: usize, color: bool) -> String {
    let mut out = String::new();
    let mut line = |text: &str| {
        out.push_str(text.trim_end());
        out.push('\n');
    };
    grid.heading.iter().flat_map(|text| wrapped(text, width, "  ")).for_each(|text| line(&text));
    if !grid.cells.is_empty() {
        let margin = grid.rows.iter().map(|row| row.label.chars().count()).max().unwrap_or(0) + 1;
        let widths = column_widths(grid, width.saturating_sub(margin + 1));
        let heights = row_heights(&grid.rows);
        line(&(" ".repeat(margin + 2) + &heads(&grid.columns, &widths)));
        let border = |left: char, cross: char, right: char| {
            let parts: Vec<String> = widths.iter().map(|&w| "─".repeat(w)).collect();
            format!("{}{left}{}{right}", " ".repeat(margin), parts.join(&cross.to_string()))
        };
        line(&border('┌', '┬', '┐'));
        for (r, row) in grid.rows.iter().enumerate() {
            if r > 0 {
                line(&border('├', '┼', '┤'));
            }
            for h in 0..heights[r] {
                let label = if h == 0 { row.label.as_str() } else { "" };
                let mut written = format!("{label:>width$} │", width = margin - 1);
                for (cell, &w) in grid.cells[r].iter().zip(&widths) {
                    let label = if h == 0 { fitted(&cell.label, w.saturating_sub(1)) } else { String::new() };
                    let content = format!(" {label:<width$}", width = w.saturating_sub(1));
                    match color && !cell.label.is_empty() {
                        true => {
                            let number = COLORS[cell.color % COLORS.len()];
                            written += &format!("\u{1b}[30;48;5;{number}m{content}\u{1b}[0m│");
                        }
                        false => written += &(content + "│"),
                    }
                }
                line(&written);
            }
        }
        line(&border('└', '┴', '┘'));
    }
    grid.remarks.iter().flat_map(|text| wrapped(text, width, "  ")).for_each(|text| line(&text));
    out
}

/// The widths of the columns: what labels need, and the rest by weight.
fn column_widths(grid: &PictureGrid, width: usize) -> Vec<usize> {
    let count = grid.columns.len();
    let labels = |c: usize| {
        let cells = grid.cells.iter().map(|row| row[c].label.chars().count());
        cells.chain([grid.columns[c].label.chars().count()]).max().unwrap_or(0)
    };
    // A column has a space on each side of its label, and a line after it.
    let room = width.saturating_sub(count);
    let mut widths: Vec<usize> = (0..count).map(|c| labels(c) + 2).collect();
    let wanted: usize = widths.iter().sum();
    if wanted > room {
        let even = (room / count.max(1)).max(2);
        widths.iter_mut().for_each(|w| *w = (*w).min(even));
    }
    // Pictures of small tensors stay small: an element is at most 8 columns wide.
    let weights: Vec<usize> = grid.columns.iter().map(|c| if c.is_gap { 0 } else { c.weight }).collect();
    let total: usize = weights.iter().sum::<usize>().max(1);
    let used: usize = widths.iter().sum();
    let target = room.min(total.saturating_mul(8)).min(60).max(used);
    for (w, weight) in widths.iter_mut().zip(&weights) {
        *w = (*w).max((target as f64 * *weight as f64 / total as f64) as usize);
    }
    // Rounding and labels may have taken more than there is: the widest columns give it back.
    while widths.iter().sum::<usize>() > room {
        let widest = (0..count).max_by_key(|&c| widths[c]).unwrap_or(0);
        if widths[widest] <= 2 {
            break;
        }
        widths[widest] -= 1;
    }
    widths
}

fn row_heights(rows: &[GridLine]) -> Vec<usize> {
    let largest = rows.iter().filter(|row| !row.is_gap).map(|row| row.weight).max().unwrap_or(1);
    // With many rows one line each; with few, rows of more elements are higher.
    let most = if rows.len() > 8 { 1 } else { MAX_HEIGHT.min(largest) };
    let height = |row: &GridLine| match row.is_gap {
        true => 1,
        false => (row.weight * most).div_ceil(largest).max(1),
    };
    rows.iter().map(height).collect()
}

/// The labels of the columns, each above the left edge of its column if there is room.
fn heads(columns: &[GridLine], widths: &[usize]) -> String {
    let mut text = String::new();
    let mut at = 0;
    for (column, width) in columns.iter().zip(widths) {
        let written = text.chars().count();
        if written <= at {
            text += &" ".repeat(at - written);
            text += &fitted(&column.label, *width);
        }
        at += width + 1;
    }
    text
}

/// A text in at most `width` characters.
fn fitted(text: &str, width: usize) -> String {
    match text.chars().count() <= width {
        true => text.to_string(),
        false => text.chars().take(width.saturating_sub(1)).chain(['…'].into_iter().take(width)).collect(),
    }
}

/// A text in lines of at most `width` characters, broken between words; lines after the first are indented.
pub(super) fn wrapped(text: &str, width: usize, indent: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("at least one");
        match line.trim().is_empty() || line.chars().count() + 1 + word.chars().count() <= width {
            true if line.is_empty() => line.push_str(word),
            true => *line = format!("{line} {word}"),
            false => lines.push(format!("{indent}{word}")),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_broken_between_words_and_labels_are_cut() {
        assert_eq!(wrapped("one two three", 8, "  "), ["one two", "  three"]);
        assert_eq!(wrapped("a", 8, "  "), ["a"]);
        assert_eq!([fitted("abcdef", 4), fitted("abc", 4)], ["abc…", "abc"]);
    }
}
