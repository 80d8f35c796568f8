//! The command under `mpirun`, with one rank per process. The variable `MPIRUN` names the launcher if it is not `mpirun`; it
//! must belong to the MPI library that the command is built with.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::program::{Place, TINY, json, lines, succeeds};
use shardwise_test_suites::public_models::public_model;

/// The command.
const PROGRAM: &str = env!("CARGO_BIN_EXE_shardwise");

/// A command on some processes, in the output files of a test.
struct Job {
    launcher: Child,
    /// Where its output goes.
    files: [String; 2],
}

/// How a job ended.
struct Ended {
    success: bool,
    stdout: String,
    stderr: String,
}

/// Longer than any of these jobs takes, even on a machine that is busy with other things.
const LIMIT: Duration = Duration::from_secs(120);

impl Job {
    fn start(place: &Place, processes: usize, program: &[&str]) -> Self {
        let mpirun = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".into());
        let files = ["stdout", "stderr"].map(|name| place.file(name, ""));
        let [stdout, stderr] = files.each_ref().map(|file| File::create(file).unwrap());
        let mut command = Command::new(&mpirun);
        command.args(["-n", &processes.to_string()]).args(program);
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        // More processes than cores, by root in a container: what a test machine is like. Other libraries than Open MPI
        // do not look at these.
        for (name, value) in [
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("OMPI_MCA_hwloc_base_binding_policy", "none"),
            ("RUST_BACKTRACE", "0"),
            ("SHARDWISE_DETERMINISTIC", "1"),
            // The links of threads, so that `--plan auto` finds the plan that it finds there.
            ("SHARDWISE_LINK_INSIDE", "1us,8GB/s"),
        ] {
            command.env(name, value);
        }
        let launcher = command.spawn().unwrap_or_else(|error| panic!("cannot start {mpirun}: {error}"));
        Job { launcher, files }
    }

    /// A line that a program of several words runs on every process; `$rank` is the number of the process in it.
    fn of_line(place: &Place, processes: usize, line: &str) -> Self {
        let line = format!("rank=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; {line}");
        Self::start(place, processes, &["sh", "-c", &line])
    }

    fn end(mut self) -> Ended {
        let since = Instant::now();
        let success = loop {
            match self.launcher.try_wait().unwrap() {
                Some(status) => break status.success(),
                None if since.elapsed() > LIMIT => {
                    self.launcher.kill().unwrap();
                    self.launcher.wait().unwrap();
                    panic!("not over after {LIMIT:?}: {}", self.files.map(|file| read(&file)).join("\n"));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let [stdout, stderr] = self.files.map(|file| read(&file));
        Ended { success, stdout, stderr }
    }
}

fn read(path: &str) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned()
}

impl Ended {
    /// What was printed by a job that must succeed.
    fn printed(self) -> String {
        assert!(self.success, "{}{}", self.stdout, self.stderr);
        self.stdout
    }

    /// Asserts that the job failed with one error that contains all these parts.
    fn failed_with(self, parts: &[&str]) {
        let Ended { success, stdout, stderr } = self;
        assert!(!success && stdout.is_empty(), "{parts:?}: {stdout}{stderr}");
        assert_eq!(stderr.matches("error: ").count(), 1, "{parts:?}: {stderr}");
        let message = stderr.lines().find(|line| line.contains("error: ")).unwrap();
        assert!(
            message.starts_with("error: ") && parts.iter().all(|part| message.contains(part)),
            "{parts:?}: {stderr}"
        );
    }
}

/// Runs the command on some processes.
fn on(place: &Place, processes: usize, arguments: &[&str]) -> Ended {
    Job::start(place, processes, &[&[PROGRAM], arguments].concat()).end()
}

/// The options of a training run whose output directory and log have the same name.
fn training(place: &Place, name: &str, options: &[&str]) -> Vec<String> {
    let (out, log) = (place.at(name), place.at(&format!("{name}.jsonl")));
    let all = [&["train", "--json", "--out", &out, "--log", &log], options].concat();
    all.into_iter().map(String::from).collect()
}

/// Trains on processes; the summary.
fn train(place: &Place, processes: usize, name: &str, options: &[&str]) -> Value {
    let arguments = training(place, name, options);
    let ended = on(place, processes, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(ended.stderr.matches(" parameters on ").count(), 1, "{}", ended.stderr);
    json(&ended.printed())
}

/// Trains on threads; the summary.
fn train_on_threads(place: &Place, name: &str, options: &[&str]) -> Value {
    let arguments = training(place, name, options);
    json(&succeeds(&arguments.iter().map(String::as_str).collect::<Vec<_>>()))
}

/// The losses by step.
fn losses(place: &Place, name: &str) -> BTreeMap<u64, f64> {
    let log = lines(&place.at(&format!("{name}.jsonl")));
    log.iter().filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?))).collect()
}

