//! Memory of the test process, from `/proc`.

/// Current and peak memory of this process, in bytes; the peak since the last reset.
///
/// # Panics
/// On systems without `/proc/self/status`.
pub fn process_memory() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let read = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    };
    (read("VmRSS:"), read("VmHWM:"))
}
