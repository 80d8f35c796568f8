//! The live view of a run on a terminal: loss curve, speed, waiting and memory of every rank, drawn in place.
//!
//! It uses the alternate screen of the terminal, so that nothing of it is left when the run ends or is interrupted; lines that were
//! printed meanwhile follow then. Every frame is drawn completely and for the size that the terminal has at that time.

use std::collections::VecDeque;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use shardwise::picture::bytes_text;

use super::step_log::StepLog;

/// Enters the alternate screen and hides the cursor; leaves it and shows the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Whether the terminal shows the alternate screen.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// Shows the normal screen again, if the view is on. Called wherever the process may end.
pub(super) fn restore() {
    if ENTERED.swap(false, SeqCst) {
        // Nothing can be done if the terminal is gone.
        let _ = std::io::stderr().write_all(LEAVE.as_bytes());
    }
}

/// Redrawing more often than this is not visible, and slows down a terminal.
const FRAME: Duration = Duration::from_millis(60);

/// The smallest terminal that has room for the view.
const SMALLEST: (usize, usize) = (40, 12);

/// What the view shows.
pub(super) struct ViewState {
    title: String,
    steps: u64,
    losses: Vec<(u64, f64)>,
    held_out: Option<f64>,
    last: Option<StepLog>,
    lines: VecDeque<String>,
    started: Instant,
    first_step: Option<u64>,
}

/// The view on standard error.
pub(super) struct LiveView {
    state: ViewState,
    drawn: Option<Instant>,
    /// All lines, which are printed when the view ends.
    printed: Vec<String>,
}

impl LiveView {
    /// The view, if standard error is a terminal with room for it.
    pub(super) fn new(title: &str, steps: u64) -> Option<LiveView> {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let (width, height) = size()?;
        if !std::io::stderr().is_terminal() || is_dumb || width < SMALLEST.0 || height < SMALLEST.1 {
            return None;
        }
        let _ = std::io::stderr().write_all(ENTER.as_bytes());
        ENTERED.store(true, SeqCst);
        let mut view = LiveView { state: ViewState::new(title, steps), drawn: None, printed: Vec::new() };
        view.draw();
        Some(view)
    }

    pub(super) fn print_line(&mut self, line: &str) {
        self.printed.push(line.to_string());
        self.state.add_line(line);
        self.draw();
    }

    pub(super) fn step(&mut self, step: &StepLog) {
        self.state.step(step);
        if self.drawn.is_none_or(|drawn| drawn.elapsed() > FRAME) {
            self.draw();
        }
    }

    pub(super) fn held_out(&mut self, loss: f64) {
        self.state.held_out = Some(loss);
    }