#[test]
fn losses_on_processes_are_bitwise_those_on_threads() {
    let place = Place::new("mpi-train");
    let steps = ["--steps", "6"];
    for (processes, options, mesh) in [
        (1, &["--dropout", "0.2"][..], Some("dp=1")),
        (2, &["--plan", "fsdp"], Some("dp=2")),
        (
            2,
            &["--model", "llama", "--kv-heads", "2", "--mesh", "tp=2", "--sequence-parallel", "--accumulate", "2"],
            None,
        ),
        (4, &["--mesh", "dp=2,tp=2", "--plan", "fsdp+tp", "--dtype", "bf16"], None),
        (4, &["--mesh", "dp=2,tp=2", "--plan", "auto"], None),
    ] {
        let options = [&TINY[..], &steps, &["--overwrite"], options].concat();
        let found = train(&place, processes, "processes", &options);
        let named = mesh.map_or_else(Vec::new, |mesh| vec!["--mesh", mesh]);
        let expected = train_on_threads(&place, "threads", &[&options[..], &named].concat());
        assert_eq!(losses(&place, "processes").len(), 6, "{options:?}");
        assert_eq!(losses(&place, "processes"), losses(&place, "threads"), "{options:?}");
        for what in ["steps", "loss", "held_out_loss", "sample", "parameters"] {
            assert_eq!(found[what], expected[what], "{what} with {options:?}");
        }
        let [ours, theirs] = [&found, &expected].map(|summary| summary["checkpoint"].as_str().unwrap());
        assert_eq!(succeeds(&["ckpt", "diff", ours, theirs, "--json"]), "", "{options:?}");
        assert!(read(found["curve"].as_str().unwrap()).starts_with("<svg"));
    }
}

#[test]
fn processes_resume_from_checkpoints_of_threads_and_threads_from_those_of_processes() {
    let place = Place::new("mpi-resume");
    let saving = [&TINY[..], &["--steps", "8", "--save-every", "4", "--plan", "fsdp", "--dropout", "0.1"]].concat();
    train_on_threads(&place, "threads", &[&saving[..], &["--mesh", "dp=2"]].concat());
    train(&place, 2, "processes", &saving);
    let (expected, hf) = (losses(&place, "threads").split_off(&5), place.at("hf"));
    let middle = |name: &str| format!("{}/checkpoints/step-00000004", place.at(name));
    let end = |name: &str| format!("{}/checkpoints/step-00000008", place.at(name));
    train(&place, 2, "on-processes", &["--resume", &middle("threads"), "--export-hf", &hf]);
    train_on_threads(&place, "on-threads", &["--resume", &middle("processes")]);
    for name in ["on-processes", "on-threads"] {
        assert_eq!(losses(&place, name), expected, "{name}");
        assert_eq!(succeeds(&["ckpt", "diff", &end("threads"), &end(name), "--json"]), "", "{name}");
    }
    assert!(Path::new(&hf).join("model.safetensors").is_file() && Path::new(&hf).join("config.json").is_file());
    // another number of processes takes another mesh
    let resumed = ["train", "--out", &place.at("four"), "--resume", &middle("threads")];
    on(&place, 4, &resumed).failed_with(&["dp=2", "job of 4", "mpirun -n 2", "--mesh dp=4"]);
    train(&place, 4, "four", &["--resume", &middle("threads"), "--mesh", "tp=2,dp=2"]);
    let found = losses(&place, "four");
    let close = |(step, loss): (&u64, &f64)| (loss - expected[step]).abs() < 2e-5 * loss;
    assert!(found.len() == 4 && found.iter().all(close), "{found:?}, not {expected:?}");
}

