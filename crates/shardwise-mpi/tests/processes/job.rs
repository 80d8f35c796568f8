//! Starting this program under `mpirun`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A run of one case on some processes.
pub(crate) struct Job {
    command: Command,
}

/// How a job ended.
pub(crate) struct Ended {
    pub(crate) success: bool,
    /// What all ranks and the launcher printed.
    pub(crate) output: String,
    pub(crate) took: Duration,
}

/// Longer than any case takes, even on a machine that is busy with other things.
const LIMIT: Duration = Duration::from_secs(300);

/// The launcher.
pub(crate) fn mpirun() -> String {
    std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".into())
}

/// What the launcher says of itself.
pub(crate) fn version() -> String {
    let asked = Command::new(mpirun()).arg("--version").output();
    let asked = asked.unwrap_or_else(|e| panic!("cannot start {}: {e}; install Open MPI or set MPIRUN", mpirun()));
    let text = String::from_utf8_lossy(&asked.stdout).into_owned();
    let line = text.lines().find(|line| ["Version", "MPI", "OpenRTE"].iter().any(|word| line.contains(word)));
    line.unwrap_or("an unknown launcher").split_whitespace().collect::<Vec<_>>().join(" ")
}

pub(crate) fn is_open_mpi() -> bool {
    version().contains("Open MPI") || version().contains("OpenRTE")
}

impl Job {
    pub(crate) fn new(case: &str, processes: usize) -> Self {
        let program = std::env::current_exe().expect("the name of this program");
        Self::of(&[program.to_str().expect("a name in UTF-8")], processes).set("SHARDWISE_CASE", case)
    }

    /// Any program.
    pub(crate) fn of(program: &[&str], processes: usize) -> Self {
        let (launcher, count) = (mpirun(), processes.to_string());
        Self::from_launcher(&[&[launcher.as_str(), "-n", &count], program].concat())
    }

    /// A launcher with its arguments.
    pub(crate) fn from_launcher(words: &[&str]) -> Self {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        // More processes than cores, by root in a container: what a test machine is like. Other libraries than Open MPI
        // do not look at these.
        for (name, value) in [
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("OMPI_MCA_hwloc_base_binding_policy", "none"),
            ("OMPI_MCA_mpi_yield_when_idle", "1"),
            ("RUST_BACKTRACE", "0"),
        ] {
            command.env(name, value);
        }
        Job { command }
    }

    /// Sets a variable for all ranks.
    pub(crate) fn set(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it to its end.
    pub(crate) fn run(mut self) -> Ended {
        let since = Instant::now();
        let output = file_for_output();
        let file = std::fs::File::create(&output).expect("a file for the output");
        self.command.stdin(Stdio::null()).stdout(file.try_clone().expect("a second handle")).stderr(file);
        let mut child = self.command.spawn().unwrap_or_else(|e| panic!("cannot start {}: {e}", mpirun()));
        let success = loop {
            match child.try_wait().expect("the launcher can be asked") {
                Some(status) => break status.success(),
                None if since.elapsed() > LIMIT => {
                    // Not killed at once: it has processes to end, and the script of the two hosts to clean up.
                    // SAFETY: sends a signal to the launcher.
                    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
                    child.wait().expect("the launcher ends");
                    break false;
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let text = String::from_utf8_lossy(&std::fs::read(&output).expect("the output")).into_owned();
        std::fs::remove_file(&output).expect("the output can be removed");
        Ended { success, output: text, took: since.elapsed() }
    }
}

fn file_for_output() -> std::path::PathBuf {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    std::env::temp_dir().join(format!("shardwise-mpi-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed)))
}

impl Ended {
    pub(crate) fn expect_success(self) {
        assert!(self.success, "after {:?}:\n{}", self.took, self.output);
    }
}

/// Runs a test and says how it went.
pub(crate) fn report(name: &str, test: &dyn Fn()) -> bool {
    let since = Instant::now();
    let passed = catch_unwind(AssertUnwindSafe(test)).is_ok();
    println!("test {name} ... {} ({:.1} s)", if passed { "ok" } else { "FAILED" }, since.elapsed().as_secs_f64());
    passed
}