    fn draw(&mut self) {
        let Some((width, height)) = size().filter(|_| ENTERED.load(SeqCst)) else { return };
        self.drawn = Some(Instant::now());
        let lines = self.state.frame(width, height);
        // Each line is cleared to its end, and everything below the last one, so that nothing of an earlier frame stays.
        let text = format!("\x1b[H{}\x1b[K\x1b[J", lines.join("\x1b[K\r\n"));
        let mut out = std::io::stderr().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

impl Drop for LiveView {
    fn drop(&mut self) {
        restore();
        let mut out = std::io::stderr().lock();
        for line in &self.printed {
            // The run goes on if standard error is closed.
            let _ = writeln!(out, "{line}");
        }
    }
}

/// Columns and rows of the terminal.
fn size() -> Option<(usize, usize)> {
    let (width, height) = terminal_size::terminal_size_of(std::io::stderr())?;
    Some((width.0.into(), height.0.into()))
}

impl ViewState {
    fn new(title: &str, steps: u64) -> Self {
        ViewState {
            title: title.to_string(),
            steps,
            losses: Vec::new(),
            held_out: None,
            last: None,
            lines: VecDeque::new(),
            started: Instant::now(),
            first_step: None,
        }
    }

    fn add_line(&mut self, line: &str) {
        self.lines.push_back(line.to_string());
        if self.lines.len() > 8 {
            self.lines.pop_front();
        }
    }

    fn step(&mut self, step: &StepLog) {
        self.first_step.get_or_insert(step.step - 1);
        self.losses.push((step.step, step.loss));
        self.last = Some(step.clone());
    }

    /// The lines of a frame: at most `height`, each at most `width` columns wide.
    fn frame(&self, width: usize, height: usize) -> Vec<String> {
        let mut lines = vec![self.title.clone(), self.numbers(), String::new()];
        let ranks = self.last.as_ref().map_or(&[][..], |step| &step.ranks[..]);
        let shown_lines = self.lines.len().min(3);
        // Room for the curve with its axis, one line per rank, the last printed lines, and how to stop.
        let for_ranks = ranks.len().min(height.saturating_sub(14 + shown_lines).max(1));
        let curve = height.saturating_sub(8 + for_ranks + shown_lines).max(3);
        lines.extend(curve_lines(&self.losses, width, curve));
        lines.push(String::new());
        let most = ranks.iter().map(|rank| rank.peak_bytes).max().unwrap_or(1).max(1);
        for (number, rank) in ranks.iter().enumerate().take(for_ranks) {
            let facts = format!(
                " {}, peak {}  {:.0} ms  waiting {:.0} %",
                bytes_text(rank.memory_bytes),
                bytes_text(rank.peak_bytes),
                rank.ms,
                rank.waiting * 100.0
            );
            let room = width.saturating_sub(facts.chars().count() + 10).min(40);
            let filled = room * rank.memory_bytes / most;
            let bar = "█".repeat(filled) + &"░".repeat(room - filled);
            lines.push(format!("rank {number:<3} {bar}{facts}"));
        }
        if ranks.len() > for_ranks {
            lines.push(format!("and {} more ranks", ranks.len() - for_ranks));
        }
        lines.push(String::new());
        lines.extend(self.lines.iter().skip(self.lines.len() - shown_lines).cloned());
        lines.push("Ctrl-C stops after this step and saves".to_string());
        lines.truncate(height);
        // A line of the full width would move the cursor to the next row on some terminals.
        lines.iter().map(|line| line.chars().take(width.saturating_sub(1)).collect()).collect()
    }

    /// The line with step, loss and speed.
    fn numbers(&self) -> String {
        let Some(last) = &self.last else { return format!("step 0/{}", self.steps) };
        let done = last.step - self.first_step.unwrap_or(0);
        let left = self.started.elapsed().as_secs_f64() / done.max(1) as f64 * (self.steps - last.step) as f64;
        let held_out = self.held_out.map(|loss| format!(" (held-out {loss:.3})")).unwrap_or_default();
        format!(
            "step {}/{}  loss {:.3}{held_out}  {:.0} tokens/s  waiting {:.0} %  {:.0} s left",
            last.step,
            self.steps,
            last.loss,
            last.tokens_per_s,
            last.waiting * 100.0,
            left
        )
    }
}

/// Width of the labels next to the curve.
const LABEL: usize = 8;

/// The curve in dots of braille characters, two by four per character, with labels of the largest and the smallest loss.
fn curve_lines(losses: &[(u64, f64)], width: usize, height: usize) -> Vec<String> {
    let (columns, rows) = (width.saturating_sub(LABEL + 2).max(1), height);
    let finite = || losses.iter().map(|&(_, loss)| loss).filter(|loss| loss.is_finite());
    let (low, high) = finite().fold((f64::MAX, f64::MIN), |(low, high), loss| (low.min(loss), high.max(loss)));
    let mut cells = vec![vec![0u8; columns]; rows];
    let last = losses.last().map_or(1, |&(step, _)| step).max(1);
    let first = losses.first().map_or(0, |&(step, _)| step);
    let spread = (high - low).max(1e-9);
    for &(step, loss) in losses.iter().filter(|(_, loss)| loss.is_finite()) {
        let x = ((step - first) as f64 / (last - first).max(1) as f64 * (2 * columns - 1) as f64) as usize;
        let y = ((high - loss) / spread * (4 * rows - 1) as f64).round() as usize;
        // The order of the dots of a braille character.
        let dot = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]][x % 2][y % 4];
        cells[y / 4][x / 2] |= dot;
    }
    let label = |row: usize| match row {
        _ if losses.is_empty() => String::new(),
        0 => format!("{high:.3}"),
        row if row + 1 == rows => format!("{low:.3}"),
        _ => String::new(),
    };
    let line = |(row, cells): (usize, &Vec<u8>)| {
        let dots: String = cells.iter().map(|&dots| char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' ')).collect();
        format!("{:>LABEL$} {dots}", label(row))
    };
    cells.iter().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::super::step_log::RankLog;
    use super::*;

    fn step(number: u64, ranks: usize) -> StepLog {
        StepLog {
            step: number,
            loss: 4.0 - number as f64 / 100.0,
            grad_norm: None,
            lr: 0.1,
            ms: 20.0,
            tokens_per_s: 12345.0,
            communication: 0.3,
            waiting: 0.25,
            ranks: vec![RankLog { ms: 20.0, waiting: 0.25, memory_bytes: 3_000_000, peak_bytes: 6_000_000 }; ranks],
        }
    }

    #[test]
    fn a_frame_fits_every_size_and_has_curve_speed_waiting_and_memory() {
        let mut state = ViewState::new("gpt on dp=2,tp=2", 300);
        state.add_line("1234 parameters");
        (1..=120).for_each(|number| state.step(&step(number, 4)));
        for (width, height) in [(80, 24), (200, 50), (40, 12), (132, 13)] {
            let frame = state.frame(width, height);
            assert!(frame.len() <= height, "{} lines of {height}", frame.len());
            assert!(frame.iter().all(|line| line.chars().count() < width), "{frame:#?}");
            assert!(
                frame[0].starts_with("gpt on dp=2,tp=2") && frame[1].starts_with("step 120/300  loss 2.8"),
                "{frame:#?}"
            );
            assert!(
                frame.iter().any(|line| line.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c))),
                "{frame:#?}"
            );
        }
        let frame = state.frame(80, 24);
        assert_eq!(frame.iter().filter(|line| line.starts_with("rank ")).count(), 4);
        assert!(frame.iter().any(|line| line.ends_with("3.00 MB, peak 6.00 MB  20 ms  waiting 25 %")), "{frame:#?}");
        assert!(frame[1].contains("12345 tokens/s  waiting 25 %"), "{frame:#?}");
    }

    #[test]
    fn many_ranks_and_no_step_yet_fit_as_well() {
        let mut state = ViewState::new("gpt", 3);
        assert!(state.frame(80, 24).len() <= 24);
        state.step(&step(1, 64));
        let frame = state.frame(80, 24);
        assert!(frame.len() <= 24 && frame.iter().any(|line| line.ends_with("more ranks")), "{frame:#?}");
    }
}