#[test]
fn commands_of_one_rank_run_and_print_once() {
    let place = Place::new("mpi-once");
    let summary = train(&place, 1, "run", &[&TINY[..], &["--steps", "1"]].concat());
    let checkpoint = summary["checkpoint"].as_str().unwrap();
    for arguments in [
        &["ckpt", "inspect", checkpoint, "--json"][..],
        &["ckpt", "verify", checkpoint, "--json"],
        &["ckpt", "dry-load", checkpoint, "--mesh", "dp=2", "--json"],
        &["ops", "--json"],
        &["ops", "matmul", "--json"],
    ] {
        assert_eq!(on(&place, 2, arguments).printed(), succeeds(arguments), "{arguments:?}");
    }
    assert_eq!(on(&place, 2, &["train", "--help"]).printed().matches("Examples:").count(), 1);
    let copy = place.at("copy");
    let said = on(&place, 4, &["ckpt", "convert", checkpoint, &copy, "--dtype", "bf16"]).printed();
    assert_eq!((said.lines().count(), said.matches(&copy).count()), (1, 1), "{said}");
    let differs = on(&place, 2, &["ckpt", "diff", checkpoint, &copy, "--json"]);
    assert_eq!(differs.stdout.matches("\"model.tokens.weight\"").count(), 1, "{}", differs.stdout);
    assert!(!differs.success);
    // it takes its time, and the second process has nothing to do with it
    let mut second = Command::new(PROGRAM);
    let second = second.args(["bench", "dispatch"]).env("PMI_RANK", "1").env("PMI_SIZE", "2").output().unwrap();
    assert!(second.status.success() && second.stdout.is_empty() && second.stderr.is_empty(), "{second:?}");
}

#[test]
fn generation_on_processes_gives_the_tokens_of_threads() {
    let place = Place::new("mpi-generate");
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../shardwise/tests/conformance/data/models");
    let (llama, bert) = (format!("{data}/llama_gqa"), format!("{data}/bert"));
    train(&place, 1, "run", &[&TINY[..], &["--steps", "1"]].concat());
    for arguments in [
        &["generate", &llama, "--prompt", "hello world", "--max-tokens", "6", "--json"][..],
        &["generate", &llama, "--chat", "--prompt", "hello", "--max-tokens", "6", "--temperature", "1", "--json"],
        &["generate", &place.at("run"), "--max-tokens", "8", "--json"],
    ] {
        let (alone, found) = (json(&succeeds(arguments)), json(&on(&place, 2, arguments).printed()));
        assert_eq!((&found["tokens"], &found["text"]), (&alone["tokens"], &alone["text"]), "{arguments:?}");
        assert_eq!((&found["mesh"], found["peak_memory_bytes"].as_array().unwrap().len()), (&"tp=2".into(), 2));
    }
    let sentences = place.file("sentences.txt", "one sentence\nand another one\nand a third");
    let embed = ["embed", &bert, &sentences, "--normalize"];
    let numbers = |text: String| -> Vec<f64> {
        let rows = text.lines().map(json).flat_map(|row| row["embedding"].as_array().unwrap().clone());
        rows.map(|value| value.as_f64().unwrap()).collect()
    };
    let (alone, found) = (numbers(succeeds(&embed)), numbers(on(&place, 2, &embed).printed()));
    assert!(alone.len() == found.len() && alone.iter().zip(&found).all(|(a, b)| (a - b).abs() < 1e-5));
    // errors that every process finds are printed once
    on(&place, 2, &["generate", &llama]).failed_with(&["invalid prompt", "--batch"]);
    on(&place, 2, &["generate", &llama, "--prompt", "a", "--mesh", "tp=3"]).failed_with(&["tp=3", "job of 2"]);
    on(&place, 2, &["generate", &place.at("none"), "--prompt", "a"]).failed_with(&["invalid model", "none"]);
}

