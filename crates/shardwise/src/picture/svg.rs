//! Grids as SVG.

use super::grid::{GridLine, PictureGrid};
use super::text::wrapped;

/// Fill colours, light enough for dark text; neighbours differ in brightness too.
const COLORS: [&str; 12] = [
    "#a6cee3", "#fdbf6f", "#b2df8a", "#fb9a99", "#cab2d6", "#ffff99", "#8dd3c7", "#f4cae4", "#ccebc5", "#bebada",
    "#fdcdac", "#d9d9d9",
];

/// Width of a picture in user units.
const WIDTH: usize = 640;

const MARGIN: usize = 16;

const LINE: usize = 18;

/// Room for the labels of rows.
const LABELS: usize = 56;

/// Characters that fit into a line of the picture, at 13 units per character size.
const LINE_CHARACTERS: usize = 84;

/// A picture of several grids, one below the other, with a title for screen readers.
pub(super) fn svg(title: &str, grids: &[&PictureGrid]) -> String {
    let mut body = String::new();
    let mut y = MARGIN;
    for grid in grids {
        for text in grid.heading.iter().flat_map(|text| wrapped(text, LINE_CHARACTERS, "  ")) {
            y += LINE;
            body += &words(MARGIN, y, "start", &text);
        }
        if !grid.cells.is_empty() {
            y = boxes(grid, y + LINE, &mut body);
        }
        for text in grid.remarks.iter().flat_map(|text| wrapped(text, LINE_CHARACTERS, "  ")) {
            y += LINE;
            body += &words(MARGIN, y, "start", &text);
        }
        y += LINE;
    }
    let height = y + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" font-family=\"ui-monospace, Menlo, Consolas, monospace\" font-size=\"12\">\n<title>{}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n{body}</svg>\n",
        escaped(title)
    )
}

/// Draws the boxes of a grid below `top` and returns where they end.
fn boxes(grid: &PictureGrid, top: usize, body: &mut String) -> usize {
    let widths = sizes(&grid.columns, WIDTH - 2 * MARGIN - LABELS, 34);
    // Rows of one element are as high as a line of text; no picture is higher than wide.
    let wanted: usize = grid.rows.iter().map(|row| row.weight.min(3) * 24).sum();
    let heights = sizes(&grid.rows, wanted.clamp(28 * grid.rows.len(), 400.max(28 * grid.rows.len())), 24);
    let (mut x, left) = (MARGIN + LABELS, MARGIN + LABELS);
    for (column, width) in grid.columns.iter().zip(&widths) {
        *body += &words(x, top, "start", &column.label);
        x += width;
    }
    let mut y = top + 6;
    for ((row, cells), height) in grid.rows.iter().zip(&grid.cells).zip(&heights) {
        *body += &words(left - 6, y + 16, "end", &row.label);
        let mut x = left;
        for ((cell, column), width) in cells.iter().zip(&grid.columns).zip(&widths) {
            if !row.is_gap && !column.is_gap {
                let fill = if cell.label.is_empty() { "#ffffff" } else { COLORS[cell.color % COLORS.len()] };
                let dashes = if cell.is_partial { " stroke-dasharray=\"5 3\"" } else { "" };
                *body += &format!(
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\" stroke=\"#333333\"{dashes}/>\n"
                );
                let room = width / 8;
                let label: String = match cell.label.chars().count() <= room {
                    true => cell.label.clone(),
                    false => cell.label.chars().take(room.saturating_sub(1)).chain(['…']).collect(),
                };
                *body += &words(x + width / 2, y + height / 2 + 4, "middle", &label);
            } else {
                *body += &words(x + width / 2, y + height / 2 + 4, "middle", "…");
            }
            x += width;
        }
        y += height;
    }
    y
}

/// Sizes of lines by weight that add up to about `room`, at least `least` each if there is room for it.
fn sizes(lines: &[GridLine], room: usize, least: usize) -> Vec<usize> {
    let least = least.min(room / lines.len().max(1));
    let total: usize = lines.iter().map(|line| line.weight).sum::<usize>().max(1);
    let left = room.saturating_sub(least * lines.len());
    lines.iter().map(|line| least + (left as f64 * line.weight as f64 / total as f64) as usize).collect()
}

fn words(x: usize, y: usize, anchor: &str, text: &str) -> String {
    match text.trim().is_empty() {
        true => String::new(),
        false => {
            format!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"#111111\">{}</text>\n", escaped(text))
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
