//! Output of rows: a table with aligned columns, or JSON lines.

use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::processes;

/// Prints each row as soon as it is known, on the first process only.
pub(crate) struct RowPrinter {
    json: bool,
    header_printed: bool,
    bar: ProgressBar,
}

/// A row of output. Serialized for `--json`.
pub(crate) trait TableRow: Serialize {
    /// The columns of the table as (title, width, value). A negative width aligns to the left.
    fn columns(&self) -> Vec<(&'static str, i32, String)>;
}

impl RowPrinter {
    /// Shows a progress bar for `total` rows on standard error.
    pub(crate) fn new(json: bool, total: u64) -> Self {
        let shown = if processes::is_first() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), shown);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}").expect("a valid template");
        bar.set_style(style);
        bar.enable_steady_tick(Duration::from_millis(200));
        RowPrinter { json, header_printed: false, bar }
    }

    /// Shows `what` next to the progress bar.
    pub(crate) fn announce(&self, what: &str) {
        self.bar.set_message(what.to_string());
    }

    /// Prints a row, before the first one the header of the table.
    pub(crate) fn print(&mut self, row: &impl TableRow) -> std::io::Result<()> {
        if !processes::is_first() {
            return Ok(());
        }
        self.bar.inc(1);
        let text = if self.json { serde_json::to_string(row)? } else { self.table_row(row) };
        self.bar.suspend(|| writeln!(std::io::stdout().lock(), "{text}"))
    }

    fn table_row(&mut self, row: &impl TableRow) -> String {
        let columns = row.columns();
        let line = |pick: &dyn Fn(usize) -> String| {
            let cells = columns.iter().enumerate().map(|(i, (_, width, _))| {
                let (cell, size) = (pick(i), width.unsigned_abs() as usize);
                if *width < 0 { format!("{cell:<size$}") } else { format!("{cell:>size$}") }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
        };
        let body = line(&|i| columns[i].2.clone());
        if std::mem::replace(&mut self.header_printed, true) {
            return body;
        }
        format!("{}\n{body}", line(&|i| columns[i].0.to_string()))
    }
}

impl Drop for RowPrinter {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