#[test]
fn smollm2_gives_the_recorded_tokens_on_1_to_4_processes() {
    let Some(model) = public_model("smollm2") else { return };
    let place = Place::new("mpi-smollm2");
    let recorded =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../shardwise/tests/conformance/data/models/smollm2/cases.json");
    let recorded = json(&std::fs::read_to_string(recorded).unwrap());
    let cases = recorded["cases"].as_array().unwrap();
    let request = |case: &Value| match case["messages"].is_null() {
        true => serde_json::json!({ "prompt": case["text"] }).to_string(),
        false => serde_json::json!({ "messages": case["messages"] }).to_string(),
    };
    let prompts = place.file("prompts.jsonl", cases.iter().map(request).collect::<Vec<_>>().join("\n"));
    let tokens = cases.iter().map(|case| case["greedy"].as_array().unwrap().len()).max().unwrap().to_string();
    let model = model.to_str().unwrap();
    let arguments = ["generate", model, "--batch", &prompts, "--max-tokens", &tokens, "--temperature", "0", "--json"];
    for (processes, more) in [(1, &[][..]), (2, &[]), (3, &[]), (4, &[]), (3, &["--quantized"])] {
        let found = on(&place, processes, &[&arguments[..], more].concat()).printed();
        let rows: Vec<Value> = found.lines().map(json).collect();
        assert_eq!(rows.len(), cases.len(), "each is printed once: {found}");
        for (row, case) in rows.iter().zip(cases) {
            assert_eq!(row["tokens"], case["greedy"], "{} on {processes} process(es)", case["id"]);
            assert_eq!(row["text"], case["greedy_text"], "{} on {processes} process(es)", case["id"]);
            assert_eq!(row["mesh"], format!("tp={processes}"));
        }
    }
    // Text, notes and figures come from the first process.
    let text = cases.iter().find(|case| case["messages"].is_null()).unwrap()["text"].as_str().unwrap();
    let ended = on(&place, 2, &["generate", model, "--prompt", text, "--max-tokens", "4", "--temperature", "0"]);
    assert_eq!(ended.stdout.matches(text).count(), 1, "{}", ended.stdout);
    for said in ["dequantized to f32", "4 new token(s)"] {
        assert_eq!(ended.stderr.matches(said).count(), 1, "{}", ended.stderr);
    }
    on(&place, 2, &["generate", model, "--prompt", "a", "--top-p", "7"]).failed_with(&["top"]);
}

#[test]
fn benchmarks_measure_the_processes_of_the_job() {
    let place = Place::new("mpi-bench");
    let rows = |processes: usize, arguments: &[&str]| -> Vec<Value> {
        let arguments = [&["bench"], arguments, &["--json"]].concat();
        on(&place, processes, &arguments).printed().lines().map(json).collect()
    };
    let found = rows(2, &["redistribute", "--mb", "1"]);
    let cases: Vec<&str> = found.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["small S0->R", "1MB S0->R", "1MB S0->S1", "1MB P->R", "1MB P->S0"]);
    assert!(found.iter().all(|row| row["world"] == 2 && row["ms"].as_f64().unwrap() > 0.0), "{found:?}");
    let found = rows(2, &["train", "--steps", "1"]);
    let modes: Vec<(&str, u64)> =
        found.iter().map(|row| (row["mode"].as_str().unwrap(), row["world"].as_u64().unwrap())).collect();
    assert_eq!(modes, [("ddp", 2), ("tp", 2), ("fsdp", 2)]);
    let dir = place.at("ckpt");
    let found = rows(3, &["ckpt", "--mb", "16", "--repeats", "1", "--dir", &dir]);
    assert!(found.len() == 5 && found.iter().all(|row| row["s"].as_f64().unwrap() > 0.0), "{found:?}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    on(&place, 2, &["bench", "redistribute", "--ranks", "2,4"]).failed_with(&["[2, 4]", "job of 2"]);
    on(&place, 2, &["bench", "train", "--modes", "ddp,single"]).failed_with(&["single", "job of 2", "mpirun -n 1"]);
    on(&place, 2, &["bench", "ckpt", "--dir", &place.file("taken", "")]).failed_with(&["--dir", "taken"]);
}

#[test]
fn a_failure_of_all_processes_is_reported_once() {
    let place = Place::new("mpi-failures");
    let out = place.at("out");
    let begin = ["train", "--out", &out];
    let more = [&begin[..], &TINY].concat();
    on(&place, 2, &[&begin[..], &["--meshh", "dp=2"]].concat()).failed_with(&["--meshh"]);
    on(&place, 4, &[&begin[..], &["--mesh", "dp=2,tp=1"]].concat()).failed_with(&["dp=2,tp=1", "job of 4", "-n 2"]);
    Job::of_line(&place, 2, &format!("SHARDWISE_DEADLINE=soon exec {PROGRAM} bench ckpt"))
        .end()
        .failed_with(&["SHARDWISE_DEADLINE=soon"]);
    assert!(!Path::new(&out).exists());
    // found only by rank 0, while the other ranks wait
    on(&place, 2, &[&more[..], &["--log", &place.at("no/such/log")]].concat())
        .failed_with(&["invalid log", "no/such/log"]);
    let taken = place.file("taken", "");
    on(&place, 2, &["train", "--out", &format!("{taken}/out")]).failed_with(&["invalid output directory", "taken"]);
    on(&place, 2, &[&more[..], &["--steps", "20", "--lr", "1e30"]].concat()).failed_with(&["training", "smaller"]);
    if Path::new("/dev/full").exists() {
        on(&place, 2, &[&more[..], &["--log", "/dev/full", "--overwrite"]].concat()).failed_with(&["No space left"]);
    }
    // found by each rank, and reported once
    let summary = train(&place, 1, "run", &[&TINY[..], &["--steps", "2"]].concat());
    let incomplete = place.at("incomplete");
    let renamed = ["--rename", "generator\\.(.*)=other.$1"];
    succeeds(&[&["ckpt", "convert", summary["checkpoint"].as_str().unwrap(), &incomplete], &renamed[..]].concat());
    let resumed = ["train", "--out", &place.at("resumed"), "--mesh", "dp=2", "--resume", &incomplete];
    on(&place, 2, &resumed).failed_with(&["invalid checkpoint", "generator"]);
}

