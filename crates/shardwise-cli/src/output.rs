//! What a measurement looks like: aligned columns for people, JSON lines for programs.

use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::processes;

/// Prints rows as they come, in the first process: JSON lines if asked for, else a table.
pub(crate) struct Rows {
    json: bool,
    header_printed: bool,
    bar: ProgressBar,
}

/// A row that can also be shown as columns of a table: (title, width, value). A width below zero aligns to the left.
pub(crate) trait Row: Serialize {
    fn columns(&self) -> Vec<(&'static str, i32, String)>;
}

impl Rows {
    /// `total` is the number of rows to come, for the progress bar on the standard error.
    pub(crate) fn new(json: bool, total: u64) -> Self {
        let shown = if processes::is_first() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), shown);
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}").expect("a valid template");
        bar.set_style(style);
        bar.enable_steady_tick(Duration::from_millis(200));
        Rows { json, header_printed: false, bar }
    }

    /// Says what is being measured now.
    pub(crate) fn announce(&self, what: &str) {
        self.bar.set_message(what.to_string());
    }

    /// Prints one row.
    pub(crate) fn print(&mut self, row: &impl Row) -> std::io::Result<()> {
        if !processes::is_first() {
            return Ok(());
        }
        self.bar.inc(1);
        let text = if self.json { serde_json::to_string(row)? } else { self.table_row(row) };
        self.bar.suspend(|| writeln!(std::io::stdout().lock(), "{text}"))
    }

    fn table_row(&mut self, row: &impl Row) -> String {
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

impl Drop for Rows {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
