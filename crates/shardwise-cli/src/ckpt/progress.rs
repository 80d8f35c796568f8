//! The progress bar of commands that read or write many bytes.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar with bytes and bytes per second, on standard error.
pub(crate) fn byte_bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let template = "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";
    bar.set_style(ProgressStyle::with_template(template).expect("a valid template"));
    bar
}