#[test]
fn two_jobs_do_not_share_an_output_directory_and_waiting_is_measured() {
    let place = Place::new("mpi-locked");
    let (out, log) = (place.at("run"), place.at("run.jsonl"));
    let arguments = training(&place, "run", &[&TINY[..], &["--steps", "1000000", "--overwrite"]].concat());
    let program: Vec<&str> = std::iter::once(PROGRAM).chain(arguments.iter().map(String::as_str)).collect();
    // The first job has files of its own for its output.
    let first = Place::new("mpi-locked-first");
    let mut job = Job::start(&first, 2, &program);
    let since = Instant::now();
    while !Path::new(&log).exists() || losses(&place, "run").len() < 20 {
        assert!(since.elapsed() < LIMIT, "a few steps");
        std::thread::sleep(Duration::from_millis(5));
    }
    on(&place, 2, &program[1..]).failed_with(&[&out, "another run", "choose another --out"]);
    assert!(job.launcher.try_wait().unwrap().is_none());
    job.launcher.kill().unwrap();
    job.launcher.wait().unwrap();
    // No rank comes to a collective at exactly the time of the other.
    let waited = |rank: usize| -> f64 {
        let steps = read(&log);
        let complete = steps.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        complete.filter_map(|line| line["ranks"][rank]["waiting"].as_f64()).sum()
    };
    assert!(waited(0) > 0.0 && waited(1) > 0.0, "{} and {}", waited(0), waited(1));
}

#[test]
fn a_process_that_reads_different_files_is_named() {
    let place = Place::new("mpi-files");
    let text = place.file("text-0", "what the first process reads ".repeat(80));
    let line = |out: &str| format!("exec {PROGRAM} train --data {} --out {out}", text.replace("-0", "-$rank"));
    let out = place.at("out");
    Job::of_line(&place, 2, &line(&out)).end().failed_with(&["on rank 1", "text-1"]);
    place.file("text-1", "what the second process reads ".repeat(80));
    Job::of_line(&place, 2, &line(&out)).end().failed_with(&["ranks disagree", "seed and text"]);
    assert!(!Path::new(&out).exists());
}

#[test]
fn an_interrupt_of_any_process_stops_all_of_them_and_saves_a_checkpoint() {
    let place = Place::new("mpi-interrupt");
    let endless = |name: &str, more: &[&str]| {
        let arguments = training(&place, name, &[&TINY[..], &["--steps", "1000000"], more].concat()).join(" ");
        Job::of_line(&place, 2, &format!("echo $$ > {}-$rank; exec {PROGRAM} {arguments}", place.at("pid")))
    };
    let wait_for = |what: &str, done: &dyn Fn() -> bool| {
        let since = Instant::now();
        while !done() {
            assert!(since.elapsed() < LIMIT, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let interrupt = |rank: usize| {
        let process = read(&place.at(&format!("pid-{rank}")));
        assert!(Command::new("kill").args(["-INT", process.trim()]).status().unwrap().success());
    };
    let job = endless("out", &[]);
    wait_for("a first step", &|| Path::new(&place.at("out.jsonl")).exists() && !losses(&place, "out").is_empty());
    interrupt(1);
    let summary = json(&job.end().printed());
    assert!(summary["stopped"] == true && Path::new(summary["checkpoint"].as_str().unwrap()).is_dir(), "{summary}");

    // a second time ends it at once, also where no rank waits for another one
    let job = endless("long", &["--sample-every", "1", "--sample-tokens", "100000000"]);
    wait_for("a first step", &|| Path::new(&place.at("long.jsonl")).exists() && !losses(&place, "long").is_empty());
    interrupt(1);
    // two signals at once may be one
    std::thread::sleep(Duration::from_millis(200));
    interrupt(1);
    let ended = job.end();
    assert!(!ended.success && ended.stderr.contains("rank 1 aborted: it was interrupted"), "{}", ended.stderr);
}
